// One item of work: some queries of one row, and one or all kv heads, against one chunk of the row's pages or of its
// exact tokens.
//
// Blocks of pages go through three steps: scores of all their keys, one step of the running softmax, weights times
// values. Scores are kept in units of log2. An item with all heads takes them block by block, so that the memory of a
// block is visited once; a head's arithmetic is the same either way.
#pragma once
#include "layer.h"

namespace {

template <typename Tokens>
static void attend_block(const Work& w, const Tokens& tokens, int64_t from, int64_t n) {
  const int padded = w.layer.value.padded;
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
  const float *scale = value.scale + w.head * value.padded, *zero = value.zero + w.head * value.padded;
  for (int64_t n = 0; n < w.count; ++n) {
    float* out = w.out + n * value.padded;
    for (int c = 0; c < value.dim; ++c) out[c] = (out[c] + w.s.offset[n]) * scale[c] + zero[c] * w.total[n];
    if (w.layer.hadamard) turn_back(out, value.dim, w.layer.hadamard);
  }
}

// Head k of an item.
static Work head_of(const Work& first, int64_t k, int64_t partial_step) {
  Work w = first;
  w.head += k;
  w.s.query += k * w.s.query_step, w.s.offset += k * w.s.offset_step, w.s.quads += k * w.s.quads_step;
  w.maximum += k * partial_step, w.total += k * partial_step, w.out += k * partial_step;
  return w;
}

static void start_head(const Work& w) {
  const int padded = w.layer.value.padded;
  for (int64_t n = 0; n < w.count; ++n) w.maximum[n] = -__builtin_inff(), w.total[n] = w.s.offset[n] = 0.0f;
  __builtin_memset(w.out, 0, w.count * padded * sizeof(float));
  __builtin_memset(w.s.quads, 0, 8 * padded * sizeof(float));
}

// make(work of a head) -> the tokens of the chunk as that head sees them.
template <typename Make>
static void attend_chunk(const Work& first, int64_t partial_step, int64_t blocks, Make make) {
  for (int64_t from = 0; from < blocks; from += first.s.block) {
    const int64_t n = blocks - from < first.s.block ? blocks - from : first.s.block;
    make(first).begin_block(from, n);
    for (int64_t k = 0; k < first.item.heads; ++k) {
      const Work w = head_of(first, k, partial_step);
      attend_block(w, make(w), from, n);
    }
  }
}

// partial: of the first head; the others follow `partial_step` floats apart.
static void attend_item(const Layer& layer, const Call& call, const Split& split, const Item& item, float* scratch,
                        float* partial, int64_t partial_step) {
  const int64_t group = call.query_heads / layer.heads, count = item.queries * group, most = split.query_block * group;
  const bool few = count <= kFewQueries;
  Work first{layer, call, item, {}, item.head, group, count, partial, partial + most, partial + 2 * most,
             few && decodes_keys(layer.key), few && decodes_values(layer.value, layer.heads)};
  scratch_floats(layer, most, split.head_block, &first.s, scratch);
  for (int c = 0; c < layer.value.padded; ++c) first.s.ones[c] = 1.0f;
  const bool exact = item.slot < split.exact_slots;
  const float factor = call.softcap > 0 ? call.scale : call.scale * kLog2E;
  for (int64_t k = 0; k < item.heads; ++k) {
    const Work w = head_of(first, k, partial_step);
    start_head(w);
    gather_queries(w, exact ? nullptr : layer.order, factor, !exact && w.decodes_keys, w.s.query);
  }
  if (exact) {
    const int64_t sinks = call.sink_counts[item.row], sink_blocks = ceil_div(sinks, kPage);
    const int64_t from = item.slot * split.chunk, left = sink_blocks + ceil_div(call.recent_count, kPage) - from;
    attend_chunk(first, partial_step, left < split.chunk ? left : split.chunk,
                 [=](const Work& w) { return ExactTokens{w, from, sink_blocks, sinks}; });
    return;
  }
  const int64_t from = (item.slot - split.exact_slots) * split.chunk, left = call.page_counts[item.row] - from;
  const uint8_t* mask = nullptr;
  if (call.moved_visible)
    mask = call.moved_visible + item.row * call.moved_visible_row + item.first_query * call.moved_visible_token +
           call.sink_slots + from * kPage;
  if (left <= 0) return;
  const uint8_t* pages = call.pages + item.row * call.pages_row + from * layer.page_bytes;
  attend_chunk(first, partial_step, left < split.chunk ? left : split.chunk,
               [=](const Work& w) { return Pages{w, pages, mask}; });
  for (int64_t k = 0; k < item.heads; ++k) finish_pages(head_of(first, k, partial_step));
}

}  // namespace
