// rounding="trellis" (kvcalib/quant/trellis.py): how many bits of a code stream, before a code, take part in its level.
#pragma once
#include <cstdint>

constexpr int history_of(int width) {
  constexpr int bits[] = {0, 2, 3, 2, 2, 1, 0};
  return width <= 6 ? bits[width] : 0;  // wider codes have no trellis
}

// Bits that choose a level of a channel of this width.
template <int W, bool trellis>
constexpr int window_bits = W + (trellis ? history_of(W) : 0);

// Whether there are so many levels that keys share one table, `Wide`, too: a table per channel with its frame folded in
// is more to read than the frame.
template <int W, bool trellis>
constexpr bool is_wide = trellis && window_bits<W, trellis> >= 5;

// Where the table of one width begins among those of width 1, 2, ... end to end.
constexpr int trellis_table_at(int width) {
  int at = 0;
  for (int w = 1; w < width; ++w) at += 1 << (w + history_of(w));
  return at;
}
