// The search of quant/trellis.py for the best path of one channel through the tokens of a page.
//
// window = to << W | j, and its low H bits are the state `from`: every state is entered by 2**W windows. They fall into
// groups that come from the same state, of which the nearest one wins whatever the path was so far; the groups of all
// pairs of states stand side by side, at (nth way into the state) * kStates + state, so that vectors run over pairs. Of
// paths that are equally good it may find another one than torch where two windows of a table have the same level.
#pragma once
#include <cmath>
#include <cstdint>

#include "history.h"
#include "layer.h"

namespace {

template <int W>
struct Trellis {
  static constexpr int kHistory = history_of(W), kStates = 1 << kHistory, kWindows = 1 << (W + kHistory);
  static constexpr int kWays = W < kHistory ? 1 << W : kStates;      // states that lead into a state
  static constexpr int kPairs = kWays * kStates, kEach = kWindows / kPairs;  // windows from one state to another
  static constexpr int from(int way, int to) { return (to << W | way) & (kStates - 1); }
  static constexpr int window(int nth, int pair) {
    return (pair % kStates) << W | nth * kStates | pair / kStates;
  }
};

// The table of one width in that order.
template <int W>
void order_levels(const float* levels, float* out) {
  using T = Trellis<W>;
  for (int nth = 0; nth < T::kEach; ++nth)
    for (int p = 0; p < T::kPairs; ++p) out[nth * T::kPairs + p] = levels[T::window(nth, p)];
}

#if defined(__AVX512F__)
constexpr int kNative = 16;  // floats in a register
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif

template <int N>
struct Lanes {
  typedef float Float __attribute__((vector_size(4 * N)));
  typedef int32_t Int __attribute__((vector_size(4 * N)));
};

// Least error of every pair of states at every token [32, pairs], and which window has it, the first of equals.
template <int W>
void pair_errors(const float* levels, const float* v, const float* weight, float* error, uint32_t* nearest) {
  using T = Trellis<W>;
  constexpr int P = T::kPairs, N = P < kNative ? P : kNative;
  if constexpr (P < 8) {  // vectors run over tokens: the compiler sees to that
    for (int t = 0; t < kPage; ++t, error += T::kPairs, nearest += T::kPairs) {
      const float x = v[t], w = weight[t];
      float least[T::kPairs];
      int32_t index[T::kPairs];
      for (int p = 0; p < T::kPairs; ++p) {
        const float d = x - levels[p];
        least[p] = d * d * w, index[p] = 0;
      }
      for (int nth = 1; nth < T::kEach; ++nth)
        for (int p = 0; p < T::kPairs; ++p) {
          const float d = x - levels[nth * T::kPairs + p], e = d * d * w;
          index[p] = e < least[p] ? nth : index[p], least[p] = e < least[p] ? e : least[p];
        }
      for (int p = 0; p < T::kPairs; ++p) error[p] = least[p], nearest[p] = index[p];
    }
    return;
  }
  using L = Lanes<N>;
  for (int p = 0; p < P; p += N)
    for (int t = 0; t < kPage; ++t) {
      typename L::Float least;
      typename L::Int index = {};
      for (int nth = 0; nth < T::kEach; ++nth) {
        typename L::Float level;
        __builtin_memcpy(&level, levels + nth * P + p, sizeof level);
        const typename L::Float d = v[t] - level, e = d * d * weight[t];
        if (nth == 0) {
          least = e;
          continue;
        }
        const typename L::Int less = e < least;
        least = less ? e : least, index = less ? typename L::Int{} + nth : index;
      }
      __builtin_memcpy(error + t * P + p, &least, sizeof least);
      __builtin_memcpy(nearest + t * P + p, &index, sizeof index);
    }
}

// Least cost of every state, and the way that has it: of ways first .. first + n - 1; the first of equals.
template <int W, int first, int n>
inline void enter(const typename Lanes<Trellis<W>::kStates>::Float& cost, const float* error,
                  typename Lanes<Trellis<W>::kStates>::Float& best, typename Lanes<Trellis<W>::kStates>::Int& way) {
  constexpr int S = Trellis<W>::kStates;
  using L = Lanes<S>;
  if constexpr (n == 1) {
    typename L::Float errors;
    __builtin_memcpy(&errors, error + first * S, sizeof errors);
    for (int s = 0; s < S; ++s) best[s] = cost[Trellis<W>::from(first, s)];
    best += errors, way = typename L::Int{} + first;
  } else {
    typename L::Float other;
    typename L::Int other_way;
    enter<W, first, n / 2>(cost, error, best, way);
    enter<W, first + n / 2, n / 2>(cost, error, other, other_way);
    const typename L::Int less = other < best;
    best = less ? other : best, way = less ? other_way : way;
  }
}

// One far token must not drown the others in float32: what every path has to bear comes off.
template <int P>
void lower(float* error) {
  for (int t = 0; t < kPage; ++t, error += P) {
    float least = error[0];
    for (int p = 1; p < P; ++p) least = error[p] < least ? error[p] : least;
    for (int p = 0; p < P; ++p) error[p] -= least;
  }
}

// v, weight [32] of one channel, which begins anew every `span` tokens -> windows [32]. levels: as `order_levels` left
// them.
template <int W>
void best_path(const float* levels, const float* v, const float* weight, int span, uint8_t* windows) {
  using T = Trellis<W>;
  constexpr int S = T::kStates;
  using L = Lanes<S>;
  float errors[kPage * T::kPairs];
  uint32_t nearest[kPage * T::kPairs], back[kPage * S];
  pair_errors<W>(levels, v, weight, errors, nearest);
  lower<T::kPairs>(errors);
  for (int first = 0; first < kPage; first += span) {
    typename L::Float cost = typename L::Float{} + INFINITY;
    cost[0] = 0;
    for (int t = first; t < first + span; ++t) {
      typename L::Int way;
      typename L::Float entered;
      enter<W, 0, T::kWays>(cost, errors + t * T::kPairs, entered, way);
      __builtin_memcpy(back + t * S, &way, sizeof way);
      cost = entered;
    }
    unsigned state = 0;
    for (unsigned s = 1; s < S; ++s) state = cost[s] < cost[state] ? s : state;
    for (int t = first + span - 1; t >= first; --t) {
      const unsigned way = back[t * S + state], nth = T::kEach > 1 ? nearest[t * T::kPairs + way * S + state] : 0;
      windows[t] = static_cast<uint8_t>(state << W | nth * S | way);
      state = (state << W | way) & (S - 1);
    }
  }
}

}  // namespace
