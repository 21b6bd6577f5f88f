// Few queries: codes go from the page through registers into scores and outputs, and no tile is written.
//
// Sparse corrections are added to the scores and to the outputs directly, one by one.
#pragma once
#include "layer.h"

namespace {

// A table of up to 64 levels in registers.
struct Table {
  Vec v[4];
};
template <int W>
KV_INLINE Table table_at(const float* p) {
  Table t{};
  for (int i = 0; i == 0 || kLanes * i < 1 << W; ++i) t.v[i] = load(p + kLanes * i);
  return t;
}
// table * step + base: cheaper than the same for whatever is looked up.
template <int W>
KV_INLINE Table scaled(Table t, float step, float base) {
  const Vec a = splat(step), b = splat(base);
  for (int i = 0; i == 0 || kLanes * i < 1 << W; ++i) t.v[i] = fma(t.v[i], a, b);
  return t;
}

template <int NQ>
struct Sums {
  Vec a[NQ][kHalves], b[NQ][kHalves];
};

struct RunOf {          // where a run is, and what it is multiplied with
  const uint8_t* record;
  int64_t half_bytes, next_page;
  Run run;
  const float* table;
  const int32_t* units;
  int pairs;
  const float *step, *base;   // per channel
  const float *relative, *query;
};

// Pairs of one run against NQ queries, for kHalves * 16 tokens.
template <int W, bool trellis, int NQ, bool ranged>
static void score_run(const RunOf in, Sums<NQ>& result) {
  constexpr int bits = window_bits<W, trellis>;
  const uint8_t* record = in.record;
  const float* table = in.table;
  Wide wide;
  if constexpr (is_wide<W, trellis>) wide = wide_at<bits>(table);
  Sums<NQ> s = result;
  for (int j = 0; j < in.run.units; ++j, record += 4 * W, table += 2 * in.run.table_step) {
    const int c = in.units[j], d = c + in.pairs;
    for (int h = 0; h < kHalves; ++h) __builtin_prefetch(record + in.next_page + h * in.half_bytes);
    Vec x[kHalves], y[kHalves];
    if constexpr (is_wide<W, trellis>) {
      const Vec step[2] = {splat(in.step[c]), splat(in.step[d])}, base[2] = {splat(in.base[c]), splat(in.base[d])};
      for (int h = 0; h < kHalves; ++h) {
        const uint8_t* half = record + h * in.half_bytes;
        pick_two<bits>(windows<W, bits - W, 0>(half), windows<W, bits - W, 1>(half), wide, x[h], y[h]);
        x[h] = fma(x[h], step[0], base[0]), y[h] = fma(y[h], step[1], base[1]);
      }
    } else {
      Table first = table_at<bits>(table), second = table_at<bits>(table + in.run.table_step);
      if constexpr (ranged) {
        first = scaled<bits>(first, in.step[c], in.base[c]);
        second = scaled<bits>(second, in.step[d], in.base[d]);
      }
      for (int h = 0; h < kHalves; ++h) {
        x[h] = pick_from<bits>(windows<W, bits - W, 0>(record + h * in.half_bytes), first.v);
        y[h] = pick_from<bits>(windows<W, bits - W, 1>(record + h * in.half_bytes), second.v);
      }
    }
    if (in.run.rotates)
      for (int h = 0; h < kHalves; ++h) {
        const float* angle = in.relative + c * 2 * kPage + h * kLanes;
        const Vec cosine = load(angle), sine = load(angle + kPage), a = x[h];
        x[h] = fnma(y[h], sine, mul(a, cosine));
        y[h] = fma(a, sine, mul(y[h], cosine));
      }
    for (int n = 0; n < NQ; ++n) {
      const Vec qa = splat(in.query[4 * c + n]), qb = splat(in.query[4 * d + n]);
      for (int h = 0; h < kHalves; ++h) {
        s.a[n][h] = fma(qa, x[h], s.a[n][h]);
        s.b[n][h] = fma(qb, y[h], s.b[n][h]);
      }
    }
  }
  result = s;
}

// scores [NQ, 32] += correction * scale * (the query, turned to the token). query: quads [D].
template <int NQ>
static void correct_scores(const uint8_t* page, const Layer& layer, int head, const float* query, float* scores,
                           int64_t score_step) {
  const Side& key = layer.key;
  if (key.corrections_at < 0) return;
  const float *scale = key.scale + static_cast<int64_t>(head) * key.padded, *relative = layer.relative;
  const uint8_t *positions = page + key.positions_at, *corrections = page + key.corrections_at;
  const uint8_t* row = page + key.rows_at + 4 * head;
  const int pairs = key.dim / 2, end = uint16_at(row + 4);
  alignas(64) float quads[4 * kPage];
  for (int i = 0; i < 4 * kPage; i += kLanes) store(quads + i, splat(0.0f));
  Batch b;
  for (int from = uint16_at(row); from < end; from += kBatch) {
    const int count = end - from < kBatch ? end - from : kBatch;
    key_batch(positions + 2 * from, corrections + 2 * from, count, scale, relative, pairs, b);
    for (int i = 0; i < count; ++i) {
      add_quad(quads + b.token[i], query + b.same[i], b.along[i]);
      add_quad(quads + b.token[i], query + b.other[i], b.across[i]);
    }
  }
  for (int at = 0; at < kPage; at += kLanes) {
    Vec rows[4];
    for (int k = 0; k < 4; ++k) rows[k] = load(quads + 4 * at + k * kLanes);
    transpose4(rows);
    for (int n = 0; n < NQ; ++n) {
      float* p = scores + n * score_step + at;
      store(p, add(load(p), rows[n]));
    }
  }
}

// query: quads [D] as seen from the start of the page -> scores [NQ, 32].
template <bool trellis, int NQ, bool ranged>
static void decode_scores(const uint8_t* page, const Layer& layer, int head, const float* step, const float* base,
                          const float* query, float* scores, int64_t score_step) {
  const Side& key = layer.key;
  const int64_t half_bytes = (key.head_at[head + 1] - key.head_at[head]) / 2;
  const int pairs = key.dim / 2;
  for (int half = 0; half < 2; half += kHalves) {
    RunOf in{page + key.codes_at + key.head_at[head] + half * half_bytes, half_bytes, layer.page_bytes, {}, nullptr,
             key.units + static_cast<int64_t>(head) * pairs, pairs, step, base, layer.relative + half * kLanes, query};
    if (ranged) in.step += half * key.dim, in.base += half * key.dim;
    Sums<NQ> sums;
    for (int n = 0; n < NQ; ++n)
      for (int h = 0; h < kHalves; ++h) sums.a[n][h] = sums.b[n][h] = splat(0.0f);
    for (int r = key.run_at[head]; r < key.run_at[head + 1]; ++r) {
      in.run = key.runs[r], in.table = key.tables + in.run.table;
      switch (in.run.width) {
#define KV_CASE(W) \
  case W: score_run<W, trellis, NQ, ranged>(in, sums); break;
        KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6)
#undef KV_CASE
      }
      in.record += 4 * in.run.width * in.run.units, in.units += in.run.units;
    }
    for (int n = 0; n < NQ; ++n)
      for (int h = 0; h < kHalves; ++h)
        store(scores + n * score_step + (half + h) * kLanes, add(sums.a[n][h], sums.b[n][h]));
  }
  correct_scores<NQ>(page, layer, head, query, scores, score_step);
}

