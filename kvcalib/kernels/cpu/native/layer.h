// What the kernel is told, as plain structs on raw pointers. plan.py mirrors them with ctypes, field by field.
//
// A page is one run of bytes, see kvcalib/quant/page.py; offsets are bytes from its start, -1 where a page has no such
// section. H kv heads, D channels of a head, 32 tokens. Channels are in canonical order: pair i is (i, i + D/2).
#pragma once
#include <cstdint>

#include "history.h"

enum : int { kPage = 32, kLanes = 16 };

enum Range : int32_t { kStatic = 0, kGroup = 1, kToken = 2 };

// Consecutive stored units of one head that share a width: rotary pairs of a key, tiles of 16 channels of a value.
// Pairs of one run are either all rotated on read or none.
struct Run {
  int32_t width;
  int32_t units;
  int64_t table;         // index into tables; two of every pair, or 16 of every tile, or one for all
  int32_t table_step;    // floats from one table to the next, 0 for one that is shared
  int32_t rotates;
};

// The keys, or the values, of a layer.
struct Side {
  int32_t dim;           // D
  int32_t padded;        // D rounded up to 16
  int32_t coded;         // 0: not quantised, fp16 token by token
  int32_t range;         // Range
  int32_t group;         // kGroup: tokens of a cell; kToken: channels of a cell, 0 for the whole head
  int32_t cells;         // kToken: cells of one token, all heads: 1, H or H * D / group
  int32_t folded;        // tables hold level * scale + zero of their channel; but see is_wide
  int32_t channel_books; // values: one table per channel, 16 of a tile side by side
  int32_t narrow;        // no width above 6
  int32_t trellis;       // tables are looked up by window: a code and the bits of the stream before it
  float center;          // values: tables hold level - center, so that large levels and bases do not cancel
  int64_t step_at, base_at, corrections_at, positions_at, rows_at, codes_at;
  const float* zero;     // [H, padded]
  const float* scale;    // [H, padded]
  const float* tables;   // entries of one table: 2**bits that choose a level, repeated to fill 16; after the 64 of a
                         // trellis stand their bf16 once more, the low bytes of all and then the high ones
  const Run* runs;           // runs of head h: run_at[h] .. run_at[h + 1]
  const int32_t* run_at;     // [H + 1]
  const int32_t* units;      // [H, units]: the pair or tile that is stored there
  const int64_t* head_at;    // [H + 1]: bytes of the codes section before head h
};

struct Layer {
  int32_t heads;
  int32_t rotating;          // leading pairs that are rotated on read; 0 for keys that are stored after RoPE
  int64_t page_bytes;
  Side key, value;
  const int64_t* order;      // [D]: model channel of a canonical channel
  const float* relative;     // [D / 2, 2, 32]: gain * cos, gain * sin of t * frequency, t < 32; identity after RoPE
  const double* turns;       // [4, 64, 2, rotating]: cos, sin of digit * 64**k * frequency
  int32_t hadamard;          // size of the blocks that rotate values, 0 for none
  int32_t unused;
};

enum Float : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Exact tokens: [B, H, n, D], strides in elements, the last dimension dense.
struct Exact {
  const void *key, *value;
  int64_t key_row, key_head, key_token, value_row, value_head, value_token;
};

// One attention call: T queries of each of B rows.
struct Call {
  int64_t rows, query_heads, queries;          // B, Hq, T
  const float* query;                          // [B, Hq, T, D], the last dimension dense
  int64_t query_row, query_head, query_token;
  float* output;                               // [B, T, Hq, Dv], dense
  const uint8_t* pages;
  int64_t pages_row;                           // bytes from row to row
  const int64_t *page_counts, *sink_counts;    // [B]
  Exact sink, recent;
  int64_t sink_slots, recent_count;            // S, R
  int32_t exact_type, threads;
  const uint8_t* recent_visible;               // [B, T, R]
  int64_t recent_visible_row, recent_visible_token;
  const uint8_t* moved_visible;                // [B, T, S + 32 * pages], or null
  int64_t moved_visible_row, moved_visible_token;
  float scale, softcap;                        // softcap 0: none
};

// Splits the work. Chunks depend on the shapes alone, so that results do not depend on the number of threads.
struct Split {
  int64_t query_block;       // queries of an item
  int64_t query_blocks;
  int64_t chunk;             // pages, or blocks of 32 exact tokens, of an item
  int64_t exact_slots, slots;
  int64_t head_block;        // kv heads of an item: one, or all
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Split split(const Layer& layer, const Call& call) {
  Split s;
  s.query_block = call.queries < 32 ? call.queries : 32;
  s.query_blocks = ceil_div(call.queries, s.query_block);
  s.chunk = call.queries <= 8 ? 16 : call.queries <= 32 ? 64 : 512;
  int64_t most = 0, sinks = 0;
  for (int64_t r = 0; r < call.rows; ++r) {
    most = call.page_counts[r] > most ? call.page_counts[r] : most;
    sinks = call.sink_counts[r] > sinks ? call.sink_counts[r] : sinks;
  }
  s.exact_slots = ceil_div(ceil_div(sinks, kPage) + ceil_div(call.recent_count, kPage), s.chunk);
  s.slots = s.exact_slots + ceil_div(most, s.chunk);
  // This alone may depend on the threads: results are the same however heads are shared out.
  const bool few = s.query_block * (call.query_heads / layer.heads) <= 4;
  const bool enough = call.rows * s.query_blocks * s.slots >= 4 * call.threads;
  s.head_block = few && (enough || call.threads == 1) ? layer.heads : 1;
  return s;
}

// One unit of work; its result is m, l and o of `query_block * G` queries: [n] , [n], [n, value.padded].
struct Item {
  int64_t row, head, heads, first_query, queries, slot;
};

using RunItem = void (*)(const Layer&, const Call&, const Split&, const Item&, float* scratch, float* partial,
                         int64_t partial_step);
