// Scratch memory of one tensor of one page, and its elements in the calibrated frame.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "layer.h"
#include "pack.h"

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

}  // namespace
