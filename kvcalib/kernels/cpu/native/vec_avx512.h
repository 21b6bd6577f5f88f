// 16 floats in one register: AVX-512 F, BW, DQ, VL and VBMI.
#pragma once
#include <immintrin.h>

#include "batch.h"
#include "half.h"
#include "layer.h"

#define KV_INLINE static inline __attribute__((always_inline))

namespace {

using Vec = __m512;
using Codes = __m512i;  // 16 codes; bits above the width may be anything

enum : int { kHalves = 2, kMaxQueries = 8, kMaxTiles = 4 };

KV_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
KV_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
KV_INLINE Vec splat(float a) { return _mm512_set1_ps(a); }
KV_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
KV_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
KV_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
KV_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
KV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
KV_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
KV_INLINE Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
KV_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a); }
KV_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a); }
KV_INLINE Vec round_even(Vec a) { return _mm512_roundscale_ps(a, 0); }
KV_INLINE Vec times_power_of_two(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
// a where x >= y, else b
KV_INLINE Vec where_at_least(Vec x, Vec y, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GE_OQ), b, a);
}
KV_INLINE Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
KV_INLINE Vec with_sign(Vec a, Vec s) {
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(s), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), sign));
}
// a where the byte is not 0, else b
KV_INLINE Vec where_byte(const uint8_t* bytes, Vec a, Vec b) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return _mm512_mask_blend_ps(_mm_test_epi8_mask(x, x), b, a);
}
KV_INLINE Vec load_half(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
KV_INLINE Vec load_bfloat(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// 16 halves, `step` halves apart. Reads two bytes past the last one: what follows in a page are codes.
KV_INLINE Vec strided_halves(const uint8_t* p, int step) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i words = _mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(step)), p, 2);
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
}

KV_INLINE __m512i lanes_from(int first, int step, int high_first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i start = _mm512_mask_set1_epi32(_mm512_set1_epi32(first), 0xFF00, high_first);
  return _mm512_add_epi32(start, _mm512_mullo_epi32(lane, _mm512_set1_epi32(step)));
}
KV_INLINE __m128i low8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

// The 16 codes of one half (0, 1) of a record of 32: 2 * W bytes. Nothing outside of the record is read.
template <int W, int half>
KV_INLINE Codes codes(const uint8_t* record) {
  const uint8_t* p = record + half * 2 * W;
  if constexpr (W <= 2) {
    int32_t word = 0;
    __builtin_memcpy(&word, p, 2 * W);
    return _mm512_srlv_epi32(_mm512_set1_epi32(word), lanes_from(0, W, 8 * W));
  } else if constexpr (W == 3) {  // 6 bytes: 8 are read, from inside of the record
    const __m512i word = _mm512_broadcastq_epi64(low8(record + half * 4));
    return _mm512_multishift_epi64_epi8(lanes_from(16 * half, W, 16 * half + 8 * W), word);
  } else if constexpr (W == 4) {
    return _mm512_multishift_epi64_epi8(lanes_from(0, W, 8 * W), _mm512_broadcastq_epi64(low8(p)));
  } else {
    const __m512i low = _mm512_broadcastq_epi64(low8(p));
    const __m512i both = _mm512_mask_broadcastq_epi64(low, 0xF0, low8(p + 2 * W - 8));
    return _mm512_multishift_epi64_epi8(lanes_from(0, W, 64 - 8 * W), both);
  }
}

KV_INLINE Codes no_codes() { return _mm512_setzero_si512(); }

// For multishift: the same place for all bytes of a lane.
KV_INLINE __m512i bytes_from(int first, int step, int high_first) {
  const __m512i low_bits = _mm512_and_si512(lanes_from(first, step, high_first), _mm512_set1_epi32(63));
  return _mm512_mullo_epi32(low_bits, _mm512_set1_epi32(0x01010101));
}

// The same with the H bits of the stream before each code below it; before the first code there are zeros. All bytes of
// a lane hold its window where W + H = 6.
template <int W, int H, int half>
KV_INLINE Codes windows(const uint8_t* record) {
  const uint8_t* p = record + half * 2 * W;
  if constexpr (H == 0 && W < 6) {
    return codes<W, half>(record);
  } else if constexpr (W <= 2 && W + H < 6) {
    int32_t word = 0;
    __builtin_memcpy(&word, p, 2 * W);
    const __m512i all = _mm512_set1_epi32(word);  // the zeros have room before the first eight codes alone
    return _mm512_srlv_epi32(_mm512_mask_slli_epi32(all, 0x00FF, all, H), lanes_from(0, W, 8 * W - H));
  } else if constexpr (W <= 2) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p, 2 * W);
    return _mm512_multishift_epi64_epi8(bytes_from(0, W, 8 * W), _mm512_set1_epi64(word << H));
  } else if constexpr (W == 3) {
    const __m512i word = _mm512_broadcastq_epi64(low8(record + half * 4));
    if constexpr (half == 0)
      return _mm512_multishift_epi64_epi8(bytes_from(0, W, 8 * W), _mm512_slli_epi64(word, H));
    const __m512i own = _mm512_and_si512(word, _mm512_set1_epi64(~int64_t{0xFFFF}));
    return _mm512_multishift_epi64_epi8(bytes_from(16 - H, W, 16 - H + 8 * W), own);
  } else {
    __m512i both = _mm512_broadcastq_epi64(low8(p));
    if constexpr (W > 4) both = _mm512_mask_broadcastq_epi64(both, 0xF0, low8(p + 2 * W - 8));
    both = _mm512_mask_slli_epi64(both, 0x0F, both, H);
    return _mm512_multishift_epi64_epi8(bytes_from(0, W, 64 - 8 * W - H), both);
  }
}

