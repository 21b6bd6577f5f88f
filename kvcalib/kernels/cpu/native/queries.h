// The queries of an item: gathered once, and turned back by the first position of every page.
#pragma once
#include "layer.h"

namespace {

constexpr int kFewQueries = 4;
constexpr float kLog2E = 1.4426950408889634f;

// Memory of one thread, cut from one allocation.
struct Scratch {
  float *query, *offset, *quads;   // of every head of the item
  float *turned, *key_tile, *value_tile, *work, *scores, *ones, *angles;
  double* angle;
  int64_t block;       // pages of a block
  int64_t score_step, query_step, offset_step, quads_step;   // the last three: from head to head
};

static int64_t scratch_floats(const Layer& layer, int64_t queries, int64_t heads, Scratch* s, float* from) {
  const int64_t dim = layer.key.dim, padded = layer.value.padded, widest = dim > padded ? dim : padded;
  s->block = queries > 64 ? 1 : queries > 16 ? 4 : 8, s->score_step = s->block * kPage;
  s->query_step = (queries < kFewQueries ? kFewQueries : queries) * dim;
  s->offset_step = queries, s->quads_step = 8 * widest;
  const int64_t sizes[] = {heads * s->query_step, heads * s->offset_step, heads * s->quads_step, s->query_step,
                           dim * kPage, padded * kPage, 8 * widest * kPage + 4 * dim, queries * s->score_step,
                           widest, s->block * dim, 4 * dim};
  float** const parts[] = {&s->query, &s->offset, &s->quads, &s->turned, &s->key_tile, &s->value_tile,
                           &s->work, &s->scores, &s->ones, &s->angles};
  int64_t at = 0;
  for (int i = 0; i < 11; ++i) {
    if (from && i < 10) *parts[i] = from + at;
    if (from && i == 10) s->angle = reinterpret_cast<double*>(from + at);
    at += (sizes[i] + 15) / 16 * 16;
  }
  return at;
}

// One head of an item: its memory, and where its result goes.
struct Work {
  const Layer& layer;
  const Call& call;
  const Item& item;
  Scratch s;
  int64_t head;
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
    const int64_t token = w.item.first_query + n / w.group, head = w.head * w.group + n % w.group;
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
static void turn_quads(const Work& w, const float* angle, const float* query, float* turned) {
  const int pairs = w.layer.key.dim / 2, rotating = w.layer.rotating, upper = 4 * pairs;
  const float *cosine = angle, *sine = angle + rotating;
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
static void turn_queries(const Work& w, const float* angle, const float* query, float* turned) {
  const int dim = w.layer.key.dim, pairs = dim / 2, rotating = w.layer.rotating;
  const float* __restrict cosine = angle;
  const float* __restrict sine = angle + rotating;
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

}  // namespace
