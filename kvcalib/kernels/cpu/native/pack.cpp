// Quantises and packs whole pages, the same bytes as quant/codec.py and quant/page.py: compiled without contraction of
// multiplications and additions, element by element in the order of the torch code. Where torch sums (mean, spread,
// norm, Hadamard transform, feedback) the order differs, so codes may differ where a value lies on a rounding tie.
//
// All arrays of a page are [H, D, 32]: vectors run over tokens, and an index is the position that page.py stores.
#include "pack.h"

#include <cstdint>
#include <cstring>

#include "pack_codes.h"
#include "pack_frame.h"
#include "pack_ranges.h"
#include "pack_write.h"
#if KV_ISA == 512
#define KV_NAME(prefix) prefix##_avx512
#elif KV_ISA == 2
#define KV_NAME(prefix) prefix##_avx2
#else
#define KV_NAME(prefix) prefix##_portable
#endif

namespace {

void pack_side(const Layer& layer, const Side& side, const PackSide& pack, const PackCall& call, int64_t index,
               bool is_key, const Arena& a, uint8_t* page) {
  const int64_t channels = static_cast<int64_t>(layer.heads) * side.dim, elements = channels * kPage;
  frame_page(layer, side, pack, call, index, is_key, a.u);
  if (!side.coded) return write_fp16(layer, side, is_key, a, page);
  const bool by_error = pack.outliers && pack.by_error, by_range = pack.outliers && !pack.by_error;
  if (by_range) {
    score_by_range(layer, side.dim, pack, a);
    select_largest(a, elements, pack.outliers);
  }
  if (pack.range != kPackStatic) measure(layer, side, pack, a, by_range, page);
  if (!pack.feedback || by_error) encode_nearest(pack, channels, a);
  if (by_error) select_largest(a, elements, pack.outliers);
  if (pack.feedback) encode_feedback(pack, layer.heads, side.dim, a);
  if (pack.outliers) write_outliers(layer, side, pack, a, pack.feedback ? a.wanted : a.u, page);
  if (is_key) write_key_codes(layer, a, page);
  else write_value_codes(layer, a, page);
}

}  // namespace

int64_t KV_NAME(pack_bytes)(const Layer& layer) {
  const int dim = layer.key.dim > layer.value.dim ? layer.key.dim : layer.value.dim;
  return arena_bytes(static_cast<int64_t>(layer.heads) * dim * kPage);
}

void KV_NAME(pack_page)(const Layer& layer, const Pack& pack, const PackCall& call, int64_t index, uint8_t* memory) {
  uint8_t* page = call.out + index * layer.page_bytes;
  std::memset(page, 0, layer.page_bytes);
  std::memcpy(page, call.first + index, 4);
  std::memcpy(page + 4, call.tokens + index, 4);
  pack_side(layer, layer.key, pack.key, call, index, true,
            cut(memory, static_cast<int64_t>(layer.heads) * layer.key.dim * kPage), page);
  pack_side(layer, layer.value, pack.value, call, index, false,
            cut(memory, static_cast<int64_t>(layer.heads) * layer.value.dim * kPage), page);
}
