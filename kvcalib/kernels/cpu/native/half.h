// 16-bit floats, one at a time.
#pragma once
#include <cstdint>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

inline float bits_to_float(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

inline float half_to_float(uint16_t h) {
#ifdef __F16C__
  return _cvtsh_ss(h);
#else
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7FFFu;
  if (rest >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  if (rest < 0x400u) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(rest);
  return bits_to_float(sign | ((rest << 13) + (112u << 23)));
#endif
}

inline float half_at(const uint8_t* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return half_to_float(h);
}

typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

// to += x * factor, four floats each
inline void add_quad(float* to, const float* x, float factor) {
  *reinterpret_cast<Quad*>(to) += *reinterpret_cast<const Quad*>(x) * factor;
}

inline int uint16_at(const uint8_t* p) {
  uint16_t x;
  __builtin_memcpy(&x, p, 2);
  return x;
}

}  // namespace
