// Codes: to the nearest level, along a trellis, with error feedback.
#pragma once
#include <algorithm>
#include <cstdint>

#include "pack_frame.h"
#include "viterbi.h"

namespace {

void encode_channel(const float* v, const float* edges, int count, uint8_t* codes) {
  if (count <= 31) {
    int32_t c[kPage] = {};
    for (int e = 0; e < count; ++e)
      for (int t = 0; t < kPage; ++t) c[t] += v[t] > edges[e];
    for (int t = 0; t < kPage; ++t) codes[t] = static_cast<uint8_t>(c[t]);
    return;
  }
  for (int t = 0; t < kPage; ++t) codes[t] = static_cast<uint8_t>(std::lower_bound(edges, edges + count, v[t]) - edges);
}

// v = (u - base) / step of one channel.
void to_range(const PackSide& pack, const Arena& a, const float* u, int64_t at, float* v) {
  for (int t = 0; t < kPage; ++t) v[t] = u[t];
  if (pack.range == kPackStatic) return;
  if (pack.range != kPackNorm)
    for (int t = 0; t < kPage; ++t) v[t] = v[t] - a.base[at + t];
  for (int t = 0; t < kPage; ++t) v[t] = v[t] / (a.step[at + t] == 0 ? 1.0f : a.step[at + t]);
}

// u' of one channel: what its codes come back as.
void from_codes(const PackSide& pack, const Arena& a, int64_t channel, float* x) {
  const int64_t at = channel * kPage;
  const float* levels = pack.trellis ? pack.trellis + trellis_table_at(pack.widths[channel])
                                     : pack.levels + pack.table[channel];
  const uint8_t* index = (pack.trellis ? a.windows : a.codes) + at;
  for (int t = 0; t < kPage; ++t) x[t] = levels[index[t]];
  if (pack.range == kPackStatic) return;
  for (int t = 0; t < kPage; ++t) x[t] = x[t] * a.step[at + t];
  if (pack.range != kPackNorm)
    for (int t = 0; t < kPage; ++t) x[t] = x[t] + a.base[at + t];
}

// off [32]: from the values to their nearest levels, which codes choose.
void measure_off(const float* v, const float* edges, const float* levels, int count, const uint8_t* codes, float* off) {
  if (count > 15) {
    for (int t = 0; t < kPage; ++t) off[t] = levels[codes[t]] - v[t];
    return;
  }
  float level[kPage];
  for (int t = 0; t < kPage; ++t) level[t] = levels[0];
  for (int e = 0; e < count; ++e) {
    const float edge = edges[e], above = levels[e + 1];
    for (int t = 0; t < kPage; ++t) level[t] = v[t] > edge ? above : level[t];
  }
  for (int t = 0; t < kPage; ++t) off[t] = level[t] - v[t];
}

void encode_nearest(const PackSide& pack, int64_t channels, const Arena& a) {
  for (int64_t c = 0; c < channels; ++c) {
    const float *edges = pack.edges + pack.table[c], *levels = pack.levels + pack.table[c];
    const int64_t at = c * kPage, count = pack.entries[c] - 1;
    float v[kPage], off[kPage];
    to_range(pack, a, a.u + at, at, v);
    encode_channel(v, edges, count, a.codes + at);
    if (!pack.by_error) continue;
    measure_off(v, edges, levels, count, a.codes + at, off);
    if (pack.range != kPackStatic)
      for (int t = 0; t < kPage; ++t) off[t] = off[t] * a.step[at + t];
    const float weight = pack.weight[c];
    for (int t = 0; t < kPage; ++t) a.score[at + t] = off[t] * off[t] * weight;
  }
}

#define KV_EACH_TRELLIS KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6)

struct OrderedTables {
  float of[7][64];             // by width, see viterbi.h
};
void order_tables(const PackSide& pack, OrderedTables& tables) {
#define KV_CASE(W) \
  if (W <= pack.bits) order_levels<W>(pack.trellis + trellis_table_at(W), tables.of[W]);
  KV_EACH_TRELLIS
#undef KV_CASE
}

// Codes and windows of channel c. An outlier is exact whatever its level is, so it has no weight.
void encode_path(const PackSide& pack, const Arena& a, const OrderedTables& tables, int64_t c, const float* v) {
  const int64_t at = c * kPage;
  float weight[kPage];
  for (int t = 0; t < kPage; ++t) weight[t] = pack.outliers && a.outlier[at + t] ? 0.0f : 1.0f;
  switch (pack.widths[c]) {
#define KV_CASE(W) \
  case W: best_path<W>(tables.of[W], v, weight, pack.span, a.windows + at, a.codes + at); break;
    KV_EACH_TRELLIS
#undef KV_CASE
  }
}

// out [32] = weights [n] @ errors [n, 32]. weights: bfloat16.
void add_up(const uint16_t* weights, const float* errors, int n, float* out) {
  using L = Lanes<kNative>;
  for (int t = 0; t < kPage; t += 2 * kNative) {
    typename L::Float low = {}, high = {};
    for (int i = 0; i < n; ++i) {
      const float weight = bits_to_float(static_cast<uint32_t>(weights[i]) << 16);
      low += weight * L::get(errors + i * kPage + t);
      high += weight * L::get(errors + i * kPage + t + kNative);
    }
    L::put(out + t, low), L::put(out + t + kNative, high);
  }
}

// quant/feedback.py: every channel is rounded to what makes up for the errors before it.
void encode_feedback(const PackSide& pack, int heads, int dim, const Arena& a) {
  OrderedTables tables;
  if (pack.trellis) order_tables(pack, tables);
  for (int head = 0; head < heads; ++head) {
    const uint16_t* matrix = pack.feedback + static_cast<int64_t>(head) * dim * dim;
    const int16_t* order = pack.order + static_cast<int64_t>(head) * dim;
    float* error = a.error + static_cast<int64_t>(head) * dim * kPage;  // in coding order
    for (int j = 0; j < dim; ++j) {
      const int64_t c = static_cast<int64_t>(head) * dim + order[j], at = c * kPage;
      float made_up[kPage], v[kPage], coded[kPage];
      add_up(matrix + j * dim, error, j, made_up);
      for (int t = 0; t < kPage; ++t) a.wanted[at + t] = a.u[at + t] - made_up[t];
      to_range(pack, a, a.wanted + at, at, v);
      if (pack.trellis) encode_path(pack, a, tables, c, v);
      else encode_channel(v, pack.edges + pack.table[c], pack.entries[c] - 1, a.codes + at);
      from_codes(pack, a, c, coded);
      for (int t = 0; t < kPage; ++t) {
        const bool exact = pack.outliers && a.outlier[at + t];
        error[j * kPage + t] = (exact ? a.wanted[at + t] : coded[t]) - a.u[at + t];
      }
    }
  }
}

}  // namespace
