// Sparse corrections one by one, for processors without scatter.
#pragma once
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

}  // namespace