// Whether decode_scores and decode_values can read the pages of a layer.
static bool decodes_keys(const Side& key) {
  const bool one_range = key.range == kStatic || (key.range == kGroup && key.group >= kHalves * kLanes);
  return key.coded && one_range && key.narrow;
}
static bool decodes_values(const Side& value, int heads) {
  const bool one_range = value.range == kStatic || (value.range == kToken && value.cells <= heads);
  return value.coded && one_range && value.narrow && !value.channel_books;
}

// One tile of 16 channels: out [NQ, 16] += weights [NQ, 32] @ levels.
template <int W, bool trellis, int NQ>
static void value_tiles(const uint8_t* record, int64_t next_page, const Run run, const float* table, const float* weights, float* out,
                        int padded) {
  constexpr int bits = window_bits<W, trellis>;
  Table levels;
  Wide wide;
  if constexpr (is_wide<W, trellis>) wide = wide_at<bits>(table);
  else levels = table_at<bits>(table);
  for (int tile = 0; tile < run.units; ++tile, out += kLanes) {
    Vec even[NQ], odd[NQ];
    for (int n = 0; n < NQ; ++n) even[n] = load(out + n * padded), odd[n] = splat(0.0f);
    Codes b = no_codes();
    for (int t = 0; t < kPage; t += 2, record += 4 * W) {
      __builtin_prefetch(record + next_page);
      const Codes a = next_windows<W, bits - W, 0>(record, b);
      b = next_windows<W, bits - W, 1>(record, a);
      Vec x, y;
      if constexpr (is_wide<W, trellis>) pick_two<bits>(a, b, wide, x, y);
      else x = pick_from<bits>(a, levels.v), y = pick_from<bits>(b, levels.v);
      for (int n = 0; n < NQ; ++n) {
        even[n] = fma(splat(weights[n * kPage + t]), x, even[n]);
        odd[n] = fma(splat(weights[n * kPage + t + 1]), y, odd[n]);
      }
    }
    for (int n = 0; n < NQ; ++n) store(out + n * padded, add(even[n], odd[n]));
  }
}

