// Which elements are outliers, and the ranges that are measured on the rest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pack_frame.h"

namespace {

typedef uint32_t __attribute__((may_alias)) AliasedBits;  // numbers >= 0 compare as their bits do

// Marks the `count` largest scores (all >= 0; count > 0) as outliers.
void select_largest(const Arena& a, int64_t elements, int64_t count) {
  uint32_t counts[2048] = {};
  const AliasedBits* bits = reinterpret_cast<const AliasedBits*>(a.score);
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

}  // namespace
