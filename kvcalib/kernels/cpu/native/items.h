// One item of work: some queries of one row and kv head against one chunk of its pages, or of its exact tokens.
//
// Blocks of pages go through three steps: scores of all their keys, one step of the running softmax, weights times
// values. Scores are kept in units of log2.
#pragma once
#include "layer.h"

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Memory of one thread, cut from one allocation.
struct Scratch {
  float *query, *turned, *key_tile, *value_tile, *work, *scores, *ones;
  double* angle;
  int64_t block;       // pages of a block
  int64_t score_step;
};

static int64_t scratch_floats(const Layer& layer, int64_t queries, Scratch* s, float* from) {
  const int64_t dim = layer.key.dim, padded = layer.value.padded, widest = dim > padded ? dim : padded;
  const int64_t block = queries > 64 ? 1 : queries > 16 ? 4 : 8;
  const int64_t sizes[] = {queries * dim, queries * dim, dim * kPage, padded * kPage, 8 * widest * kPage + 4 * dim,
                           queries * block * kPage, widest, 4 * dim};
  float** const parts[] = {&s->query, &s->turned, &s->key_tile, &s->value_tile, &s->work, &s->scores, &s->ones};
  int64_t at = 0;
  for (int i = 0; i < 8; ++i) {
    if (from && i < 7) *parts[i] = from + at;
    if (from && i == 7) s->angle = reinterpret_cast<double*>(from + at);
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
};

// Queries of the item, [count, D], times `factor`; order: canonical channels, or null for the model's own.
static void gather_queries(const Work& w, const int64_t* order, float factor, float* to) {
  const Call& call = w.call;
  for (int64_t n = 0; n < w.count; ++n) {
    const int64_t token = w.item.first_query + n / w.group, head = w.item.head * w.group + n % w.group;
    const float* from = call.query + w.item.row * call.query_row + head * call.query_head + token * call.query_token;
    for (int c = 0; c < w.layer.key.dim; ++c) to[n * w.layer.key.dim + c] = from[order ? order[c] : c] * factor;
  }
}

// cos and sin of position * frequency, as products over the digits of the position to base 64.
static void page_angle(const Layer& layer, int64_t position, double* angle) {
  const int n = layer.rotating;
  double *cosine = angle, *sine = angle + n;
  const double* turn = layer.turns + (position & 63) * 2 * n;
  for (int i = 0; i < n; ++i) cosine[i] = turn[i], sine[i] = turn[n + i];
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
}

// Queries as seen from the start of a page: turned back by its first position.
static void turn_queries(const Work& w, int64_t position, const float* query, float* turned) {
  const int dim = w.layer.key.dim, pairs = dim / 2, rotating = w.layer.rotating;
  page_angle(w.layer, position, w.s.angle);
  const double *cosine = w.s.angle, *sine = cosine + rotating;
  float* narrow = w.s.work;
  for (int i = 0; i < rotating; ++i) narrow[i] = static_cast<float>(cosine[i]);
  for (int i = 0; i < rotating; ++i) narrow[pairs + i] = static_cast<float>(sine[i]);
  for (int64_t n = 0; n < w.count; ++n) {
    const float *from = query + n * dim, *c = narrow, *s = narrow + pairs;
    float* to = turned + n * dim;
    for (int i = 0; i < rotating; ++i) {
      const float a = from[i], b = from[i + pairs];
      to[i] = a * c[i] + b * s[i];
      to[i + pairs] = b * c[i] - a * s[i];
    }
    for (int i = rotating; i < pairs; ++i) to[i] = from[i], to[i + pairs] = from[i + pairs];
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
  void prefetch(const uint8_t* p, int64_t bytes) const {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
  }
  void scores(int64_t i, float* out) const {
    const Layer& layer = w.layer;
    const int64_t head = w.item.head;
    const Side& key = layer.key;
    prefetch(at(i) + layer.page_bytes + key.codes_at + key.head_at[head], key.head_at[head + 1] - key.head_at[head]);
    key_tile(at(i), layer, head, w.s.work, w.s.key_tile);
    const float* query = w.s.query;
    if (layer.rotating) {
      turn_queries(w, word(at(i)), query, w.s.turned);
      query = w.s.turned;
    }
    all_dots(w.count, query, key.dim, w.s.key_tile, layer.relative, layer.rotating, key.dim / 2, out, w.s.score_step);
  }
  void values(int64_t i) const {
    const Side& value = w.layer.value;
    const int64_t head = w.item.head, bytes = value.head_at[head + 1] - value.head_at[head];
    prefetch(at(i) + w.layer.page_bytes + value.codes_at + value.head_at[head], bytes);
    value_tile(at(i), w.layer, head, w.s.work, w.s.ones, w.s.value_tile);
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
    exact_tile(e.key, w.call.exact_type, offset, e.key_token, used(i), dim, 1, kPage, dim * kPage, w.s.key_tile);
    all_dots(w.count, w.s.query, dim, w.s.key_tile, nullptr, 0, dim / 2, out, w.s.score_step);
  }
  void values(int64_t i) const {
    const Exact& e = part(i);
    const int padded = w.layer.value.padded;
    const int64_t offset = w.item.row * e.value_row + w.item.head * e.value_head + start(i) * e.value_token;
    exact_tile(e.value, w.call.exact_type, offset, e.value_token, used(i), w.layer.value.dim, padded, 1,
               padded * kPage, w.s.value_tile);
  }
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
      softmax_step(w.s.scores + q * w.s.score_step, n * kPage, w.maximum[q], w.total[q], w.out + q * padded, padded);
    for (int64_t i = 0; i < n; ++i) {
      tokens.values(from + i);
      all_accumulate(w.count, w.s.scores + i * kPage, w.s.score_step, w.s.value_tile, padded, w.out);
    }
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
    for (int c = 0; c < value.dim; ++c) out[c] = out[c] * scale[c] + zero[c] * w.total[n];
    if (w.layer.hadamard) turn_back(out, value.dim, w.layer.hadamard);
  }
}

static void attend_item(const Layer& layer, const Call& call, const Split& split, const Item& item, float* scratch,
                        float* partial) {
  const int64_t group = call.query_heads / layer.heads, count = item.queries * group, most = split.query_block * group;
  Work w{layer, call, item, {}, group, count, partial, partial + most, partial + 2 * most};
  scratch_floats(layer, most, &w.s, scratch);
  for (int64_t n = 0; n < count; ++n) w.maximum[n] = -__builtin_inff(), w.total[n] = 0.0f;
  __builtin_memset(w.out, 0, count * layer.value.padded * sizeof(float));
  for (int c = 0; c < layer.value.padded; ++c) w.s.ones[c] = 1.0f;
  const float factor = call.softcap > 0 ? call.scale : call.scale * kLog2E;
  if (item.slot < split.exact_slots) {
    const int64_t sinks = call.sink_counts[item.row], sink_blocks = ceil_div(sinks, kPage);
    const int64_t from = item.slot * split.chunk, end = sink_blocks + ceil_div(call.recent_count, kPage);
    gather_queries(w, nullptr, factor, w.s.query);
    const int64_t blocks = end - from < split.chunk ? end - from : split.chunk;
    attend_blocks(w, ExactTokens{w, from, sink_blocks, sinks}, blocks);
  } else {
    const int64_t from = (item.slot - split.exact_slots) * split.chunk, left = call.page_counts[item.row] - from;
    const uint8_t* mask = nullptr;
    if (call.moved_visible)
      mask = call.moved_visible + item.row * call.moved_visible_row + item.first_query * call.moved_visible_token +
             call.sink_slots + from * kPage;
    if (left <= 0) return;
    gather_queries(w, layer.order, factor, w.s.query);
    const uint8_t* first = call.pages + item.row * call.pages_row + from * layer.page_bytes;
    attend_blocks(w, Pages{w, first, mask}, left < split.chunk ? left : split.chunk);
    finish_pages(w);
  }
}

}  // namespace