// quads [2, padded] += weights * correction. Neighbours in a page often share a channel, so every other one goes to the
// second copy, and their additions need not wait for each other.
template <int NQ>
static void correct_values(const uint8_t* page, const Side& value, int head, const float* weights, int64_t weight_step,
                           float* quads) {
  const uint8_t *positions = page + value.positions_at, *corrections = page + value.corrections_at;
  const uint8_t* row = page + value.rows_at + 4 * head;
  const int end = uint16_at(row + 4);
  alignas(64) float weight[4 * kPage];
  for (int at = 0; at < kPage; at += kLanes) {
    Vec rows[4];
    for (int n = 0; n < 4; ++n) rows[n] = n < NQ ? load(weights + n * weight_step + at) : splat(0.0f);
    transpose4(rows);
    for (int k = 0; k < 4; ++k) store(weight + 4 * at + k * kLanes, rows[k]);
  }
  float* const copies[2] = {quads, quads + 4 * value.padded};
  Batch b;
  for (int from = uint16_at(row); from < end; from += kBatch) {
    const int count = end - from < kBatch ? end - from : kBatch;
    value_batch(positions + 2 * from, corrections + 2 * from, count, b);
    for (int i = 0; i < count; ++i) add_quad(copies[i % 2] + b.same[i], weight + b.token[i], b.along[i]);
  }
}

// out [NQ, padded] += quads [2, padded], which start anew.
template <int NQ>
static void fold_quads(float* quads, int padded, float* out) {
  for (int c = 0; c < padded; c += kLanes) {
    Vec rows[4];
    for (int k = 0; k < 4; ++k) {
      float *first = quads + 4 * c + k * kLanes, *second = first + 4 * padded;
      rows[k] = add(load(first), load(second));
      store(first, splat(0.0f)), store(second, splat(0.0f));
    }
    transpose4(rows);
    for (int n = 0; n < NQ; ++n) {
      float* p = out + static_cast<int64_t>(n) * padded + c;
      store(p, add(load(p), rows[n]));
    }
  }
}

// out [NQ, padded] += weights [NQ, 32] @ values, offset [NQ] += weights @ base of every token. work: 32 * NQ floats.
template <bool trellis, int NQ>
static void decode_values(const uint8_t* page, const Layer& layer, int head, const float* weights, int64_t weight_step,
                          float* work, float* out, float* offset, float* quads) {
  const Side& value = layer.value;
  const int padded = value.padded;
  Vec step[2] = {splat(1.0f), splat(1.0f)}, base[2] = {splat(0.0f), splat(0.0f)};
  if (value.range == kToken) {
    token_vectors(page + value.step_at, value, head, step);
    if (value.base_at >= 0) token_vectors(page + value.base_at, value, head, base);
    for (int i = 0; i < 2; ++i) base[i] = fma(step[i], splat(value.center), base[i]);
  }
  for (int n = 0; n < NQ; ++n) {
    const Vec low = load(weights + n * weight_step), high = load(weights + n * weight_step + kLanes);
    store(work + n * kPage, mul(low, step[0])), store(work + n * kPage + kLanes, mul(high, step[1]));
    if (value.base_at >= 0) offset[n] += sum(fma(low, base[0], mul(high, base[1])));
  }
  const uint8_t* record = page + value.codes_at + value.head_at[head];
  float* to = out;
  for (int r = value.run_at[head]; r < value.run_at[head + 1]; ++r) {
    const Run run = value.runs[r];
    const float* table = value.tables + run.table;
    switch (run.width) {
#define KV_CASE(W) \
  case W: value_tiles<W, trellis, NQ>(record, layer.page_bytes, run, table, work, to, padded); break;
      KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6)
#undef KV_CASE
    }
    record += static_cast<int64_t>(2) * run.width * kPage * run.units, to += run.units * kLanes;
  }
  if (value.corrections_at >= 0) correct_values<NQ>(page, value, head, weights, weight_step, quads);
}

}  // namespace
