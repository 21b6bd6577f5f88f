// Where keys and values come from: pages, or exact tokens. Both give scores of 32 tokens, and take weights for them.
#pragma once
#include "layer.h"

namespace {

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

template <bool trellis, int NQ>
static void decode_scores_with(const Work& w, const uint8_t* page, const float* query, float* scores) {
  const Layer& layer = w.layer;
  const int head = static_cast<int>(w.head), dim = layer.key.dim;
  float *step = w.s.work, *base = w.s.work + kPage * dim;
  if (layer.key.range == kGroup) {
    key_groups(page, layer.key, layer, head, step, base);
    decode_scores<trellis, NQ, true>(page, layer, head, step, base, query, scores, w.s.score_step);
  } else {
    const int64_t at = static_cast<int64_t>(head) * layer.key.padded;
    decode_scores<trellis, NQ, false>(page, layer, head, layer.key.scale + at, layer.key.zero + at, query, scores,
                                      w.s.score_step);
  }
}

#define KV_BY_QUERIES(call, ...)                         \
  switch (w.count) {                                     \
    case 1: return call<__VA_ARGS__ 1> KV_ARGUMENTS;     \
    case 2: return call<__VA_ARGS__ 2> KV_ARGUMENTS;     \
    case 3: return call<__VA_ARGS__ 3> KV_ARGUMENTS;     \
    case 4: return call<__VA_ARGS__ 4> KV_ARGUMENTS;     \
  }
#define KV_BY_ROUNDING(side, call)                   \
  if (w.layer.side.trellis) KV_BY_QUERIES(call, true, ) \
  else KV_BY_QUERIES(call, false, )
static void decode_scores_of(const Work& w, const uint8_t* page, const float* query, float* scores) {
#define KV_ARGUMENTS (w, page, query, scores)
  KV_BY_ROUNDING(key, decode_scores_with)
#undef KV_ARGUMENTS
}
static void decode_values_of(const Work& w, const uint8_t* page, const float* weights) {
#define KV_ARGUMENTS \
  (page, w.layer, static_cast<int>(w.head), weights, w.s.score_step, w.s.work, w.out, w.s.offset, w.s.quads)
  KV_BY_ROUNDING(value, decode_values)
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
    const int64_t head = w.head, heads = w.layer.heads;
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
    const int64_t head = w.head;
    const Side& key = layer.key;
    prefetch_ranges(at(i) + layer.page_bytes, key);
    prefetch_ranges(at(i) + layer.page_bytes, layer.value);
    __builtin_prefetch(at(i) + layer.page_bytes);
    const float* query = w.s.query;
    if (layer.rotating) {
      const float* angle = w.s.angles + i % w.s.block * 2 * layer.rotating;
      (w.decodes_keys ? turn_quads : turn_queries)(w, angle, query, w.s.turned);
      query = w.s.turned;
    }
    if (w.decodes_keys) return decode_scores_of(w, at(i), query, out);
    key_tile(at(i), layer, head, w.s.work, w.s.key_tile);
    all_dots(w.count, query, key.dim, w.s.key_tile, layer.relative, layer.rotating, key.dim / 2, out, w.s.score_step);
  }
  void values(int64_t i, const float* weights) const {
    const Side& value = w.layer.value;
    if (w.decodes_values) return decode_values_of(w, at(i), weights);
    value_tile(at(i), w.layer, w.head, w.s.work, w.s.ones, w.s.value_tile);
    all_accumulate(w.count, weights, w.s.score_step, w.s.value_tile, value.padded, w.out);
  }
  // What all heads share of pages first .. first + n of the chunk.
  void begin_block(int64_t first, int64_t n) const {
    const int rotating = w.layer.rotating;
    for (int64_t i = 0; rotating && i < n; ++i)
      page_angle(w.layer, word(at(first + i)), w.s.angle, w.s.angles + i * 2 * rotating);
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
    const int64_t offset = w.item.row * e.key_row + w.head * e.key_head + start(i) * e.key_token;
    exact_tile(e.key, w.call.exact_type, offset, e.key_token, used(i), dim, 0, w.s.key_tile);
    all_dots(w.count, w.s.query, dim, w.s.key_tile, nullptr, 0, dim / 2, out, w.s.score_step);
  }
  void values(int64_t i, const float* weights) const {
    const Exact& e = part(i);
    const int padded = w.layer.value.padded;
    const int64_t offset = w.item.row * e.value_row + w.head * e.value_head + start(i) * e.value_token;
    exact_tile(e.value, w.call.exact_type, offset, e.value_token, used(i), w.layer.value.dim, padded, w.s.value_tile);
    all_accumulate(w.count, weights, w.s.score_step, w.s.value_tile, padded, w.out);
  }
  void begin_block(int64_t, int64_t) const {}
  void end_block() const {}
};

}  // namespace
