// The item loop, compiled once per instruction set: build.py passes KV_ISA and the flags that go with it.
#include "half.h"
#include "layer.h"
#if KV_ISA == 512
#include "vec_avx512.h"
#define KV_NAME(prefix) prefix##_avx512
#elif KV_ISA == 2
#include "vec_avx2.h"
#define KV_NAME(prefix) prefix##_avx2
#else
#include "vec_portable.h"
#define KV_NAME(prefix) prefix##_portable
#endif
#include "exact.h"
#include "tiles.h"
#include "scores.h"
#include "decode.h"
#include "queries.h"
#include "tokens.h"
#include "items.h"

void KV_NAME(run_item)(const Layer& layer, const Call& call, const Split& split, const Item& item, float* scratch,
                       float* partial, int64_t partial_step) {
  attend_item(layer, call, split, item, scratch, partial, partial_step);
}

int64_t KV_NAME(scratch_size)(const Layer& layer, int64_t queries, int64_t heads) {
  Scratch unused;
  return scratch_floats(layer, queries, heads, &unused, nullptr);
}
