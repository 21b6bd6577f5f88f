// Dequantised tiles: the 32 keys of one head and page as [D, 32], its values as [32, D rounded up to 16].
//
// Keys come out as x = u * scale + zero, ready to be rotated. Values stay u: attention is linear in them, so their
// frame and their rotation are applied to the output.
#pragma once
#include "layer.h"

namespace {

// How a level becomes u (values) or x (keys).
struct Affine {
  const float *step, *base;    // see the readers below
  const float *scale, *zero;   // keys, per channel
  int cell;                    // channels that share a step and base
};

enum class Mode {
  kNone,      // the table says it all
  kChannel,   // keys: step, base [2 halves, D], frame included
  kToken,     // keys: step, base [cells, 32]; values: [32, tiles]; both before the frame
  kElement,   // keys: step, base [D, 32], frame included; values: [32, padded]
};

template <Mode mode>
KV_INLINE Vec key_of(Vec level, const Affine& a, int channel, int half, int dim) {
  if constexpr (mode == Mode::kNone) return level;
  if constexpr (mode == Mode::kChannel)
    return fma(level, splat(a.step[half * dim + channel]), splat(a.base[half * dim + channel]));
  if constexpr (mode == Mode::kToken) {
    const int at = channel / a.cell * kPage + half * kLanes;
    return fma(fma(level, load(a.step + at), load(a.base + at)), splat(a.scale[channel]), splat(a.zero[channel]));
  }
  const int at = channel * kPage + half * kLanes;
  return fma(level, load(a.step + at), load(a.base + at));
}

template <int W, Mode mode>
static void key_run(const uint8_t* record, const Side& side, const int32_t* units, const int64_t* tables, int count,
                    int half, const Affine& affine, float* tile) {
  const int pairs = side.dim / 2;
  for (int j = 0; j < count; ++j, record += 4 * W) {
    const int c = units[j], d = c + pairs;
    const Vec x = look_up<W>(codes<W, 0>(record), side.tables + tables[2 * j]);
    const Vec y = look_up<W>(codes<W, 1>(record), side.tables + tables[2 * j + 1]);
    store(tile + c * kPage + half * kLanes, key_of<mode>(x, affine, c, half, side.dim));
    store(tile + d * kPage + half * kLanes, key_of<mode>(y, affine, d, half, side.dim));
  }
}

template <Mode mode>
static void key_run_of(int width, const uint8_t* record, const Side& side, const int32_t* units, const int64_t* tables,
                       int count, int half, const Affine& affine, float* tile) {
  switch (width) {
#define KV_CASE(W) \
  case W: return key_run<W, mode>(record, side, units, tables, count, half, affine, tile);
    KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6) KV_CASE(7) KV_CASE(8)
#undef KV_CASE
  }
}

template <Mode mode>
static void key_codes(const uint8_t* page, const Side& side, int head, const Affine& affine, float* tile) {
  const int pairs = side.dim / 2;
  const uint8_t* record = page + side.codes_at + side.head_at[head];
  for (int half = 0; half < 2; ++half) {
    const int32_t* units = side.units + static_cast<int64_t>(head) * pairs;
    const int64_t* tables = side.table_at + static_cast<int64_t>(head) * 2 * pairs;
    for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r) {
      const Run run = side.runs[r];
      key_run_of<mode>(run.width, record, side, units, tables, run.units, half, affine, tile);
      record += 4 * run.width * run.units, units += run.units, tables += 2 * run.units;
    }
  }
}

// n halves -> floats, without reading past them.
static void floats_of(const uint8_t* halves, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_half(halves + 2 * i));
  for (; i < n; ++i) out[i] = half_at(halves + 2 * i);
}

// range="group" of keys: x = level * (step * scale) + (base * scale + zero).
static void key_groups(const uint8_t* page, const Side& side, const Layer& layer, int head, float* work, float* tile) {
  const int dim = side.dim, groups = kPage / side.group;
  const float *scale = side.scale + static_cast<int64_t>(head) * side.padded, *zero = side.zero + (scale - side.scale);
  float *step = work, *base = work + static_cast<int64_t>(groups < 2 ? 2 : groups) * dim;
  for (int g = 0; g < groups; ++g) {
    const int64_t at = (static_cast<int64_t>(g) * layer.heads + head) * dim;
    floats_of(page + side.step_at + 2 * at, dim, step + g * dim);
    floats_of(page + side.base_at + 2 * at, dim, base + g * dim);
    for (int c = 0; c < dim; ++c) {
      base[g * dim + c] = base[g * dim + c] * scale[c] + zero[c];
      step[g * dim + c] *= scale[c];
    }
  }
  if (groups == 1) {
    __builtin_memcpy(step + dim, step, dim * sizeof(float));
    __builtin_memcpy(base + dim, base, dim * sizeof(float));
  }
  if (groups <= 2) return key_codes<Mode::kChannel>(page, side, head, {step, base, nullptr, nullptr, 0}, tile);
  float *steps = base + static_cast<int64_t>(groups) * dim, *bases = steps + dim * kPage;
  for (int c = 0; c < dim; ++c)
    for (int t = 0; t < kPage; ++t) {
      steps[c * kPage + t] = step[t / side.group * dim + c];
      bases[c * kPage + t] = base[t / side.group * dim + c];
    }
  key_codes<Mode::kElement>(page, side, head, {steps, bases, nullptr, nullptr, 0}, tile);
}

