// The C interface: which instruction sets there are, and one attention call over all rows, heads and chunks.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "layer.h"
#include "pack.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define KV_X86 1
#endif

#define KV_DECLARE(isa)                                                                              \
  void run_item_##isa(const Layer&, const Call&, const Split&, const Item&, float* scratch, float*,  \
                      int64_t);                                                                      \
  int64_t scratch_size_##isa(const Layer&, int64_t queries, int64_t heads);                          \
  void pack_page_##isa(const Layer&, const Pack&, const PackCall&, int64_t, uint8_t*);               \
  int64_t pack_bytes_##isa(const Layer&);
KV_DECLARE(portable)
#ifdef KV_X86
KV_DECLARE(avx2)
KV_DECLARE(avx512)
#endif

namespace {

enum Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

struct Functions {
  RunItem run;
  int64_t (*scratch)(const Layer&, int64_t, int64_t);
  void (*pack)(const Layer&, const Pack&, const PackCall&, int64_t, uint8_t*);
  int64_t (*pack_bytes)(const Layer&);
};

Functions functions_of(int isa) {
#ifdef KV_X86
  if (isa == kAvx512) return {run_item_avx512, scratch_size_avx512, pack_page_avx512, pack_bytes_avx512};
  if (isa == kAvx2) return {run_item_avx2, scratch_size_avx2, pack_page_avx2, pack_bytes_avx2};
#endif
  (void)isa;
  return {run_item_portable, scratch_size_portable, pack_page_portable, pack_bytes_portable};
}

struct Floats {
  float* p;
  explicit Floats(int64_t n) : p(static_cast<float*>(std::aligned_alloc(64, (n * 4 + 63) / 64 * 64))) {}
  ~Floats() { std::free(p); }
  Floats(const Floats&) = delete;
};

Item item_of(int64_t index, const Layer& layer, const Call& call, const Split& s) {
  Item item;
  item.slot = index % s.slots, index /= s.slots;
  const int64_t block = index % s.query_blocks;
  index /= s.query_blocks;
  const int64_t head_blocks = layer.heads / s.head_block;
  item.head = index % head_blocks * s.head_block, item.row = index / head_blocks, item.heads = s.head_block;
  item.first_query = block * s.query_block;
  const int64_t left = call.queries - item.first_query;
  item.queries = left < s.query_block ? left : s.query_block;
  return item;
}

// Adds up the partial results of all slots of some queries.
void merge(const Layer& layer, const Call& call, const Split& s, const Item& item, const float* partials,
           int64_t partial_floats) {
  const int64_t group = call.query_heads / layer.heads, most = s.query_block * group, dim = layer.value.dim;
  for (int64_t n = 0; n < item.queries * group; ++n) {
    const int64_t token = item.first_query + n / group, head = item.head * group + n % group;
    float* out = call.output + ((item.row * call.queries + token) * call.query_heads + head) * dim;
    float maximum = -INFINITY, total = 0;
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      const float found = partials[slot * partial_floats + n];
      if (found > maximum || found != found) maximum = found;
    }
    std::memset(out, 0, dim * sizeof(float));
    if (std::isinf(maximum)) continue;  // this query sees nothing
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      const float* p = partials + slot * partial_floats;
      if (std::isinf(p[n])) continue;
      const float weight = std::exp2(p[n] - maximum), *from = p + 2 * most + n * layer.value.padded;
      total += weight * p[most + n];
      for (int64_t c = 0; c < dim; ++c) out[c] += weight * from[c];
    }
    for (int64_t c = 0; c < dim; ++c) out[c] /= total;
  }
}

}  // namespace

// Runs `work` on every thread of the team that torch has set for the calling thread (0: another number would make libgomp
// rebuild it). By the interface of libgomp itself, so that any compiler will do.
#ifdef KV_GOMP
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);
extern "C" void GOMP_barrier();
#endif
template <class Work>
static void team(bool many, Work& work) {
#ifdef KV_GOMP
  if (many) return GOMP_parallel([](void* p) { (*static_cast<Work*>(p))(); }, &work, 0, 0);
#endif
  work();
}
static void wait_for_team(bool many) {
#ifdef KV_GOMP
  if (many) GOMP_barrier();
#endif
}

#ifdef KV_X86
// Older compilers do not know "f16c" as a name for __builtin_cpu_supports.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#define KV_EXPORT __attribute__((visibility("default")))

extern "C" {

// 1 where this processor can run the instruction set.
KV_EXPORT int kv_supports(int isa) {
#ifdef KV_X86
  __builtin_cpu_init();
  if (isa == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi");
#endif
  return isa == kPortable;
}

// Sizes of the structs, for a check that ctypes sees the same ones.
KV_EXPORT int64_t kv_sizes(int which) { return which == 0 ? sizeof(Layer) : which == 1 ? sizeof(Call) : which == 2 ? sizeof(Side) : which == 3 ? sizeof(Pack) : sizeof(PackCall); }

// 0, or 1 where memory ran out.
KV_EXPORT int kv_attend(const Layer* layer, const Call* call, int isa) {
  const Functions f = functions_of(isa);
  const Split s = split(*layer, *call);
  const int64_t groups = call->rows * layer->heads * s.query_blocks, items = groups * s.slots;
  const int64_t most = s.query_block * (call->query_heads / layer->heads);
  const int64_t partial_floats = (most * (2 + layer->value.padded) + 15) / 16 * 16;
  Floats partials(items * partial_floats);
  if (!partials.p && items) return 1;
  const int64_t head_step = s.query_blocks * s.slots * partial_floats;
  const auto partial_of = [&](const Item& item, int64_t slot) {
    const int64_t group = (item.row * layer->heads + item.head) * s.query_blocks + item.first_query / s.query_block;
    return partials.p + (group * s.slots + slot) * partial_floats;
  };
  std::atomic<int64_t> next{0}, next_group{0};
  std::atomic<int> failed{0};
  const bool many = call->threads > 1 && items > 1;
  auto work = [&] {
    Floats scratch(f.scratch(*layer, most, s.head_block));
    if (!scratch.p) failed = 1;
    for (int64_t i; !failed && (i = next++) < items / s.head_block;) {
      const Item item = item_of(i, *layer, *call, s);
      f.run(*layer, *call, s, item, scratch.p, partial_of(item, item.slot), head_step);
    }
    wait_for_team(many);
    Split by_head = s;
    by_head.head_block = 1;
    for (int64_t g; !failed && (g = next_group++) < groups;) {
      const Item item = item_of(g * s.slots, *layer, *call, by_head);
      merge(*layer, *call, s, item, partial_of(item, 0), partial_floats);
    }
  };
  team(many, work);
  return failed;
}

// 0, or 1 where memory ran out.
KV_EXPORT int kv_pack(const Layer* layer, const Pack* pack, const PackCall* call, int isa) {
  const Functions f = functions_of(isa);
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  auto work = [&] {
    Floats memory(f.pack_bytes(*layer) / 4 + 1);
    if (!memory.p) failed = 1;
    for (int64_t i; !failed && (i = next++) < call->pages;)
      f.pack(*layer, *pack, *call, i, reinterpret_cast<uint8_t*>(memory.p));
  };
  team(call->threads > 1 && call->pages > 1, work);
  return failed;
}
}
