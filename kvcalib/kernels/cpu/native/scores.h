// Scores of queries against a tile of 32 keys, the running softmax, and its product with a tile of 32 values.
#pragma once
#include "layer.h"

namespace {

// 2**x for x <= 0; exactly 0 below 2**-126, NaN for NaN (so orders of operands count). On [-1/2, 1/2] a polynomial, least relative error (2e-9 before rounding).
KV_INLINE Vec exp2_of(Vec x) {
  const Vec lowest = splat(-126.0f), kept = vmax(lowest, x), whole = round_even(kept), f = sub(kept, whole);
  Vec p = splat(0x1.41fbbap-13f);
  p = fma(p, f, splat(0x1.5f3e54p-10f));
  p = fma(p, f, splat(0x1.3b2d4cp-7f));
  p = fma(p, f, splat(0x1.c6aee8p-5f));
  p = fma(p, f, splat(0x1.ebfbdcp-3f));
  p = fma(p, f, splat(0x1.62e43p-1f));
  p = fma(p, f, splat(1.0f));
  return where_at_least(splat(-0x1.f80002p+6f), x, splat(0.0f), times_power_of_two(p, whole));
}

// tanh: odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
KV_INLINE Vec tanh_of(Vec x) {
  const Vec a = magnitude(x), y = mul(x, x);
  Vec p = splat(0x1.360972p-9f);
  p = fma(p, y, splat(-0x1.12e326p-7f));
  p = fma(p, y, splat(0x1.64c3ecp-6f));
  p = fma(p, y, splat(-0x1.ba076cp-5f));
  p = fma(p, y, splat(0x1.1110d4p-3f));
  p = fma(p, y, splat(-0x1.555554p-2f));
  const Vec near = fma(mul(p, y), x, x);
  const Vec e = exp2_of(mul(a, splat(-2.885390081777927f)));  // exp(-2a)
  const Vec far = with_sign(div(sub(splat(1.0f), e), add(splat(1.0f), e)), x);
  return where_at_least(a, splat(0.55f), far, near);
}

// One pair of channels of kHalves * 16 keys, turned by the angle relative to the start of the page.
template <bool rotated>
KV_INLINE void pair_of(const float* tile, const float* relative, int pair, int pairs, int at, Vec& a, Vec& b) {
  const Vec x = load(tile + pair * kPage + at), y = load(tile + (pair + pairs) * kPage + at);
  if constexpr (rotated) {
    const Vec cosine = load(relative + pair * 2 * kPage + at), sine = load(relative + (pair * 2 + 1) * kPage + at);
    a = fnma(y, sine, mul(x, cosine));
    b = fma(x, sine, mul(y, cosine));
  } else {
    a = x, b = y;
  }
}

template <int NQ, bool rotated>
KV_INLINE void dot_pairs(const float* query, int64_t query_step, const float* tile, const float* relative, int first,
                         int last, int pairs, int at, Vec (&sums)[NQ][kHalves], Vec (&more)[NQ][kHalves]) {
  for (int i = first; i < last; ++i) {
    Vec a[kHalves], b[kHalves];
    for (int h = 0; h < kHalves; ++h) pair_of<rotated>(tile, relative, i, pairs, at + h * kLanes, a[h], b[h]);
    for (int n = 0; n < NQ; ++n) {
      const Vec qa = splat(query[n * query_step + i]), qb = splat(query[n * query_step + i + pairs]);
      for (int h = 0; h < kHalves; ++h) {
        sums[n][h] = fma(qa, a[h], sums[n][h]);
        Vec& other = NQ <= 4 ? more[n][h] : sums[n][h];  // a second chain of additions, where registers allow
        other = fma(qb, b[h], other);
      }
    }
  }
}

// query [NQ, D] -> scores [NQ, 32]; the first `rotating` pairs are turned on the way.
template <int NQ>
static void dots(const float* query, int64_t query_step, const float* tile, const float* relative, int rotating,
                 int pairs, float* scores, int64_t score_step) {
  for (int at = 0; at < kPage; at += kHalves * kLanes) {
    Vec sums[NQ][kHalves], more[NQ][kHalves];
    for (int n = 0; n < NQ; ++n)
      for (int h = 0; h < kHalves; ++h) sums[n][h] = more[n][h] = splat(0.0f);
    dot_pairs<NQ, true>(query, query_step, tile, relative, 0, rotating, pairs, at, sums, more);
    dot_pairs<NQ, false>(query, query_step, tile, relative, rotating, pairs, pairs, at, sums, more);
    for (int n = 0; n < NQ; ++n)
      for (int h = 0; h < kHalves; ++h)
        store(scores + n * score_step + at + h * kLanes, NQ <= 4 ? add(sums[n][h], more[n][h]) : sums[n][h]);
  }
}

static void rotate_tile(const float* relative, int rotating, int pairs, float* tile) {
  for (int i = 0; i < rotating; ++i)
    for (int at = 0; at < kPage; at += kLanes) {
      Vec a, b;
      pair_of<true>(tile, relative, i, pairs, at, a, b);
      store(tile + i * kPage + at, a), store(tile + (i + pairs) * kPage + at, b);
    }
}

template <int NQ>
static int64_t dot_blocks(int64_t from, int64_t count, const float* query, int64_t query_step, const float* tile,
                          const float* relative, int rotating, int pairs, float* scores, int64_t score_step) {
  for (; from + NQ <= count; from += NQ)
    dots<NQ>(query + from * query_step, query_step, tile, relative, rotating, pairs, scores + from * score_step,
             score_step);
  return from;
}

// Many queries share a tile that is turned once; few turn it as they read it.
static void all_dots(int64_t count, const float* query, int64_t query_step, float* tile, const float* relative,
                     int rotating, int pairs, float* scores, int64_t score_step) {
  if (rotating && count > kMaxQueries) {
    rotate_tile(relative, rotating, pairs, tile);
    rotating = 0;
  }
  int64_t from = 0;
  if constexpr (kMaxQueries >= 8)
    from = dot_blocks<8>(from, count, query, query_step, tile, relative, rotating, pairs, scores, score_step);
  if constexpr (kMaxQueries >= 4)
    from = dot_blocks<4>(from, count, query, query_step, tile, relative, rotating, pairs, scores, score_step);
  if constexpr (kMaxQueries >= 4)
    from = dot_blocks<3>(from, count, query, query_step, tile, relative, rotating, pairs, scores, score_step);
  from = dot_blocks<2>(from, count, query, query_step, tile, relative, rotating, pairs, scores, score_step);
  dot_blocks<1>(from, count, query, query_step, tile, relative, rotating, pairs, scores, score_step);
}

// scores [width], in units of log2 -> weights, against the running maximum; out, total, offset: what it has so far.
static void softmax_step(float* scores, int64_t width, float& maximum, float& total, float& offset,
                         float* out, int padded) {
  Vec top = load(scores);
  for (int64_t i = kLanes; i < width; i += kLanes) top = vmax(top, load(scores + i));
  const float block = largest(top);
  if (block > maximum) {
    const float shrink = __builtin_isinf(maximum) ? 0.0f : __builtin_exp2f(maximum - block);
    maximum = block, total *= shrink, offset *= shrink;
    for (int c = 0; c < padded; c += kLanes) store(out + c, mul(load(out + c), splat(shrink)));
  }
  const Vec shift = splat(maximum == -__builtin_inff() ? 0.0f : maximum);
  Vec sums = splat(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec weight = exp2_of(sub(load(scores + i), shift));
    sums = add(sums, weight);
    store(scores + i, weight);
  }
  total += sum(sums);
  if (total != total) maximum = total;  // a score is NaN or infinite: so is the output
}

template <int NQ, int NT>
KV_INLINE void accumulate_tiles(const float* weights, int64_t weight_step, const float* tile, int padded, float* out) {
  Vec sums[NQ][NT];
  for (int n = 0; n < NQ; ++n)
    for (int j = 0; j < NT; ++j) sums[n][j] = load(out + static_cast<int64_t>(n) * padded + j * kLanes);
  for (int t = 0; t < kPage; ++t) {
    Vec x[NT];
    for (int j = 0; j < NT; ++j) x[j] = load(tile + t * padded + j * kLanes);
    for (int n = 0; n < NQ; ++n) {
      const Vec w = splat(weights[n * weight_step + t]);
      for (int j = 0; j < NT; ++j) sums[n][j] = fma(w, x[j], sums[n][j]);
    }
  }
  for (int n = 0; n < NQ; ++n)
    for (int j = 0; j < NT; ++j) store(out + static_cast<int64_t>(n) * padded + j * kLanes, sums[n][j]);
}

template <int NQ>
static int64_t accumulate_blocks(int64_t from, int64_t count, const float* weights, int64_t weight_step,
                                 const float* tile, int padded, float* out) {
  for (; from + NQ <= count; from += NQ) {
    int c = 0;
    for (; c + kMaxTiles * kLanes <= padded; c += kMaxTiles * kLanes)
      accumulate_tiles<NQ, kMaxTiles>(weights + from * weight_step, weight_step, tile + c, padded,
                                      out + from * padded + c);
    for (; c < padded; c += kLanes)
      accumulate_tiles<NQ, 1>(weights + from * weight_step, weight_step, tile + c, padded, out + from * padded + c);
  }
  return from;
}

// out [count, padded] += weights [count, 32] @ tile [32, padded]
static void all_accumulate(int64_t count, const float* weights, int64_t weight_step, const float* tile, int padded,
                           float* out) {
  int64_t from = 0;
  if constexpr (kMaxQueries >= 4) {
    from = accumulate_blocks<4>(from, count, weights, weight_step, tile, padded, out);
    from = accumulate_blocks<3>(from, count, weights, weight_step, tile, padded, out);
  }
  from = accumulate_blocks<2>(from, count, weights, weight_step, tile, padded, out);
  accumulate_blocks<1>(from, count, weights, weight_step, tile, padded, out);
}

}  // namespace
