// Runs recorded calls of the kernels under sanitizers. Every buffer of a call has an allocation of its own, of exactly
// its size, so that reading or writing one byte beyond it is caught.
//
// Input: cases until the end of the file; a case is four structs (Layer, Call, Pack, PackCall), each as
//     int64 bytes, data, int64 pointers, pointers times {int64 place in the struct, int64 bytes, data}
// with the expected output and pages in the buffers that receive them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "layer.h"
#include "pack.h"

extern "C" {
int kv_supports(int isa);
int kv_attend(const Layer*, const Call*, int isa);
int kv_pack(const Layer*, const Pack*, const PackCall*, int isa);
}

static std::FILE* input;

static bool read_bytes(void* to, size_t n) { return std::fread(to, 1, n, input) == n; }

static int64_t read_int() {
  int64_t x = 0;
  if (!read_bytes(&x, 8)) std::exit(3);
  return x;
}

template <typename T>
static bool read_struct(T& to, std::vector<void*>& owned, int64_t& output_bytes) {
  int64_t size;
  if (!read_bytes(&size, 8)) return false;
  if (size != sizeof(T) || !read_bytes(&to, sizeof(T))) std::exit(4);
  for (int64_t n = read_int(); n > 0; --n) {
    const int64_t place = read_int(), bytes = read_int();
    void* data = std::malloc(bytes ? bytes : 1);
    if (!read_bytes(data, bytes)) std::exit(5);
    std::memcpy(reinterpret_cast<char*>(&to) + place, &data, sizeof data);
    owned.push_back(data);
    output_bytes = bytes;  // outputs come last
  }
  return true;
}

int main(int, char** argv) {
  input = std::fopen(argv[1], "rb");
  if (!input) return 2;
  int cases = 0, wrong = 0;
  Layer layer;
  Call call;
  Pack pack;
  PackCall pack_call;
  for (std::vector<void*> owned;; ++cases) {
    int64_t output_bytes = 0, pages_bytes = 0, unused = 0;
    if (!read_struct(layer, owned, unused)) break;
    read_struct(call, owned, output_bytes), read_struct(pack, owned, unused);
    read_struct(pack_call, owned, pages_bytes);
    const std::vector<float> expected(call.output, call.output + output_bytes / 4);
    const std::vector<uint8_t> pages(pack_call.out, pack_call.out + pages_bytes);
    for (int isa = 0; isa < 3; ++isa) {
      if (!kv_supports(isa)) continue;
      std::memset(call.output, 0xFF, output_bytes), std::memset(pack_call.out, 0xFF, pages_bytes);
      if (kv_attend(&layer, &call, isa) || kv_pack(&layer, &pack, &pack_call, isa)) return 6;
      for (size_t i = 0; i < expected.size(); ++i) wrong += !(std::fabs(call.output[i] - expected[i]) < 1e-4f);
      wrong += std::memcmp(pages.data(), pack_call.out, pages_bytes) != 0;
    }
    for (void* p : owned) std::free(p);
    owned.clear();
  }
  std::printf("%d cases, %d wrong\n", cases, wrong);
  return wrong ? 1 : 0;
}
