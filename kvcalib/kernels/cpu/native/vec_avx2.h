// 16 floats in two registers: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include "half.h"
#include "layer.h"

#define KV_INLINE static inline __attribute__((always_inline))

namespace {

struct Vec {
  __m256 a, b;
};
struct Codes {  // 16 codes; bits above the width may be anything
  __m256i a, b;
};

enum : int { kHalves = 1, kMaxQueries = 4, kMaxTiles = 1 };

KV_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KV_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
KV_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KV_INLINE Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
KV_INLINE Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
KV_INLINE Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
KV_INLINE Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
KV_INLINE Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
KV_INLINE Vec fnma(Vec x, Vec y, Vec z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
KV_INLINE Vec vmax(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
KV_INLINE float sum(Vec x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KV_INLINE float largest(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
KV_INLINE Vec round_even(Vec x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
KV_INLINE __m256 scaled(__m256 x, __m256 n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
// n: whole numbers from -126 to 127
KV_INLINE Vec times_power_of_two(Vec x, Vec n) { return {scaled(x.a, n.a), scaled(x.b, n.b)}; }
// a where x >= y, else b
KV_INLINE Vec where_at_least(Vec x, Vec y, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)),
          _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))};
}
KV_INLINE Vec magnitude(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
KV_INLINE Vec with_sign(Vec x, Vec s) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(x.a, _mm256_and_ps(sign, s.a)), _mm256_or_ps(x.b, _mm256_and_ps(sign, s.b))};
}
KV_INLINE __m256 zero_bytes(__m128i bytes) {
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256()));
}
// a where the byte is not 0, else b
KV_INLINE Vec where_byte(const uint8_t* bytes, Vec a, Vec b) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {_mm256_blendv_ps(a.a, b.a, zero_bytes(x)), _mm256_blendv_ps(a.b, b.b, zero_bytes(_mm_srli_si128(x, 8)))};
}
KV_INLINE Vec load_half(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
// 16 halves, `step` halves apart.
KV_INLINE Vec strided_halves(const uint8_t* p, int step) {
  alignas(32) uint16_t near[kLanes];
  for (int i = 0; i < kLanes; ++i) __builtin_memcpy(near + i, p + 2 * static_cast<int64_t>(i) * step, 2);
  return load_half(near);
}
KV_INLINE __m256 bfloat8(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
KV_INLINE Vec load_bfloat(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {bfloat8(_mm_loadu_si128(q)), bfloat8(_mm_loadu_si128(q + 1))};
}

KV_INLINE __m256i word_at(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// Codes `first` .. first + 7 of a record: four words of the record cover any of them.
template <int W, int first>
KV_INLINE __m256i eight_codes(const uint8_t* record) {
  constexpr int last = 4 * W - 4;  // the last place in the record where a word can be read
  if constexpr (W <= 4) {
    constexpr int byte = first * W / 8 < last ? first * W / 8 : last, bit = first * W - 8 * byte;
    const __m256i shift = _mm256_setr_epi32(bit, bit + W, bit + 2 * W, bit + 3 * W, bit + 4 * W, bit + 5 * W,
                                            bit + 6 * W, bit + 7 * W);
    return _mm256_srlv_epi32(word_at(record + byte), shift);
  } else {
    constexpr int low_byte = first * W / 8, low = first * W - 8 * low_byte;
    constexpr int next = (first + 4) * W, high_byte = next / 8 < last ? next / 8 : last, high = next - 8 * high_byte;
    const __m256i words = _mm256_blend_epi32(word_at(record + low_byte), word_at(record + high_byte), 0xF0);
    const __m256i shift =
        _mm256_setr_epi32(low, low + W, low + 2 * W, low + 3 * W, high, high + W, high + 2 * W, high + 3 * W);
    return _mm256_srlv_epi32(words, shift);
  }
}

// The 16 codes of one half (0, 1) of a record of 32. Nothing outside of the record is read.
template <int W, int half>
KV_INLINE Codes codes(const uint8_t* record) {
  return {eight_codes<W, 16 * half>(record), eight_codes<W, 16 * half + 8>(record)};
}

KV_INLINE Codes no_codes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

// Windows `first` .. first + n - 1 of a record, n = 4 or 8, in the low lanes: codes above H bits of the stream before
// them, which begins with zeros every 16 codes.
template <int W, int H, int first, int n>
KV_INLINE __m256i some_windows(const uint8_t* record) {
  constexpr int last = 4 * W - 4, start = first * W - (first % 16 ? H : 0);
  constexpr int byte = start / 8 < last ? start / 8 : last, bit = start - 8 * byte;
  constexpr int missing = first % 16 ? 0 : H;  // zeros to put below
  static_assert(missing == 0 || bit == 0 || bit >= missing, "a stream begins at a byte");
  static_assert((missing ? (bit ? bit : missing) : bit + H) + n * W <= 32, "one word covers them");
  int32_t word;
  __builtin_memcpy(&word, record + byte, 4);
  if (missing && bit) word &= static_cast<int32_t>(~0u << bit);
  if (missing && !bit) word = static_cast<int32_t>(static_cast<uint32_t>(word) << missing);
  constexpr int from = missing && bit ? bit - missing : bit;
  const __m256i shift = _mm256_setr_epi32(from, from + W, from + 2 * W, from + 3 * W, from + 4 * W, from + 5 * W,
                                          from + 6 * W, from + 7 * W);
  return _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
}
template <int W, int H, int first>
KV_INLINE __m256i eight_windows(const uint8_t* record) {
  if constexpr (8 * W + H <= 26) return some_windows<W, H, first, 8>(record);
  const __m256i low = some_windows<W, H, first, 4>(record), high = some_windows<W, H, first + 4, 4>(record);
  return _mm256_inserti128_si256(low, _mm256_castsi256_si128(high), 1);
}
// The 16 codes of one half (0, 1) of a record with the H bits of the stream before each of them below it.
template <int W, int H, int half>
KV_INLINE Codes windows(const uint8_t* record) {
  if constexpr (H == 0) return codes<W, half>(record);
  else return {eight_windows<W, H, 16 * half>(record), eight_windows<W, H, 16 * half + 8>(record)};
}

// Codes with the H bits of each lane's own stream below them: `before` are the windows of the token before.
template <int W, int H>
KV_INLINE __m256i next_eight(__m256i code, __m256i before) {
  const __m256i history = _mm256_and_si256(_mm256_srli_epi32(before, W), _mm256_set1_epi32((1 << H) - 1));
  return _mm256_or_si256(_mm256_slli_epi32(code, H), history);
}
template <int W, int H, int half>
KV_INLINE Codes next_windows(const uint8_t* record, Codes before) {
  const Codes c = codes<W, half>(record);
  if constexpr (H == 0) return c;
  else return {next_eight<W, H>(c.a, before.a), next_eight<W, H>(c.b, before.b)};
}

KV_INLINE __m256 pick(__m256 low, __m256 high, __m256i code, int bit) {
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 31 - bit)));
}
KV_INLINE __m256 sixteen(__m256i c, Vec table) {
  return pick(_mm256_permutevar8x32_ps(table.a, c), _mm256_permutevar8x32_ps(table.b, c), c, 3);
}
template <int W>
KV_INLINE __m256 pick_eight(__m256i c, const Vec (&table)[4]) {
  if constexpr (W <= 3) return _mm256_permutevar8x32_ps(table[0].a, c);
  if constexpr (W == 4) return sixteen(c, table[0]);
  const __m256 low = pick(sixteen(c, table[0]), sixteen(c, table[1]), c, 4);
  if constexpr (W == 5) return low;
  return pick(low, pick(sixteen(c, table[2]), sixteen(c, table[3]), c, 4), c, 5);
}
// A table of 2**W entries in registers, 16 in each; W <= 6.
template <int W>
KV_INLINE Vec pick_from(Codes c, const Vec (&table)[4]) {
  return {pick_eight<W>(c.a, table), pick_eight<W>(c.b, table)};
}
// table: 16 entries for W <= 4, else 2**W
template <int W>
KV_INLINE Vec look_up(Codes c, const float* table) {
  if constexpr (W <= 5) {
    const Vec entries[4] = {load(table), W == 5 ? load(table + 16) : Vec{}};
    return pick_from<W>(c, entries);
  }
  const __m256i mask = _mm256_set1_epi32((1 << W) - 1);
  return {_mm256_i32gather_ps(table, _mm256_and_si256(c.a, mask), 4),
          _mm256_i32gather_ps(table, _mm256_and_si256(c.b, mask), 4)};
}
// Levels that are exact in bf16, shared by all channels: their low bytes and their high bytes, 16 in every half.
struct Wide {
  __m256i low[4], high[4];
};
template <int bits>
KV_INLINE Wide wide_at(const float* table) {
  alignas(16) uint8_t low[1 << bits], high[1 << bits];
  for (int i = 0; i < 1 << bits; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, table + i, 4);
    low[i] = static_cast<uint8_t>(word >> 16), high[i] = static_cast<uint8_t>(word >> 24);
  }
  Wide wide;
  for (int g = 0; g < (1 << bits) / 16; ++g) {
    wide.low[g] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low + 16 * g)));
    wide.high[g] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high + 16 * g)));
  }
  return wide;
}
// 32 levels at once, for a shuffle of bytes takes that many.
template <int bits>
KV_INLINE void pick_two(Codes a, Codes b, const Wide& table, Vec& x, Vec& y) {
  const __m256i mask = _mm256_set1_epi32((1 << bits) - 1), zero = _mm256_setzero_si256();
  const __m256i first = _mm256_packus_epi32(_mm256_and_si256(a.a, mask), _mm256_and_si256(a.b, mask));
  const __m256i second = _mm256_packus_epi32(_mm256_and_si256(b.a, mask), _mm256_and_si256(b.b, mask));
  const __m256i index = _mm256_packus_epi16(first, second);
  __m256i low = zero, high = zero;
  for (int g = 0; g < (1 << bits) / 16; ++g) {  // a byte that belongs to another group gets bit 7, which picks 0
    const __m256i from = _mm256_sub_epi8(index, _mm256_set1_epi8(static_cast<char>(16 * g)));
    const __m256i own = _mm256_adds_epu8(from, _mm256_set1_epi8(0x70));
    low = _mm256_or_si256(low, _mm256_shuffle_epi8(table.low[g], own));
    high = _mm256_or_si256(high, _mm256_shuffle_epi8(table.high[g], own));
  }
  const __m256i of_a = _mm256_unpacklo_epi8(low, high), of_b = _mm256_unpackhi_epi8(low, high);
  x = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, of_a)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, of_a))};
  y = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, of_b)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, of_b))};
}
KV_INLINE void transpose_eight(__m256& a, __m256& b, __m256& c, __m256& d) {
  const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), ab2 = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
  const __m256d cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), cd2 = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
  a = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), b = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
  c = _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)), d = _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2));
}
// Transposes the four 4 x 4 blocks that four rows of 16 are made of; its own inverse.
KV_INLINE void transpose4(Vec (&r)[4]) {
  transpose_eight(r[0].a, r[1].a, r[2].a, r[3].a);
  transpose_eight(r[0].b, r[1].b, r[2].b, r[3].b);
}
// Its four quarters, `step` floats apart.
KV_INLINE void store_quarters(float* p, int step, Vec v) {
  _mm_storeu_ps(p, _mm256_castps256_ps128(v.a)), _mm_storeu_ps(p + step, _mm256_extractf128_ps(v.a, 1));
  _mm_storeu_ps(p + 2 * step, _mm256_castps256_ps128(v.b)), _mm_storeu_ps(p + 3 * step, _mm256_extractf128_ps(v.b, 1));
}
// Each of the four floats at p four times.
KV_INLINE Vec spread4(const float* p) {
  const __m256 both = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {_mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
          _mm256_permutevar_ps(both, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3))};
}

// Lane i looks into the table that begins at table[i * entries].
template <int W>
KV_INLINE Vec look_up_own(Codes c, const float* table, int entries) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), mask = _mm256_set1_epi32((1 << W) - 1);
  const __m256i start = _mm256_mullo_epi32(lane, _mm256_set1_epi32(entries));
  return {_mm256_i32gather_ps(table, _mm256_add_epi32(_mm256_and_si256(c.a, mask), start), 4),
          _mm256_i32gather_ps(table + 8 * entries, _mm256_add_epi32(_mm256_and_si256(c.b, mask), start), 4)};
}

}  // namespace

#include "sparse.h"
