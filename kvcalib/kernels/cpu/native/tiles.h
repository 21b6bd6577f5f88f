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
  kNone,      // the table says it all, but for the frame of keys where it is wide
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

template <int W, bool trellis, Mode mode>
static void key_run(const uint8_t* record, const Run run, const float* table, const int32_t* units, int half, int dim,
                    const Affine affine, float* tile) {
  constexpr int bits = window_bits<W, trellis>;
  constexpr bool framed = is_wide<W, trellis> && mode == Mode::kNone;
  Wide wide;
  if constexpr (is_wide<W, trellis>) wide = wide_at<bits>(table);
  const auto x_of = [&](Vec level, int channel) {
    if constexpr (framed) return fma(level, splat(affine.scale[channel]), splat(affine.zero[channel]));
    else return key_of<mode>(level, affine, channel, half, dim);
  };
  for (int j = 0; j < run.units; ++j, record += 4 * W, table += 2 * run.table_step) {
    const int c = units[j], d = c + dim / 2;
    const Codes a = windows<W, bits - W, 0>(record), b = windows<W, bits - W, 1>(record);
    Vec x, y;
    if constexpr (is_wide<W, trellis>) pick_two<bits>(a, b, wide, x, y);
    else x = look_up<bits>(a, table), y = look_up<bits>(b, table + run.table_step);
    store(tile + c * kPage + half * kLanes, x_of(x, c)), store(tile + d * kPage + half * kLanes, x_of(y, d));
  }
}

#define KV_EACH_WIDTH KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6) KV_CASE(7) KV_CASE(8)

template <bool trellis, Mode mode>
static void key_codes_of(const uint8_t* page, const Side& side, int head, const Affine& affine, float* tile) {
  const uint8_t* record = page + side.codes_at + side.head_at[head];
  for (int half = 0; half < 2; ++half) {
    const int32_t* units = side.units + static_cast<int64_t>(head) * (side.dim / 2);
    for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r) {
      const Run run = side.runs[r];
      switch (run.width) {
#define KV_CASE(W) \
  case W: key_run<W, trellis, mode>(record, run, side.tables + run.table, units, half, side.dim, affine, tile); break;
        KV_EACH_WIDTH
#undef KV_CASE
      }
      record += 4 * run.width * run.units, units += run.units;
    }
  }
}

template <Mode mode>
static void key_codes(const uint8_t* page, const Side& side, int head, const Affine& affine, float* tile) {
  if (side.trellis) key_codes_of<true, mode>(page, side, head, affine, tile);
  else key_codes_of<false, mode>(page, side, head, affine, tile);
}

// n halves -> floats, without reading past them.
static void floats_of(const uint8_t* halves, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_half(halves + 2 * i));
  for (; i < n; ++i) out[i] = half_at(halves + 2 * i);
}

// range="group" of keys: x = level * step + base with the frame in both. step, base [32 / group, D], and for one group
// the same again, so that both halves of a page have theirs.
static void key_groups(const uint8_t* page, const Side& side, const Layer& layer, int head, float* step, float* base) {
  const int dim = side.dim, groups = kPage / side.group;
  const float *scale = side.scale + static_cast<int64_t>(head) * side.padded, *zero = side.zero + (scale - side.scale);
  for (int g = 0; g < groups; ++g) {
    const int64_t at = (static_cast<int64_t>(g) * layer.heads + head) * dim;
    const uint8_t *steps = page + side.step_at + 2 * at, *bases = page + side.base_at + 2 * at;
    float *a = step + g * dim, *b = base + g * dim;
    int c = 0;
    for (; c + kLanes <= dim; c += kLanes) {
      const Vec s = load(scale + c);
      store(b + c, fma(load_half(bases + 2 * c), s, load(zero + c)));
      store(a + c, mul(load_half(steps + 2 * c), s));
    }
    for (; c < dim; ++c) b[c] = half_at(bases + 2 * c) * scale[c] + zero[c], a[c] = half_at(steps + 2 * c) * scale[c];
  }
  if (groups > 1) return;
  __builtin_memcpy(step + dim, step, dim * sizeof(float));
  __builtin_memcpy(base + dim, base, dim * sizeof(float));
}

static void grouped_keys(const uint8_t* page, const Side& side, const Layer& layer, int head, float* work,
                         float* tile) {
  const int dim = side.dim, groups = kPage / side.group;
  float *step = work, *base = work + kPage * dim;
  key_groups(page, side, layer, head, step, base);
  if (groups <= 2) return key_codes<Mode::kChannel>(page, side, head, {step, base, nullptr, nullptr, 0}, tile);
  float *steps = base + kPage * dim, *bases = steps + dim * kPage;
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
    for (int t = 0; t < kPage; t += kLanes) {
      const uint8_t* from = halves + 2 * (static_cast<int64_t>(t) * side.cells + first + cell);
      store(out + cell * kPage + t, side.cells == 1 ? load_half(from) : strided_halves(from, side.cells));
    }
  return own;
}

