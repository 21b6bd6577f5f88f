// 16 floats in four vectors of the compiler's own vector extension: SSE2, NEON, or whatever there is.
#pragma once
#include "half.h"
#include "layer.h"

#define KV_INLINE static inline __attribute__((always_inline))

namespace {

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInt __attribute__((vector_size(16)));

struct Vec {
  Four x[4];
};
struct Codes {
  uint8_t x[16];
};

enum : int { kHalves = 1, kMaxQueries = 2, kMaxTiles = 1 };

#define KV_EACH(expression) \
  Vec r;                    \
  for (int i = 0; i < 4; ++i) r.x[i] = (expression); \
  return r

KV_INLINE Vec load(const float* p) {
  Vec r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
KV_INLINE void store(float* p, const Vec& a) { __builtin_memcpy(p, &a, sizeof a); }
KV_INLINE Four splat4(float a) { return Four{a, a, a, a}; }
KV_INLINE Four choose4(FourInt mask, Four a, Four b) { return (Four)((mask & (FourInt)a) | (~mask & (FourInt)b)); }
KV_INLINE Vec splat(float a) { KV_EACH(splat4(a)); }
KV_INLINE Vec add(const Vec& a, const Vec& b) { KV_EACH(a.x[i] + b.x[i]); }
KV_INLINE Vec sub(const Vec& a, const Vec& b) { KV_EACH(a.x[i] - b.x[i]); }
KV_INLINE Vec mul(const Vec& a, const Vec& b) { KV_EACH(a.x[i] * b.x[i]); }
KV_INLINE Vec div(const Vec& a, const Vec& b) { KV_EACH(a.x[i] / b.x[i]); }
KV_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) { KV_EACH(a.x[i] * b.x[i] + c.x[i]); }
KV_INLINE Vec fnma(const Vec& a, const Vec& b, const Vec& c) { KV_EACH(c.x[i] - a.x[i] * b.x[i]); }
KV_INLINE Vec vmax(const Vec& a, const Vec& b) { KV_EACH(choose4(a.x[i] > b.x[i], a.x[i], b.x[i])); }
KV_INLINE float sum(const Vec& a) {
  const Four s = (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
KV_INLINE float largest(const Vec& a) {
  float m = a.x[0][0];
  for (int i = 1; i < kLanes; ++i) m = a.x[i / 4][i % 4] > m ? a.x[i / 4][i % 4] : m;
  return m;
}
KV_INLINE Vec round_even(const Vec& a) {  // below 2**22 in magnitude
  const Four magic = splat4(0x1.8p23f);
  KV_EACH((a.x[i] + magic) - magic);
}
// n: whole numbers from -126 to 127
KV_INLINE Vec times_power_of_two(const Vec& a, const Vec& n) {
  KV_EACH(a.x[i] * (Four)((__builtin_convertvector(n.x[i], FourInt) + 127) << 23));
}
// a where x >= y, else b
KV_INLINE Vec where_at_least(const Vec& x, const Vec& y, const Vec& a, const Vec& b) {
  KV_EACH(choose4(x.x[i] >= y.x[i], a.x[i], b.x[i]));
}
KV_INLINE Vec magnitude(const Vec& a) { KV_EACH((Four)((FourInt)a.x[i] & INT32_MAX)); }
KV_INLINE Vec with_sign(const Vec& a, const Vec& s) {
  KV_EACH((Four)((FourInt)a.x[i] | ((FourInt)s.x[i] & INT32_MIN)));
}
// a where the byte is not 0, else b
KV_INLINE Vec where_byte(const uint8_t* bytes, const Vec& a, const Vec& b) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i / 4][i % 4] = bytes[i] ? a.x[i / 4][i % 4] : b.x[i / 4][i % 4];
  return r;
}
KV_INLINE Vec load_half(const void* p) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i / 4][i % 4] = half_at(static_cast<const uint8_t*>(p) + 2 * i);
  return r;
}
// 16 halves, `step` halves apart.
KV_INLINE Vec strided_halves(const uint8_t* p, int step) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i / 4][i % 4] = half_at(p + 2 * static_cast<int64_t>(i) * step);
  return r;
}
KV_INLINE Vec load_bfloat(const void* p) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t high = uint16_at(static_cast<const uint8_t*>(p) + 2 * i);
    r.x[i / 4][i % 4] = bits_to_float(high << 16);
  }
  return r;
}

