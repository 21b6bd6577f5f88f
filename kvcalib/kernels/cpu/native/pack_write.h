// Codes, fp16 elements and sparse outliers to where quant/page.py wants them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pack_codes.h"

namespace {

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
      const float own = wanted[c * kPage + t], read = pack.stretch ? own * pack.stretch[c] + pack.shift[c] : own;
      put_half(page + side.corrections_at + 2 * rank, read - coded[t]);
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

}  // namespace
