// What the packing kernel is told; see kvcalib/quant/codec.py for the meaning of every step. pack.py mirrors the structs.
#pragma once
#include <cstdint>

enum PackRange : int32_t { kPackStatic = 0, kPackGroup = 1, kPackToken = 2, kPackNorm = 3 };
enum PackScope : int32_t { kScopeLayer = 0, kScopeHead = 1, kScopeChannels = 2 };

// How the keys, or the values, of a layer are quantised. Arrays [H, D] have no padding.
struct PackSide {
  int32_t range, scope, group;
  int32_t outliers;            // per page
  int32_t by_error;            // outliers rank by error
  int32_t steps;               // uniform levels: their number - 1; else 0
  int32_t hadamard;            // size of the blocks that rotate, 0 for none
  int32_t span;                // tokens that a trellis connects
  int32_t bits, unused;        // bits: the widest width of a trellis
  const float *zero, *scale;
  const float *stretch, *shift;   // [H, D]: u * stretch + shift is u in the frame it comes back in; null: the same
  const float* weight;
  const float* levels;         // tables end to end
  const float* edges;          // halfway between a level and the next, at the index of the lower one
  const int32_t* table;        // [H, D]: where the channel's table begins
  const int32_t* entries;      // [H, D]: its levels
  const uint16_t* feedback;    // bfloat16 [H, D, D], or null
  const int16_t* order;        // [H, D]
  const float* trellis;        // tables of width 1, 2, ... end to end, or null: levels stand alone
  const uint8_t* widths;       // [H, D], with trellis
};

struct Pack {
  PackSide key, value;
};

struct PackCall {
  int64_t pages;
  const void *key, *value;     // [H, n, D], the last dimension dense
  int64_t key_head, key_token, value_head, value_token;
  const int64_t* columns;      // [pages, 32] into n
  const int32_t *first, *tokens;   // [pages]
  const float *cosine, *sine;  // [pages, 32, D / 2] to turn keys back by, or null
  uint8_t* out;                // [pages, page_bytes]
  int32_t type, threads;
};