// The 16 codes of one half (0, 1) of a record of 32: 2 * W bytes.
template <int W, int half>
KV_INLINE Codes codes(const uint8_t* record) {
  Codes r;
  const uint8_t* p = record + half * 2 * W;
  for (int eight = 0; eight < 2; ++eight) {
    uint64_t word = 0;
    for (int i = 0; i < W; ++i) word |= static_cast<uint64_t>(p[eight * W + i]) << (8 * i);
    for (int i = 0; i < 8; ++i) r.x[8 * eight + i] = (word >> (W * i)) & ((1 << W) - 1);
  }
  return r;
}
KV_INLINE Codes no_codes() { return Codes{}; }

// The same with the H bits of the stream before each code below it; before the first code there are zeros.
template <int W, int H, int half>
KV_INLINE Codes windows(const uint8_t* record) {
  Codes r = codes<W, half>(record);
  if (H == 0) return r;
  for (int i = 0, before = 0; i < kLanes; before = r.x[i++]) r.x[i] = r.x[i] << H | before >> W;
  return r;
}
// Codes with the H bits of each lane's own stream below them: `before` are the windows of the token before.
template <int W, int H, int half>
KV_INLINE Codes next_windows(const uint8_t* record, const Codes& before) {
  Codes r = codes<W, half>(record);
  for (int i = 0; H && i < kLanes; ++i) r.x[i] = r.x[i] << H | before.x[i] >> W;
  return r;
}

// table: 16 entries for W <= 4, else 2**W
template <int W>
KV_INLINE Vec look_up(const Codes& c, const float* table) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i / 4][i % 4] = table[c.x[i]];
  return r;
}
// A table of 2**W entries, 16 in each vector; W <= 6.
template <int W>
KV_INLINE Vec pick_from(const Codes& c, const Vec (&table)[4]) {
  float entries[64];
  for (int i = 0; 16 * i < 1 << W; ++i) store(entries + 16 * i, table[i]);
  return look_up<W>(c, entries);
}
// A table of 32 or 64 levels that all channels share.
struct Wide {
  const float* table;
};
template <int bits>
KV_INLINE Wide wide_at(const float* table) { return {table}; }
template <int bits>
KV_INLINE void pick_two(const Codes& a, const Codes& b, const Wide& wide, Vec& x, Vec& y) {
  x = look_up<bits>(a, wide.table), y = look_up<bits>(b, wide.table);
}
// Transposes the four 4 x 4 blocks that four rows of 16 are made of; its own inverse.
KV_INLINE void transpose4(Vec (&r)[4]) {
  for (int block = 0; block < 4; ++block)
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < i; ++j) {
        const float x = r[i].x[block][j];
        r[i].x[block][j] = r[j].x[block][i];
        r[j].x[block][i] = x;
      }
}
// Its four quarters, `step` floats apart.
KV_INLINE void store_quarters(float* p, int step, const Vec& a) {
  for (int i = 0; i < 4; ++i) __builtin_memcpy(p + i * step, &a.x[i], sizeof a.x[i]);
}
// Each of the four floats at p four times.
KV_INLINE Vec spread4(const float* p) { KV_EACH(splat4(p[i])); }

// Lane i looks into the table that begins at table[i * entries].
template <int W>
KV_INLINE Vec look_up_own(const Codes& c, const float* table, int entries) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i / 4][i % 4] = table[i * entries + c.x[i]];
  return r;
}

#undef KV_EACH

}  // namespace

#include "sparse.h"
