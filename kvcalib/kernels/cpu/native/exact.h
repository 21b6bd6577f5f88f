// Tiles of exact tokens: 32 keys of one head as [D, 32], 32 values as [32, D rounded up to 16].
#pragma once
#include "layer.h"

namespace {

// Exact tokens as they lie in memory: `step` elements from token to token.
template <int type>
struct Rows {
  const uint8_t* first;
  int64_t step;
  static constexpr int size = type == kFloat32 ? 4 : 2;
  const uint8_t* at(int t, int c) const { return first + (t * step + c) * size; }
  Vec sixteen(int t, int c) const {
    if constexpr (type == kFloat32) return load(reinterpret_cast<const float*>(at(t, c)));
    return type == kBFloat16 ? load_bfloat(at(t, c)) : load_half(at(t, c));
  }
  float one(int t, int c) const {
    if constexpr (type == kFloat32) {
      float x;
      __builtin_memcpy(&x, at(t, c), 4);
      return x;
    }
    if (type == kBFloat16) return bits_to_float(static_cast<uint32_t>(uint16_at(at(t, c))) << 16);
    return half_at(at(t, c));
  }
};

// n <= 32 exact keys -> [D, 32]; the rest of the tile is 0.
template <int type>
static void exact_key_tile(const Rows<type> rows, int n, int dim, float* tile) {
  if (n < kPage) __builtin_memset(tile, 0, static_cast<int64_t>(dim) * kPage * sizeof(float));
  const int whole = dim / kLanes * kLanes, tokens = n / 4 * 4;
  for (int t = 0; t < tokens; t += 4)
    for (int c = 0; c < whole; c += kLanes) {
      Vec r[4];
      for (int k = 0; k < 4; ++k) r[k] = rows.sixteen(t + k, c);
      transpose4(r);
      for (int k = 0; k < 4; ++k) store_quarters(tile + (c + k) * kPage + t, 4 * kPage, r[k]);
    }
  for (int t = 0; t < n; ++t)
    for (int c = t < tokens ? whole : 0; c < dim; ++c) tile[c * kPage + t] = rows.one(t, c);
}

// n <= 32 exact values -> [32, padded]; the rest of the tile is 0.
template <int type>
static void exact_value_tile(const Rows<type> rows, int n, int dim, int padded, float* tile) {
  for (int t = 0; t < n; ++t) {
    int c = 0;
    for (; c + kLanes <= dim; c += kLanes) store(tile + t * padded + c, rows.sixteen(t, c));
    for (int rest = c; rest < padded; ++rest) tile[t * padded + rest] = rest < dim ? rows.one(t, rest) : 0.0f;
  }
  __builtin_memset(tile + n * padded, 0, static_cast<int64_t>(kPage - n) * padded * sizeof(float));
}

template <int type>
static void exact_tile_of(const void* data, int64_t offset, int64_t step, int n, int dim, int padded, float* tile) {
  const Rows<type> rows{static_cast<const uint8_t*>(data) + offset * Rows<type>::size, step};
  if (padded) exact_value_tile(rows, n, dim, padded, tile);
  else exact_key_tile(rows, n, dim, tile);
}

// padded: 0 for keys.
static void exact_tile(const void* data, int type, int64_t offset, int64_t step, int n, int dim, int padded,
                       float* tile) {
  if (type == kFloat32) exact_tile_of<kFloat32>(data, offset, step, n, dim, padded, tile);
  else if (type == kBFloat16) exact_tile_of<kBFloat16>(data, offset, step, n, dim, padded, tile);
  else exact_tile_of<kFloat16>(data, offset, step, n, dim, padded, tile);
}

}  // namespace