// Steps or bases of the cells of one head, [32, cells] of all heads in a page -> floats [cells of the head, 32].
static int token_cells(const uint8_t* halves, const Side& side, const Layer& layer, int head, float* out) {
  const int own = side.cells <= layer.heads ? 1 : side.cells / layer.heads;
  const int first = side.cells == 1 ? 0 : head * own;
  for (int cell = 0; cell < own; ++cell)
    for (int t = 0; t < kPage; ++t)
      out[cell * kPage + t] = half_at(halves + 2 * (static_cast<int64_t>(t) * side.cells + first + cell));
  return own;
}

static void fp16_keys(const uint8_t* page, const Side& side, int head, float* tile) {
  const uint8_t* codes = page + side.codes_at + static_cast<int64_t>(head) * side.dim * kPage * 2;
  const float *scale = side.scale + static_cast<int64_t>(head) * side.padded, *zero = side.zero + (scale - side.scale);
  for (int t = 0; t < kPage; ++t)
    for (int c = 0; c < side.dim; ++c)
      tile[c * kPage + t] = half_at(codes + 2 * (t * side.dim + c)) * scale[c] + zero[c];
}

static void sparse_part(const uint8_t* page, const Side& side, int head, const float* factor, int token_step,
                        int channel_step, float* tile) {
  if (side.corrections_at < 0) return;
  const int first = uint16_at(page + side.rows_at + 4 * head), last = uint16_at(page + side.rows_at + 4 * head + 4);
  add_sparse(tile, page + side.positions_at + 2 * first, page + side.corrections_at + 2 * first, last - first, factor,
             token_step, channel_step);
}

// work: 2 * 32 * D + 2 * 32 * D floats.
static void key_tile(const uint8_t* page, const Layer& layer, int head, float* work, float* tile) {
  const Side& side = layer.key;
  const float *scale = side.scale + static_cast<int64_t>(head) * side.padded, *zero = side.zero + (scale - side.scale);
  if (!side.coded) return fp16_keys(page, side, head, tile);
  if (side.range == kGroup) {
    key_groups(page, side, layer, head, work, tile);
  } else if (side.range == kToken) {
    float *step = work, *base = work + side.dim * kPage;
    const int own = token_cells(page + side.step_at, side, layer, head, step);
    if (side.base_at >= 0) token_cells(page + side.base_at, side, layer, head, base);
    else __builtin_memset(base, 0, own * kPage * sizeof(float));
    key_codes<Mode::kToken>(page, side, head, {step, base, scale, zero, own == 1 ? side.dim : side.group}, tile);
  } else if (side.folded) {
    key_codes<Mode::kNone>(page, side, head, {}, tile);
  } else {
    __builtin_memcpy(work, scale, side.dim * sizeof(float));
    __builtin_memcpy(work + side.dim, scale, side.dim * sizeof(float));
    __builtin_memcpy(work + 2 * side.dim, zero, side.dim * sizeof(float));
    __builtin_memcpy(work + 3 * side.dim, zero, side.dim * sizeof(float));
    key_codes<Mode::kChannel>(page, side, head, {work, work + 2 * side.dim, nullptr, nullptr, 0}, tile);
  }
  sparse_part(page, side, head, scale, 1, kPage, tile);
}

template <Mode mode>
KV_INLINE Vec value_of(Vec level, const Affine& a, int token, int tile, int padded) {
  if constexpr (mode == Mode::kNone) return level;
  if constexpr (mode == Mode::kToken) {
    const int at = tile / a.cell * kPage + token;
    return fma(level, splat(a.step[at]), splat(a.base[at]));
  }
  const int at = token * padded + tile * kLanes;
  return fma(level, load(a.step + at), load(a.base + at));
}

template <int W, Mode mode>
static void value_run(const uint8_t* record, const Side& side, const int64_t* tables, int first, int count,
                      const Affine& affine, float* out) {
  const int padded = side.padded;
  for (int tile = first; tile < first + count; ++tile) {
    const float* table = side.tables + tables[tile];
    for (int t = 0; t < kPage; t += 2, record += 4 * W) {
      const Codes a = codes<W, 0>(record), b = codes<W, 1>(record);
      const int entries = W <= 4 ? 16 : 1 << W;
      const Vec x = side.channel_books ? look_up_own<W>(a, table, entries) : look_up<W>(a, table);
      const Vec y = side.channel_books ? look_up_own<W>(b, table, entries) : look_up<W>(b, table);
      store(out + t * padded + tile * kLanes, value_of<mode>(x, affine, t, tile, padded));
      store(out + (t + 1) * padded + tile * kLanes, value_of<mode>(y, affine, t + 1, tile, padded));
    }
  }
}

