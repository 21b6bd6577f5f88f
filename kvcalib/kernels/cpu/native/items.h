// One item of work: some queries of one row and kv head against one chunk of its pages, or of its exact tokens.
//
// Blocks of pages go through three steps: scores of all their keys, one step of the running softmax, weights times
// values. Scores are kept in units of log2.
#pragma once
#include "layer.h"

namespace {

constexpr int kFewQueries = 4;
constexpr float kLog2E = 1.4426950408889634f;

// Memory of one thread, cut from one allocation.
struct Scratch {
  float *query, *turned, *key_tile, *value_tile, *work, *scores, *ones, *offset, *quads;
  double* angle;
  int64_t block;       // pages of a block
  int64_t score_step;
};

static int64_t scratch_floats(const Layer& layer, int64_t queries, Scratch* s, float* from) {
  const int64_t dim = layer.key.dim, padded = layer.value.padded, widest = dim > padded ? dim : padded;
  const int64_t block = queries > 64 ? 1 : queries > 16 ? 4 : 8;
  const int64_t rows = queries < kFewQueries ? kFewQueries : queries;
  const int64_t sizes[] = {rows * dim, rows * dim, dim * kPage, padded * kPage, 8 * widest * kPage + 4 * dim,
                           queries * block * kPage, widest, queries, 8 * widest, 4 * dim};
  float** const parts[] = {&s->query, &s->turned, &s->key_tile, &s->value_tile, &s->work,
                           &s->scores, &s->ones, &s->offset, &s->quads};
  int64_t at = 0;
  for (int i = 0; i < 10; ++i) {
    if (from && i < 9) *parts[i] = from + at;
    if (from && i == 9) s->angle = reinterpret_cast<double*>(from + at);
    at += (sizes[i] + 15) / 16 * 16;
  }
  s->block = block, s->score_step = block * kPage;
  return at;
}

struct Work {
  const Layer& layer;
  const Call& call;
  const Item& item;
  Scratch s;
  int64_t group, count;   // query heads per kv head, queries of the item times group
  float *maximum, *total, *out;
  bool decodes_keys, decodes_values;   // few queries, and pages that decode.h reads
};

// Queries of the item, [count, D], times `factor`; order: canonical channels, or null for the model's own. With
// `quads` as [D, 4].
static void gather_queries(const Work& w, const int64_t* order, float factor, bool quads, float* to) {
  const Call& call = w.call;
  if (quads) __builtin_memset(to, 0, 4 * w.layer.key.dim * sizeof(float));
  for (int64_t n = 0; n < w.count; ++n) {
    const int64_t token = w.item.first_query + n / w.group, head = w.item.head * w.group + n % w.group;
    const float* from = call.query + w.item.row * call.query_row + head * call.query_head + token * call.query_token;
    const int64_t first = quads ? n : n * w.layer.key.dim, step = quads ? 4 : 1;
    for (int c = 0; c < w.layer.key.dim; ++c) to[first + c * step] = from[order ? order[c] : c] * factor;
  }
}

// cos and sin of position * frequency, as products over the digits of the position to base 64.
static void page_angle(const Layer& layer, int64_t position, double* __restrict angle, float* __restrict narrow) {
  const int n = layer.rotating;
  double *cosine = angle, *sine = angle + n;
  const double* __restrict turn = layer.turns + (position & 63) * 2 * n;
  __builtin_memcpy(angle, turn, 2 * n * sizeof(double));
  position >>= 6;
  for (int k = 1; k < 4 && position; ++k, position >>= 6) {
    if ((position & 63) == 0) continue;
    turn = layer.turns + (k * 64 + (position & 63)) * 2 * n;
    for (int i = 0; i < n; ++i) {
      const double c = cosine[i] * turn[i] - sine[i] * turn[n + i];
      sine[i] = cosine[i] * turn[n + i] + sine[i] * turn[i];
      cosine[i] = c;
    }
  }
  for (int i = 0; i < 2 * n; ++i) narrow[i] = static_cast<float>(angle[i]);
}

// Queries as seen from the start of a page: turned back by its first position. Quads [D]: of every channel the four
// queries side by side.
static void turn_quads(const Work& w, int64_t position, const float* query, float* turned) {
  const int pairs = w.layer.key.dim / 2, rotating = w.layer.rotating, upper = 4 * pairs;
  page_angle(w.layer, position, w.s.angle, w.s.work);
  const float *cosine = w.s.work, *sine = w.s.work + rotating;
  int i = 0;
  for (; i + 4 <= rotating; i += 4) {
    const Vec a = load(query + 4 * i), b = load(query + 4 * i + upper), c = spread4(cosine + i), s = spread4(sine + i);
    store(turned + 4 * i, fma(b, s, mul(a, c)));
    store(turned + 4 * i + upper, fnma(a, s, mul(b, c)));
  }
  for (; i < pairs; ++i)
    for (int n = 4 * i; n < 4 * i + 4; ++n) {
      const float a = query[n], b = query[n + upper], c = i < rotating ? cosine[i] : 1, s = i < rotating ? sine[i] : 0;
      turned[n] = a * c + b * s, turned[n + upper] = b * c - a * s;
    }
}

// The same for rows [count, D].
static void turn_queries(const Work& w, int64_t position, const float* query, float* turned) {
  const int dim = w.layer.key.dim, pairs = dim / 2, rotating = w.layer.rotating;
  page_angle(w.layer, position, w.s.angle, w.s.work);
  const float* __restrict cosine = w.s.work;
  const float* __restrict sine = w.s.work + rotating;
  for (int64_t n = 0; n < w.count; ++n) {
    const float* __restrict from = query + n * dim;
    float* __restrict to = turned + n * dim;
    int i = 0;
    for (; i + kLanes <= rotating; i += kLanes) {
      const Vec a = load(from + i), b = load(from + i + pairs), c = load(cosine + i), s = load(sine + i);
      store(to + i, fma(b, s, mul(a, c)));
      store(to + i + pairs, fnma(a, s, mul(b, c)));
    }
    for (; i < rotating; ++i) {
      const float a = from[i], b = from[i + pairs];
      to[i] = a * cosine[i] + b * sine[i];
      to[i + pairs] = b * cosine[i] - a * sine[i];
    }
    for (; i < pairs; ++i) to[i] = from[i], to[i + pairs] = from[i + pairs];
  }
}

static void cap_scores(float* scores, int64_t count, int64_t step, float softcap) {
  const Vec inverse = splat(1.0f / softcap), cap = splat(softcap * kLog2E);
  for (int64_t n = 0; n < count; ++n)
    for (int at = 0; at < kPage; at += kLanes) {
      float* p = scores + n * step + at;
      store(p, mul(tanh_of(mul(load(p), inverse)), cap));
    }
}

// Hides the columns from `used` on, and those that `visible` (byte per column of a query token, or null) hides.
static void hide_scores(const Work& w, int used, const uint8_t* visible, int64_t visible_step, float* scores) {
  if (used == kPage && !visible) return;
  const Vec hidden = splat(-__builtin_inff());
  for (int64_t n = 0; n < w.count; ++n) {
    uint8_t mask[kPage] = {};
    if (visible) __builtin_memcpy(mask, visible + n / w.group * visible_step, used);
    else __builtin_memset(mask, 1, used);
    for (int at = 0; at < kPage; at += kLanes) {
      float* p = scores + n * w.s.score_step + at;
      store(p, where_byte(mask + at, load(p), hidden));
    }
  }
}

template <int NQ>
static void decode_scores_with(const Work& w, const uint8_t* page, const float* query, float* scores) {
  const Layer& layer = w.layer;
  const int head = static_cast<int>(w.item.head), dim = layer.key.dim;
  float *step = w.s.work, *base = w.s.work + kPage * dim;
  if (layer.key.range == kGroup) {
    key_groups(page, layer.key, layer, head, step, base);
    decode_scores<NQ, true>(page, layer, head, step, base, query, scores, w.s.score_step);
  } else {
    decode_scores<NQ, false>(page, layer, head, nullptr, nullptr, query, scores, w.s.score_step);
  }
}

#define KV_BY_QUERIES(call)            \
  switch (w.count) {                   \
    case 1: return call<1> KV_ARGUMENTS; \
    case 2: return call<2> KV_ARGUMENTS; \
    case 3: return call<3> KV_ARGUMENTS; \
    case 4: return call<4> KV_ARGUMENTS; \
  }
static void decode_scores_of(const Work& w, const uint8_t* page, const float* query, float* scores) {
#define KV_ARGUMENTS (w, page, query, scores)
  KV_BY_QUERIES(decode_scores_with)
#undef KV_ARGUMENTS
}
static void decode_values_of(const Work& w, const uint8_t* page, const float* weights) {
#define KV_ARGUMENTS \
  (page, w.layer, static_cast<int>(w.item.head), weights, w.s.score_step, w.s.work, w.out, w.s.offset, w.s.quads)
  KV_BY_QUERIES(decode_values)
#undef KV_ARGUMENTS
}
static void fold_quads_of(const Work& w) {
#define KV_ARGUMENTS (w.s.quads, w.layer.value.padded, w.out)
  KV_BY_QUERIES(fold_quads)
#undef KV_ARGUMENTS
}

// Tokens of a chunk, 32 at a time. `used`: how many are real; `visible`: their mask, or null.
struct Pages {
  const Work& w;
  const uint8_t* first;
  const uint8_t* visible;
  const uint8_t* at(int64_t i) const { return first + i * w.layer.page_bytes; }
  static int32_t word(const uint8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return x;
  }
  int used(int64_t i) const { return word(at(i) + 4); }
  const uint8_t* mask(int64_t i) const { return visible ? visible + i * kPage : nullptr; }
  int64_t mask_step(int64_t) const { return w.call.moved_visible_token; }
  // What the codes of a head need besides: a few lines that no hardware prefetcher would guess.
  void prefetch_ranges(const uint8_t* page, const Side& side) const {
    const int64_t head = w.item.head, heads = w.layer.heads;
    if (side.range == kGroup)
      for (int64_t at = 2 * head * side.dim; at < 2 * (head + 1) * side.dim; at += 64) {
        __builtin_prefetch(page + side.step_at + at);
        __builtin_prefetch(page + side.base_at + at);
      }
    if (side.range == kToken)
      for (int64_t at = 0; at < 2 * kPage * (side.cells < heads ? side.cells : heads); at += 64) {
        __builtin_prefetch(page + side.step_at + at);
        if (side.base_at >= 0) __builtin_prefetch(page + side.base_at + at);
      }
    if (side.corrections_at < 0) return;
    const int64_t count = (side.positions_at - side.corrections_at) / 2, share = count * head / heads;
    for (int64_t i = share; i < share + (count + heads - 1) / heads; i += 32) {
      __builtin_prefetch(page + side.corrections_at + 2 * i);
      __builtin_prefetch(page + side.positions_at + 2 * i);
    }
    __builtin_prefetch(page + side.rows_at + 4 * head);
  }
  void scores(int64_t i, float* out) const {
    const Layer& layer = w.layer;
    const int64_t head = w.item.head;
    const Side& key = layer.key;
    prefetch_ranges(at(i) + layer.page_bytes, key);
    prefetch_ranges(at(i) + layer.page_bytes, layer.value);
    __builtin_prefetch(at(i) + layer.page_bytes);
    const float* query = w.s.query;
    if (layer.rotating) {
      (w.decodes_keys ? turn_quads : turn_queries)(w, word(at(i)), query, w.s.turned);
      query = w.s.turned;
    }
    if (w.decodes_keys) return decode_scores_of(w, at(i), query, out);
    key_tile(at(i), layer, head, w.s.work, w.s.key_tile);
    all_dots(w.count, query, key.dim, w.s.key_tile, layer.relative, layer.rotating, key.dim / 2, out, w.s.score_step);
  }
  void values(int64_t i, const float* weights) const {
    const Side& value = w.layer.value;
    if (w.decodes_values) return decode_values_of(w, at(i), weights);
    value_tile(at(i), w.layer, w.item.head, w.s.work, w.s.ones, w.s.value_tile);
    all_accumulate(w.count, weights, w.s.score_step, w.s.value_tile, value.padded, w.out);
  }
  void end_block() const {
    if (w.decodes_values && w.layer.value.corrections_at >= 0) fold_quads_of(w);
  }
};

// Sink tokens, then recent ones; a block never mixes the two.
struct ExactTokens {
  const Work& w;
  int64_t first, sink_blocks, sinks;
  bool is_sink(int64_t i) const { return first + i < sink_blocks; }
  const Exact& part(int64_t i) const { return is_sink(i) ? w.call.sink : w.call.recent; }
  int64_t start(int64_t i) const { return (is_sink(i) ? first + i : first + i - sink_blocks) * kPage; }
  int used(int64_t i) const {
    const int64_t left = (is_sink(i) ? sinks : w.call.recent_count) - start(i);
    return left < kPage ? static_cast<int>(left) : kPage;
  }
  const uint8_t* mask(int64_t i) const {
    const Call& c = w.call;
    if (!is_sink(i))
      return c.recent_visible + w.item.row * c.recent_visible_row + w.item.first_query * c.recent_visible_token +
             start(i);
    if (!c.moved_visible) return nullptr;
    return c.moved_visible + w.item.row * c.moved_visible_row + w.item.first_query * c.moved_visible_token + start(i);
  }
  int64_t mask_step(int64_t i) const { return is_sink(i) ? w.call.moved_visible_token : w.call.recent_visible_token; }
  void scores(int64_t i, float* out) const {
    const Exact& e = part(i);
    const int dim = w.layer.key.dim;
    const int64_t offset = w.item.row * e.key_row + w.item.head * e.key_head + start(i) * e.key_token;
    exact_tile(e.key, w.call.exact_type, offset, e.key_token, used(i), dim, 0, w.s.key_tile);
    all_dots(w.count, w.s.query, dim, w.s.key_tile, nullptr, 0, dim / 2, out, w.s.score_step);
  }
  void values(int64_t i, const float* weights) const {
    const Exact& e = part(i);
    const int padded = w.layer.value.padded;
    const int64_t offset = w.item.row * e.value_row + w.item.head * e.value_head + start(i) * e.value_token;
    exact_tile(e.value, w.call.exact_type, offset, e.value_token, used(i), w.layer.value.dim, padded, w.s.value_tile);
    all_accumulate(w.count, weights, w.s.score_step, w.s.value_tile, padded, w.out);
  }
  void end_block() const {}
};

template <typename Tokens>
static void attend_blocks(const Work& w, const Tokens& tokens, int64_t blocks) {
  const int padded = w.layer.value.padded;
  for (int64_t from = 0; from < blocks; from += w.s.block) {
    const int64_t n = blocks - from < w.s.block ? blocks - from : w.s.block;
    for (int64_t i = 0; i < n; ++i) {
      float* scores = w.s.scores + i * kPage;
      tokens.scores(from + i, scores);
      if (w.call.softcap > 0) cap_scores(scores, w.count, w.s.score_step, w.call.softcap);
      hide_scores(w, tokens.used(from + i), tokens.mask(from + i), tokens.mask_step(from + i), scores);
    }
    for (int64_t q = 0; q < w.count; ++q)
      softmax_step(w.s.scores + q * w.s.score_step, n * kPage, w.maximum[q], w.total[q], w.s.offset[q],
                   w.out + q * padded, padded);
    for (int64_t i = 0; i < n; ++i) tokens.values(from + i, w.s.scores + i * kPage);
    tokens.end_block();
  }
}

static void turn_back(float* x, int dim, int size) {
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (int half = 1; half < size; half *= 2)
    for (int from = 0; from < dim; from += 2 * half)
      for (int i = from; i < from + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
  for (int i = 0; i < dim; ++i) x[i] *= norm;
}

// Outputs of pages: out of the quantiser's frame, and turned back.
static void finish_pages(const Work& w) {
  const Side& value = w.layer.value;
  const float *scale = value.scale + w.item.head * value.padded, *zero = value.zero + w.item.head * value.padded;
  for (int64_t n = 0; n < w.count; ++n) {
    float* out = w.out + n * value.padded;
    for (int c = 0; c < value.dim; ++c) out[c] = (out[c] + w.s.offset[n]) * scale[c] + zero[c] * w.total[n];
    if (w.layer.hadamard) turn_back(out, value.dim, w.layer.hadamard);
  }
}

static void attend_item(const Layer& layer, const Call& call, const Split& split, const Item& item, float* scratch,
                        float* partial) {
  const int64_t group = call.query_heads / layer.heads, count = item.queries * group, most = split.query_block * group;
  Work w{layer, call, item, {}, group, count, partial, partial + most, partial + 2 * most,
         count <= kFewQueries && decodes_keys(layer.key), count <= kFewQueries && decodes_values(layer.value, layer.heads)};
  scratch_floats(layer, most, &w.s, scratch);
  for (int64_t n = 0; n < count; ++n) w.maximum[n] = -__builtin_inff(), w.total[n] = w.s.offset[n] = 0.0f;
  __builtin_memset(w.out, 0, count * layer.value.padded * sizeof(float));
  for (int c = 0; c < layer.value.padded; ++c) w.s.ones[c] = 1.0f;
  __builtin_memset(w.s.quads, 0, 8 * layer.value.padded * sizeof(float));
  const float factor = call.softcap > 0 ? call.scale : call.scale * kLog2E;
  if (item.slot < split.exact_slots) {
    const int64_t sinks = call.sink_counts[item.row], sink_blocks = ceil_div(sinks, kPage);
    const int64_t from = item.slot * split.chunk, end = sink_blocks + ceil_div(call.recent_count, kPage);
    gather_queries(w, nullptr, factor, false, w.s.query);
    const int64_t blocks = end - from < split.chunk ? end - from : split.chunk;
    attend_blocks(w, ExactTokens{w, from, sink_blocks, sinks}, blocks);
  } else {
    const int64_t from = (item.slot - split.exact_slots) * split.chunk, left = call.page_counts[item.row] - from;
    const uint8_t* mask = nullptr;
    if (call.moved_visible)
      mask = call.moved_visible + item.row * call.moved_visible_row + item.first_query * call.moved_visible_token +
             call.sink_slots + from * kPage;
    if (left <= 0) return;
    gather_queries(w, layer.order, factor, w.decodes_keys, w.s.query);
    const uint8_t* first = call.pages + item.row * call.pages_row + from * layer.page_bytes;
    attend_blocks(w, Pages{w, first, mask}, left < split.chunk ? left : split.chunk);
    finish_pages(w);
  }
}

}  // namespace
