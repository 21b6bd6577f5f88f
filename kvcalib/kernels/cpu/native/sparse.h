// Sparse corrections one by one, for processors without scatter.
#pragma once
#include "batch.h"
#include "half.h"
#include "layer.h"

namespace {

// out[token * token_step + channel * channel_step] += correction * factor[channel] for n distinct
// positions = channel * 32 + token.
inline void add_sparse(float* out, const uint8_t* positions, const uint8_t* corrections, int n, const float* factor,
                       int token_step, int channel_step) {
  for (int i = 0; i < n; ++i) {
    const int position = uint16_at(positions + 2 * i), token = position % kPage, channel = position / kPage;
    out[token * token_step + channel * channel_step] += half_at(corrections + 2 * i) * factor[channel];
  }
}

// Corrections of keys: delta = correction * scale, turned with its token. Quads of channels are in channel order.
inline void key_batch(const uint8_t* positions, const uint8_t* corrections, int n, const float* scale,
                      const float* relative, int pairs, Batch& b) {
  for (int i = 0; i < n; ++i) {
    const int position = uint16_at(positions + 2 * i), t = position % kPage, c = position / kPage;
    const int upper = c >= pairs, pair = upper ? c - pairs : c;
    const float x = half_at(corrections + 2 * i) * scale[c], *angle = relative + pair * 2 * kPage + t;
    b.along[i] = x * angle[0], b.across[i] = (upper ? -x : x) * angle[kPage];
    b.token[i] = quad_at(t), b.same[i] = 4 * c, b.other[i] = 4 * (upper ? pair : c + pairs);
  }
}

// Corrections of values; quads of channels are where quad_at says.
inline void value_batch(const uint8_t* positions, const uint8_t* corrections, int n, Batch& b) {
  for (int i = 0; i < n; ++i) {
    const int position = uint16_at(positions + 2 * i);
    b.along[i] = half_at(corrections + 2 * i);
    b.token[i] = quad_at(position % kPage), b.same[i] = quad_at(position / kPage);
  }
}

}  // namespace