// Codes with the H bits of each lane's own stream below them: `before` are the windows of the token before.
template <int W, int H, int half>
KV_INLINE Codes next_windows(const uint8_t* record, Codes before) {
  const uint8_t* p = record + half * 2 * W;
  if constexpr (H == 0) {
    return windows<W, 0, half>(record);
  } else {
    __m512i above;  // every code H bits up, with anything below
    if constexpr (W <= 2) {
      int64_t word = 0;
      __builtin_memcpy(&word, p, 2 * W);
      if constexpr (W + H < 6)
        above = _mm512_rorv_epi32(_mm512_set1_epi32(static_cast<int32_t>(word)), lanes_from(-H, W, 8 * W - H));
      else above = _mm512_multishift_epi64_epi8(bytes_from(-H, W, 8 * W - H), _mm512_set1_epi64(word));
    } else if constexpr (W == 3) {
      const __m512i word = _mm512_broadcastq_epi64(low8(record + half * 4));
      above = _mm512_multishift_epi64_epi8(bytes_from(16 * half - H, W, 16 * half + 8 * W - H), word);
    } else {
      __m512i both = _mm512_broadcastq_epi64(low8(p));
      if constexpr (W > 4) both = _mm512_mask_broadcastq_epi64(both, 0xF0, low8(p + 2 * W - 8));
      above = _mm512_multishift_epi64_epi8(bytes_from(-H, W, 64 - 8 * W - H), both);
    }
    constexpr int history = ((1 << H) - 1) * 0x01010101, choose = 0xCA;  // a ? b : c, bit by bit
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(history), _mm512_srli_epi32(before, W), above, choose);
  }
}

// 32 levels, or 64 that are exact in bf16: their low bytes and their high bytes. See Side::tables.
struct Wide {
  __m512i low, high;
  Vec v[2];
};
template <int bits>
KV_INLINE Wide wide_at(const float* table) {
  Wide wide;
  if constexpr (bits == 6) wide.low = _mm512_loadu_si512(table + 64), wide.high = _mm512_loadu_si512(table + 80);
  else wide.v[0] = load(table), wide.v[1] = load(table + kLanes);
  return wide;
}
template <int bits>
KV_INLINE Vec pick_wide(Codes c, const Wide& table) {
  if constexpr (bits == 5) return _mm512_permutex2var_ps(table.v[0], c, table.v[1]);
  const __m512i low = _mm512_maskz_permutexvar_epi8(0x4444444444444444u, c, table.low);
  return _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(low, 0x8888888888888888u, c, table.high));
}
template <int bits>
KV_INLINE void pick_two(Codes a, Codes b, const Wide& table, Vec& x, Vec& y) {
  x = pick_wide<bits>(a, table), y = pick_wide<bits>(b, table);
}

template <int W>
KV_INLINE Codes clean(Codes c) {
  return _mm512_and_si512(c, _mm512_set1_epi32((1 << W) - 1));
}

// A table of 2**W entries in registers, 16 in each; W <= 6.
template <int W>
KV_INLINE Vec pick_from(Codes c, const Vec (&table)[4]) {
  if constexpr (W <= 4) return _mm512_permutexvar_ps(c, table[0]);
  const Vec low = _mm512_permutex2var_ps(table[0], c, table[1]);
  if constexpr (W == 5) return low;
  const __mmask16 upper = _mm512_test_epi32_mask(c, _mm512_set1_epi32(32));
  return _mm512_mask_blend_ps(upper, low, _mm512_permutex2var_ps(table[2], c, table[3]));
}
// Transposes the four 4 x 4 blocks that four rows of 16 are made of; its own inverse.
KV_INLINE void transpose4(Vec (&r)[4]) {
  const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
  const __m512d ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
  const __m512d cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  r[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), r[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  r[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), r[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2));
}
// Its four quarters, `step` floats apart.
KV_INLINE void store_quarters(float* p, int step, Vec a) {
  _mm_storeu_ps(p, _mm512_castps512_ps128(a)), _mm_storeu_ps(p + step, _mm512_extractf32x4_ps(a, 1));
  _mm_storeu_ps(p + 2 * step, _mm512_extractf32x4_ps(a, 2)), _mm_storeu_ps(p + 3 * step, _mm512_extractf32x4_ps(a, 3));
}
// Each of the four floats at p four times.
KV_INLINE Vec spread4(const float* p) {
  const __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(four, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}

// table: 16 entries for W <= 4, else 2**W
template <int W>
KV_INLINE Vec look_up(Codes c, const float* table) {
  if constexpr (W <= 4) return _mm512_permutexvar_ps(c, load(table));
  if constexpr (W == 5) return _mm512_permutex2var_ps(load(table), c, load(table + 16));
  return _mm512_i32gather_ps(clean<W>(c), table, 4);
}

// Lane i looks into the table that begins at table[i * entries].
template <int W>
KV_INLINE Vec look_up_own(Codes c, const float* table, int entries) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i start = _mm512_mullo_epi32(lane, _mm512_set1_epi32(entries));
  return _mm512_i32gather_ps(_mm512_add_epi32(clean<W>(c), start), table, 4);
}