template <Mode mode>
static void value_codes(const uint8_t* page, const Side& side, int head, const Affine& affine, float* out) {
  const uint8_t* record = page + side.codes_at + side.head_at[head];
  const int64_t* tables = side.table_at + static_cast<int64_t>(head) * (side.padded / kLanes);
  int first = 0;
  for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r) {
    const Run run = side.runs[r];
    switch (run.width) {
#define KV_CASE(W) \
  case W: value_run<W, mode>(record, side, tables, first, run.units, affine, out); break;
      KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6) KV_CASE(7) KV_CASE(8)
#undef KV_CASE
    }
    record += static_cast<int64_t>(4) * run.width * kPage / 2 * run.units, first += run.units;
  }
}

// Steps and bases of every element, [32, padded]: groups of tokens, or cells that do not cover whole tiles.
static void value_elements(const uint8_t* page, const Side& side, const Layer& layer, int head, float* step,
                           float* base) {
  const int64_t own = side.range == kGroup ? 0 : side.cells / layer.heads;
  for (int t = 0; t < kPage; ++t)
    for (int c = 0; c < side.padded; ++c) {
      const int channel = c < side.dim ? c : side.dim - 1;
      const int64_t at = side.range == kGroup
                             ? (static_cast<int64_t>(t / side.group) * layer.heads + head) * side.dim + channel
                             : static_cast<int64_t>(t) * side.cells + head * own + channel / side.group;
      step[t * side.padded + c] = half_at(page + side.step_at + 2 * at);
      base[t * side.padded + c] = side.base_at < 0 ? 0.0f : half_at(page + side.base_at + 2 * at);
    }
}

// work: 2 * 32 * padded floats. ones: [padded].
static void value_tile(const uint8_t* page, const Layer& layer, int head, float* work, const float* ones, float* tile) {
  const Side& side = layer.value;
  float *step = work, *base = work + side.padded * kPage;
  if (!side.coded) {
    floats_of(page + side.codes_at + static_cast<int64_t>(head) * side.padded * kPage * 2, side.padded * kPage, tile);
    return;
  }
  const bool by_tile = side.range == kToken && (side.cells <= layer.heads || side.group % kLanes == 0);
  if (side.range == kStatic) {
    value_codes<Mode::kNone>(page, side, head, {}, tile);
  } else if (by_tile) {
    const int own = token_cells(page + side.step_at, side, layer, head, step);
    if (side.base_at >= 0) token_cells(page + side.base_at, side, layer, head, base);
    else __builtin_memset(base, 0, own * kPage * sizeof(float));
    const int tiles = side.padded / kLanes, cell = own == 1 ? tiles : side.group / kLanes;
    value_codes<Mode::kToken>(page, side, head, {step, base, nullptr, nullptr, cell}, tile);
  } else {
    value_elements(page, side, layer, head, step, base);
    value_codes<Mode::kElement>(page, side, head, {step, base, nullptr, nullptr, 0}, tile);
  }
  sparse_part(page, side, head, ones, side.padded, 1, tile);
}

// n <= 32 exact tokens, each `step` elements after the last -> [D, 32] or [32, padded]; the rest of the tile is 0.
template <typename Get>
static void exact_rows(int n, int dim, int token_step, int channel_step, Get get, float* tile) {
  for (int t = 0; t < n; ++t)
    for (int c = 0; c < dim; ++c) tile[t * token_step + c * channel_step] = get(t, c);
}

static void exact_tile(const void* data, int type, int64_t offset, int64_t step, int n, int dim, int token_step,
                       int channel_step, int floats, float* tile) {
  if (n < kPage || dim * kPage < floats) __builtin_memset(tile, 0, floats * sizeof(float));
  const float* wide = static_cast<const float*>(data) + offset;
  const uint16_t* narrow = static_cast<const uint16_t*>(data) + offset;
  if (type == kFloat32)
    exact_rows(n, dim, token_step, channel_step, [=](int t, int c) { return wide[t * step + c]; }, tile);
  else if (type == kBFloat16)
    exact_rows(n, dim, token_step, channel_step,
               [=](int t, int c) { return bits_to_float(static_cast<uint32_t>(narrow[t * step + c]) << 16); }, tile);
  else
    exact_rows(n, dim, token_step, channel_step, [=](int t, int c) { return half_to_float(narrow[t * step + c]); }, tile);
}

}  // namespace
