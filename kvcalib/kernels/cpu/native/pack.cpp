// Quantises and packs whole pages, the same bytes as quant/codec.py and quant/page.py: compiled without contraction of
// multiplications and additions, element by element in the order of the torch code. Where torch sums (mean, spread,
// norm, Hadamard transform, feedback) the order differs, so codes may differ where a value lies on a rounding tie.
//
// All arrays of a page are [H, D, 32]: vectors run over tokens, and an index is the position that page.py stores.
#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "half.h"
#include "layer.h"
#include "viterbi.h"
#if KV_ISA == 512
#define KV_NAME(prefix) prefix##_avx512
#elif KV_ISA == 2
#define KV_NAME(prefix) prefix##_avx2
#else
#define KV_NAME(prefix) prefix##_portable
#endif

namespace {

constexpr float kHalfMax = 65504.0f;

uint16_t half_of(float x) {
  x = x < -kHalfMax ? -kHalfMax : x > kHalfMax ? kHalfMax : x;
#ifdef __F16C__
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  if (rest < 0x38800000u) {  // subnormal: a multiple of 2**-24, rounded to even by the addition
    const float moved = std::fabs(x) + 0.5f;
    std::memcpy(&bits, &moved, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
  }
  const uint32_t rounded = rest + 0xFFFu + (rest >> 13 & 1u);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
#endif
}

void put_half(uint8_t* p, float x) {
  const uint16_t h = half_of(x);
  std::memcpy(p, &h, 2);
}

// Memory for one tensor of one page.
struct Arena {
  float *u, *score, *wanted, *error;
  uint8_t *codes, *outlier, *windows;   // windows: of a trellis, where there is one
  float *step, *base;          // what is stored, rounded to fp16, per element [H, D, 32]
  uint32_t* ranked;
};

int64_t arena_bytes(int64_t elements) { return elements * (7 * 4 + 3) + 256; }

Arena cut(uint8_t* p, int64_t elements) {
  Arena a;
  float** const floats[] = {&a.u, &a.score, &a.wanted, &a.error, &a.step, &a.base};
  for (float** f : floats) *f = reinterpret_cast<float*>(p), p += elements * 4;
  a.ranked = reinterpret_cast<uint32_t*>(p), p += elements * 4;
  a.codes = p, a.outlier = p + elements, a.windows = p + 2 * elements;
  return a;
}

float read_one(const void* data, int type, int64_t i) {
  if (type == kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t x = static_cast<const uint16_t*>(data)[i];
  return type == kBFloat16 ? bits_to_float(static_cast<uint32_t>(x) << 16) : half_to_float(x);
}

// Tokens of one head -> x [D, 32].
void gather_head(const PackCall& call, const void* data, int64_t head_step, int64_t token_step, int64_t page, int head,
                 int dim, const int64_t* order, float* x) {
  for (int t = 0; t < kPage; ++t) {
    const int64_t from = head * head_step + call.columns[page * kPage + t] * token_step;
    for (int c = 0; c < dim; ++c) x[c * kPage + t] = read_one(data, call.type, from + (order ? order[c] : c));
  }
}

void turn_head_back(const PackCall& call, int64_t page, int dim, float* x) {
  const int pairs = dim / 2;
  for (int i = 0; i < pairs; ++i)
    for (int t = 0; t < kPage; ++t) {
      const int64_t at = (page * kPage + t) * pairs + i;
      const float c = call.cosine[at], s = call.sine[at], norm = c * c + s * s;
      float &a = x[i * kPage + t], &b = x[(i + pairs) * kPage + t];
      const float turned = (a * c + b * s) / norm;
      b = (b * c - a * s) / norm;
      a = turned;
    }
}

void hadamard_head(int dim, int size, float* x) {
  for (int half = 1; half < size; half *= 2)
    for (int from = 0; from < dim; from += 2 * half)
      for (int c = from; c < from + half; ++c)
        for (int t = 0; t < kPage; ++t) {
          const float a = x[c * kPage + t], b = x[(c + half) * kPage + t];
          x[c * kPage + t] = a + b, x[(c + half) * kPage + t] = a - b;
        }
  const float norm = 1.0f / std::sqrt(static_cast<float>(size));
  for (int i = 0; i < dim * kPage; ++i) x[i] *= norm;
}

// u of one tensor of a page: gathered, turned back or rotated, in the calibrated frame.
void frame_page(const Layer& layer, const Side& side, const PackSide& pack, const PackCall& call, int64_t page,
                bool is_key, float* u) {
  for (int head = 0; head < layer.heads; ++head) {
    float* x = u + static_cast<int64_t>(head) * side.dim * kPage;
    if (is_key) {
      gather_head(call, call.key, call.key_head, call.key_token, page, head, side.dim, layer.order, x);
      if (call.cosine) turn_head_back(call, page, side.dim, x);
    } else {
      gather_head(call, call.value, call.value_head, call.value_token, page, head, side.dim, nullptr, x);
      if (pack.hadamard) hadamard_head(side.dim, pack.hadamard, x);
    }
    for (int c = 0; c < side.dim; ++c) {
      const float zero = pack.zero[head * side.dim + c], scale = pack.scale[head * side.dim + c];
      for (int t = 0; t < kPage; ++t) x[c * kPage + t] = (x[c * kPage + t] - zero) / scale;
    }
  }
}

// Marks the `count` largest scores (all >= 0) as outliers.
void select_largest(const Arena& a, int64_t elements, int64_t count) {
  uint32_t counts[2048] = {};
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(a.score);
  for (int64_t i = 0; i < elements; ++i) ++counts[bits[i] >> 20 & 2047];
  int bin = 2047;
  int64_t above = 0;
  while (bin > 0 && above + counts[bin] < count) above += counts[bin--];
  int64_t same = 0;
  for (int64_t i = 0; i < elements; ++i)
    if ((bits[i] >> 20 & 2047) == static_cast<uint32_t>(bin)) a.ranked[same++] = bits[i];
  const int64_t needed = count - above;
  std::nth_element(a.ranked, a.ranked + needed - 1, a.ranked + same, [](uint32_t x, uint32_t y) { return x > y; });
  const uint32_t threshold = a.ranked[needed - 1];
  int64_t ties = count;
  for (int64_t i = 0; i < elements; ++i) ties -= (bits[i] & 0x7FFFFFFFu) > threshold;
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t x = bits[i] & 0x7FFFFFFFu;
    a.outlier[i] = x > threshold || (x == threshold && ties-- > 0);
  }
}

// How far an element is outside of the others: of its channel's range, or of its token.
void score_by_range(const Layer& layer, int dim, const PackSide& pack, const Arena& a) {
  const int64_t elements = static_cast<int64_t>(layer.heads) * dim * kPage;
  if (pack.range == kPackStatic || pack.range == kPackGroup) {
    for (int64_t i = 0; i < elements; ++i) a.score[i] = std::fabs(a.u[i]);
    return;
  }
  const int64_t span = pack.scope == kScopeLayer ? elements / kPage : dim;
  for (int64_t from = 0; from < elements / kPage; from += span) {
    double mean[kPage] = {}, square[kPage] = {};
    for (int64_t c = from; c < from + span; ++c)
      for (int t = 0; t < kPage; ++t) mean[t] += a.u[c * kPage + t];
    for (int t = 0; t < kPage; ++t) mean[t] = static_cast<float>(mean[t] / span);
    for (int64_t c = from; c < from + span; ++c)
      for (int t = 0; t < kPage; ++t) {
        const float d = a.u[c * kPage + t] - static_cast<float>(mean[t]);
        square[t] += static_cast<double>(d) * d, a.score[c * kPage + t] = std::fabs(d);
      }
    float spread[kPage];
    for (int t = 0; t < kPage; ++t) spread[t] = std::fmax(std::sqrt(static_cast<float>(square[t] / span)), 0x1p-126f);
    for (int64_t c = from; c < from + span; ++c)
      for (int t = 0; t < kPage; ++t) a.score[c * kPage + t] /= spread[t];
  }
}

// Range of the elements of one cell as it is stored, and read back.
struct Stored {
  float step, base;
};

Stored store_range(const PackSide& pack, float low, float high, double squares, int64_t count, uint8_t* step_at,
                   uint8_t* base_at) {
  float step, base = 0;
  if (pack.range == kPackNorm) {
    step = 4.0f * std::sqrt(static_cast<float>(squares / count));
  } else if (pack.steps) {
    step = (high - low) / static_cast<float>(pack.steps), base = low;
  } else {
    step = (high - low) / 2, base = (high + low) / 2;
  }
  put_half(step_at, step);
  if (base_at) put_half(base_at, base);
  return {half_at(step_at), base_at ? half_at(base_at) : 0.0f};
}

// range="group": cells of one channel and `group` tokens, [32 / group, H, D].
void measure_groups(const PackSide& pack, int64_t channels, const Arena& a, bool masked, uint8_t* steps,
                    uint8_t* bases) {
  for (int first = 0; first < kPage; first += pack.group)
    for (int64_t c = 0; c < channels; ++c, steps += 2, bases += 2) {
      float low = INFINITY, high = -INFINITY;
      for (int pass = 0; pass < 2 && low > high; ++pass)  // where all are outliers, the second pass takes them all
        for (int64_t i = c * kPage + first; i < c * kPage + first + pack.group; ++i) {
          if (masked && pass == 0 && a.outlier[i]) continue;
          low = std::fmin(low, a.u[i]), high = std::fmax(high, a.u[i]);
        }
      const Stored s = store_range(pack, low, high, 0, 1, steps, bases);
      for (int64_t i = c * kPage + first; i < c * kPage + first + pack.group; ++i) a.step[i] = s.step, a.base[i] = s.base;
    }
}

// range="token" and "norm": cells of one token and `span` channels, [32, cells]; 32 cells at a time.
void measure_tokens(const PackSide& pack, int64_t channels, int64_t span, const Arena& a, bool masked, uint8_t* steps,
                    uint8_t* bases) {
  const int64_t cells = channels / span;
  for (int64_t cell = 0; cell < cells; ++cell) {
    const int64_t from = cell * span, to = from + span;
    float low[kPage], high[kPage], all_low[kPage], all_high[kPage];
    double squares[kPage] = {};
    for (int t = 0; t < kPage; ++t) low[t] = all_low[t] = INFINITY, high[t] = all_high[t] = -INFINITY;
    for (int64_t c = from; c < to; ++c) {
      const float* u = a.u + c * kPage;
      if (pack.range == kPackNorm) {
        for (int t = 0; t < kPage; ++t) squares[t] += static_cast<double>(u[t]) * u[t];
        continue;
      }
      for (int t = 0; t < kPage; ++t) {
        const bool skip = masked && a.outlier[c * kPage + t];
        const float down = skip ? INFINITY : u[t], up = skip ? -INFINITY : u[t];
        low[t] = down < low[t] ? down : low[t], high[t] = up > high[t] ? up : high[t];
        all_low[t] = u[t] < all_low[t] ? u[t] : all_low[t], all_high[t] = u[t] > all_high[t] ? u[t] : all_high[t];
      }
    }
    for (int t = 0; t < kPage; ++t) {
      const bool none = low[t] > high[t];  // all are outliers
      const int64_t at = 2 * (t * cells + cell);
      const Stored s = store_range(pack, none ? all_low[t] : low[t], none ? all_high[t] : high[t], squares[t], span,
                                   steps + at, bases ? bases + at : nullptr);
      for (int64_t c = from; c < to; ++c) a.step[c * kPage + t] = s.step, a.base[c * kPage + t] = s.base;
    }
  }
}

void measure(const Layer& layer, const Side& side, const PackSide& pack, const Arena& a, bool masked, uint8_t* page) {
  const int64_t channels = static_cast<int64_t>(layer.heads) * side.dim;
  uint8_t *steps = page + side.step_at, *bases = side.base_at < 0 ? nullptr : page + side.base_at;
  if (pack.range == kPackGroup) return measure_groups(pack, channels, a, masked, steps, bases);
  const int64_t span = pack.scope == kScopeLayer ? channels : pack.scope == kScopeHead ? side.dim : pack.group;
  measure_tokens(pack, channels, span, a, masked, steps, bases);
}

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

void write_outliers(const Layer& layer, const Side& side, const PackSide& pack, const Arena& a, const float* wanted,
                    uint8_t* page) {
  int rank = 0;
  for (int64_t c = 0; c < static_cast<int64_t>(layer.heads) * side.dim; ++c) {
    const int channel = static_cast<int>(c % side.dim);
    if (channel == 0 || channel == side.dim / 2) {
      const uint16_t row = static_cast<uint16_t>(rank);
      std::memcpy(page + side.rows_at + 2 * (c / side.dim * 2 + (channel != 0)), &row, 2);
    }
    uint64_t marks[kPage / 8];
    std::memcpy(marks, a.outlier + c * kPage, sizeof marks);
    if (!(marks[0] | marks[1] | marks[2] | marks[3])) continue;
    float coded[kPage];
    from_codes(pack, a, c, coded);
    for (int t = 0; t < kPage; ++t) {
      if (!a.outlier[c * kPage + t]) continue;
      const uint16_t position = static_cast<uint16_t>(channel * kPage + t);
      put_half(page + side.corrections_at + 2 * rank, wanted[c * kPage + t] - coded[t]);
      std::memcpy(page + side.positions_at + 2 * rank, &position, 2);
      ++rank;
    }
  }
  const uint16_t row = static_cast<uint16_t>(rank);
  std::memcpy(page + side.rows_at + 4 * layer.heads, &row, 2);
}

// 16 codes, `stride` bytes apart, as a stream of 2 * width bytes.
void put_codes(const uint8_t* codes, int stride, int count, int width, uint8_t* out) {
  for (int eight = 0; eight < 2; ++eight) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i)
      if (8 * eight + i < count) word |= static_cast<uint64_t>(codes[(8 * eight + i) * stride]) << (width * i);
    for (int i = 0; i < width; ++i) out[eight * width + i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

void write_key_codes(const Layer& layer, const Arena& a, uint8_t* page) {
  const Side& side = layer.key;
  const int pairs = side.dim / 2;
  for (int head = 0; head < layer.heads; ++head) {
    uint8_t* out = page + side.codes_at + side.head_at[head];
    for (int half = 0; half < 2; ++half) {
      const int32_t* units = side.units + static_cast<int64_t>(head) * pairs;
      for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r)
        for (int j = 0; j < side.runs[r].units; ++j) {
          const int width = side.runs[r].width, c = *units++;
          const uint8_t* codes = a.codes + (static_cast<int64_t>(head) * side.dim + c) * kPage + half * kLanes;
          put_codes(codes, 1, kLanes, width, out);
          put_codes(codes + pairs * kPage, 1, kLanes, width, out + 2 * width);
          out += 4 * width;
        }
    }
  }
}

void write_value_codes(const Layer& layer, const Arena& a, uint8_t* page) {
  const Side& side = layer.value;
  for (int head = 0; head < layer.heads; ++head) {
    uint8_t* out = page + side.codes_at + side.head_at[head];
    int tile = 0;
    for (int r = side.run_at[head]; r < side.run_at[head + 1]; ++r)
      for (int j = 0; j < side.runs[r].units; ++j, ++tile) {
        const int width = side.runs[r].width, count = std::min<int>(kLanes, side.dim - tile * kLanes);
        const uint8_t* codes = a.codes + (static_cast<int64_t>(head) * side.dim + tile * kLanes) * kPage;
        for (int t = 0; t < kPage; ++t, out += 2 * width) put_codes(codes + t, kPage, count, width, out);
      }
  }
}

void write_fp16(const Layer& layer, const Side& side, bool is_key, const Arena& a, uint8_t* page) {
  const int width = is_key ? side.dim : side.padded;
  for (int head = 0; head < layer.heads; ++head)
    for (int t = 0; t < kPage; ++t)
      for (int c = 0; c < side.dim; ++c)
        put_half(page + side.codes_at + 2 * ((static_cast<int64_t>(head) * kPage + t) * width + c),
                 a.u[(static_cast<int64_t>(head) * side.dim + c) * kPage + t]);
}

void pack_side(const Layer& layer, const Side& side, const PackSide& pack, const PackCall& call, int64_t index,
               bool is_key, const Arena& a, uint8_t* page) {
  const int64_t channels = static_cast<int64_t>(layer.heads) * side.dim, elements = channels * kPage;
  frame_page(layer, side, pack, call, index, is_key, a.u);
  if (!side.coded) return write_fp16(layer, side, is_key, a, page);
  const bool by_range = pack.outliers && !pack.by_error;
  if (by_range) {
    score_by_range(layer, side.dim, pack, a);
    select_largest(a, elements, pack.outliers);
  }
  if (pack.range != kPackStatic) measure(layer, side, pack, a, by_range, page);
  if (!pack.feedback || pack.by_error) encode_nearest(pack, channels, a);
  if (pack.by_error) select_largest(a, elements, pack.outliers);
  if (pack.feedback) encode_feedback(pack, layer.heads, side.dim, a);
  if (pack.outliers) write_outliers(layer, side, pack, a, pack.feedback ? a.wanted : a.u, page);
  if (is_key) write_key_codes(layer, a, page);
  else write_value_codes(layer, a, page);
}

}  // namespace

int64_t KV_NAME(pack_bytes)(const Layer& layer) {
  const int dim = layer.key.dim > layer.value.dim ? layer.key.dim : layer.value.dim;
  return arena_bytes(static_cast<int64_t>(layer.heads) * dim * kPage);
}

void KV_NAME(pack_page)(const Layer& layer, const Pack& pack, const PackCall& call, int64_t index, uint8_t* memory) {
  uint8_t* page = call.out + index * layer.page_bytes;
  std::memset(page, 0, layer.page_bytes);
  std::memcpy(page, call.first + index, 4);
  std::memcpy(page + 4, call.tokens + index, 4);
  pack_side(layer, layer.key, pack.key, call, index, true,
            cut(memory, static_cast<int64_t>(layer.heads) * layer.key.dim * kPage), page);
  pack_side(layer, layer.value, pack.value, call, index, false,
            cut(memory, static_cast<int64_t>(layer.heads) * layer.value.dim * kPage), page);
}