// out[token * token_step + channel * channel_step] += correction * factor[channel] for n distinct
// positions = channel * 32 + token.
KV_INLINE void add_sparse(float* out, const uint8_t* positions, const uint8_t* corrections, int n, const float* factor,
                          int token_step, int channel_step) {
  for (int i = 0; i < n; i += kLanes) {
    const __mmask16 used = n - i >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512i position = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(used, positions + 2 * i));
    const __m512i token = _mm512_and_si512(position, _mm512_set1_epi32(kPage - 1));
    const __m512i channel = _mm512_srli_epi32(position, 5);
    const __m512i to = _mm512_add_epi32(_mm512_mullo_epi32(token, _mm512_set1_epi32(token_step)),
                                        _mm512_mullo_epi32(channel, _mm512_set1_epi32(channel_step)));
    const Vec x = mul(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(used, corrections + 2 * i)),
                      _mm512_mask_i32gather_ps(splat(0), used, channel, factor, 4));
    const Vec old = _mm512_mask_i32gather_ps(splat(0), used, to, out, 4);
    _mm512_mask_i32scatter_ps(out, used, to, add(old, x), 4);
  }
}

KV_INLINE __m512i quads_at(__m512i i) {
  const __m512i low = _mm512_slli_epi32(_mm512_and_si512(i, _mm512_set1_epi32(3)), 4);
  const __m512i high = _mm512_and_si512(i, _mm512_set1_epi32(12));
  const __m512i rest = _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(15), i), 2);
  return _mm512_or_si512(_mm512_or_si512(low, high), rest);
}
KV_INLINE __m512i mask_load16(const uint8_t* p, int i, int n, __mmask16& used) {
  used = n - i >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << (n - i)) - 1);
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(used, p + 2 * i));
}

// Corrections of keys: delta = correction * scale, turned with its token. Quads of channels are in channel order.
KV_INLINE void key_batch(const uint8_t* positions, const uint8_t* corrections, int n, const float* scale,
                         const float* relative, int pairs, Batch& b) {
  const __m512i half = _mm512_set1_epi32(pairs);
  for (int i = 0; i < n; i += kLanes) {
    __mmask16 used;
    const __m512i position = mask_load16(positions, i, n, used), c = _mm512_srli_epi32(position, 5);
    const __m512i t = _mm512_and_si512(position, _mm512_set1_epi32(kPage - 1));
    const __mmask16 upper = _mm512_cmpge_epi32_mask(c, half);
    const __m512i pair = _mm512_mask_sub_epi32(c, upper, c, half);
    const __m512i angle = _mm512_add_epi32(_mm512_slli_epi32(pair, 6), t);
    const __m512i partner = _mm512_mask_mov_epi32(_mm512_add_epi32(c, half), upper, pair);
    const Vec correction = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(used, corrections + 2 * i));
    const Vec x = mul(correction, _mm512_i32gather_ps(c, scale, 4));
    store(b.along + i, mul(x, _mm512_i32gather_ps(angle, relative, 4)));
    const Vec across = mul(x, _mm512_i32gather_ps(angle, relative + kPage, 4));
    store(b.across + i, _mm512_mask_sub_ps(across, upper, splat(0.0f), across));
    _mm512_store_si512(b.token + i, quads_at(t));
    _mm512_store_si512(b.same + i, _mm512_slli_epi32(c, 2));
    _mm512_store_si512(b.other + i, _mm512_slli_epi32(partner, 2));
  }
}

// Corrections of values; quads of channels are where quad_at says.
KV_INLINE void value_batch(const uint8_t* positions, const uint8_t* corrections, int n, Batch& b) {
  for (int i = 0; i < n; i += kLanes) {
    __mmask16 used;
    const __m512i position = mask_load16(positions, i, n, used);
    store(b.along + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(used, corrections + 2 * i)));
    _mm512_store_si512(b.token + i, quads_at(_mm512_and_si512(position, _mm512_set1_epi32(kPage - 1))));
    _mm512_store_si512(b.same + i, quads_at(_mm512_srli_epi32(position, 5)));
  }
}

}  // namespace