// The same for values where a token has one cell per head or layer.
static void token_vectors(const uint8_t* halves, const Side& side, int head, Vec (&out)[2]) {
  const uint8_t* from = halves + (side.cells == 1 ? 0 : 2 * head);
  for (int i = 0; i < 2; ++i, from += 2 * kLanes * static_cast<int64_t>(side.cells))
    out[i] = side.cells == 1 ? load_half(from) : strided_halves(from, side.cells);
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

// work: 4 * 32 * D floats.
static void key_tile(const uint8_t* page, const Layer& layer, int head, float* work, float* tile) {
  const Side& side = layer.key;
  const float *scale = side.scale + static_cast<int64_t>(head) * side.padded, *zero = side.zero + (scale - side.scale);
  if (!side.coded) return fp16_keys(page, side, head, tile);
  if (side.range == kGroup) {
    grouped_keys(page, side, layer, head, work, tile);
  } else if (side.range == kToken) {
    float *step = work, *base = work + side.dim * kPage;
    const int own = token_cells(page + side.step_at, side, layer, head, step);
    if (side.base_at >= 0) token_cells(page + side.base_at, side, layer, head, base);
    else __builtin_memset(base, 0, own * kPage * sizeof(float));
    key_codes<Mode::kToken>(page, side, head, {step, base, scale, zero, own == 1 ? side.dim : side.group}, tile);
  } else if (side.folded) {
    key_codes<Mode::kNone>(page, side, head, {nullptr, nullptr, scale, zero, 0}, tile);
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

enum class Books { kShared, kTrellis, kOwn };  // kOwn: one table per channel

template <int W, Mode mode, Books books>
static void value_run(const uint8_t* record, const Run run, const float* table, int first, int padded,
                      const Affine affine, float* out) {
  constexpr int bits = window_bits<W, books == Books::kTrellis>;
  constexpr int entries = W <= 4 ? 16 : 1 << W;
  constexpr bool as_wide = is_wide<W, books == Books::kTrellis>;
  Wide wide;
  if constexpr (as_wide) wide = wide_at<bits>(table);
  for (int tile = first; tile < first + run.units; ++tile, table += kLanes * run.table_step) {
    Codes b = no_codes();
    for (int t = 0; t < kPage; t += 2, record += 4 * W) {
      const Codes a = next_windows<W, bits - W, 0>(record, b);
      b = next_windows<W, bits - W, 1>(record, a);
      Vec x, y;
      if constexpr (books == Books::kOwn) x = look_up_own<W>(a, table, entries), y = look_up_own<W>(b, table, entries);
      else if constexpr (as_wide) pick_two<bits>(a, b, wide, x, y);
      else x = look_up<bits>(a, table), y = look_up<bits>(b, table);
      store(out + t * padded + tile * kLanes, value_of<mode>(x, affine, t, tile, padded));
      store(out + (t + 1) * padded + tile * kLanes, value_of<mode>(y, affine, t + 1, tile, padded));
    }
  }
}

template <Mode mode, Books books>
static void value_runs(const uint8_t* page, const Side& side, int head, const Affine& affine, float* out) {
  const uint8_t* record = page + side.codes_at + side.head_at[head];
  int first = 0;
  for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r) {
    const Run run = side.runs[r];
    switch (run.width) {
#define KV_CASE(W) \
  case W: value_run<W, mode, books>(record, run, side.tables + run.table, first, side.padded, affine, out); break;
      KV_EACH_WIDTH
#undef KV_CASE
    }
    record += static_cast<int64_t>(4) * run.width * kPage / 2 * run.units, first += run.units;
  }
}

template <Mode mode>
static void value_codes(const uint8_t* page, const Side& side, int head, const Affine& affine, float* out) {
  if (side.trellis) value_runs<mode, Books::kTrellis>(page, side, head, affine, out);
  else if (side.channel_books) value_runs<mode, Books::kOwn>(page, side, head, affine, out);
  else value_runs<mode, Books::kShared>(page, side, head, affine, out);
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
      const float low = side.base_at < 0 ? 0.0f : half_at(page + side.base_at + 2 * at);
      base[t * side.padded + c] = low + step[t * side.padded + c] * side.center;
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
    for (int i = 0; i < own * kPage; ++i) base[i] += step[i] * side.center;
    const int tiles = side.padded / kLanes, cell = own == 1 ? tiles : side.group / kLanes;
    value_codes<Mode::kToken>(page, side, head, {step, base, nullptr, nullptr, cell}, tile);
  } else {
    value_elements(page, side, layer, head, step, base);
    value_codes<Mode::kElement>(page, side, head, {step, base, nullptr, nullptr, 0}, tile);
  }
  sparse_part(page, side, head, ones, side.padded, 1, tile);
}

}  // namespace
