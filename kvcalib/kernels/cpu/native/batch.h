// Sparse corrections of a head, some at a time.
#pragma once
#include <cstdint>

namespace {

enum : int { kBatch = 64 };

// Places are those of quads: four floats, one per query.
struct Batch {
  alignas(64) float along[kBatch], across[kBatch];  // keys: factors of the query at the same and at the other channel
  alignas(64) int32_t token[kBatch], same[kBatch], other[kBatch];
};

// Where the quad of row i is among the quads of 16 rows and more: as transpose4 leaves them.
inline int quad_at(int i) { return 4 * ((i & ~15) | (i & 3) << 2 | (i >> 2 & 3)); }

}  // namespace
