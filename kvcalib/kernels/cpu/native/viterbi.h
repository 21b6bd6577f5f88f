// The search of quant/trellis.py for the best path of one channel through the tokens of a page.
//
// window = to << W | j, and its low H bits are the state `from`: every state is entered by 2**W windows. They fall into
// groups that come from the same state, of which the nearest one wins whatever the path was so far; the groups of all
// pairs of states stand side by side, at (nth way into the state) * kStates + state, so that vectors run over pairs. Of
// paths that are equally good it may find another one than torch where two windows of a table have the same level.
#pragma once
#include <cmath>
#include <cstdint>
#include <utility>

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
  typedef float AnyFloat __attribute__((vector_size(4 * N), aligned(4), may_alias));   // in memory
  typedef int32_t AnyInt __attribute__((vector_size(4 * N), aligned(4), may_alias));
  static Float all(float x) { return Float{} + x; }
  static Float get(const float* p) { return *reinterpret_cast<const AnyFloat*>(p); }
  static void put(float* p, const Float& x) { *reinterpret_cast<AnyFloat*>(p) = x; }
  static void put(uint32_t* p, const Int& x) { *reinterpret_cast<AnyInt*>(p) = x; }
};

// Lane s of the result is lane lane[s] of x.
template <int... lane, class V>
inline V lanes_of(const V& x, std::integer_sequence<int, lane...>) {
#ifdef __clang__
  return __builtin_shufflevector(x, x, lane...);
#else
  return __builtin_shuffle(x, typename Lanes<sizeof...(lane)>::Int{lane...});
#endif
}
template <class V, int... lane>
inline V of_lanes(std::integer_sequence<int, lane...>) {
  return V{lane...};
}
template <int N, int k, int... s>
constexpr auto turned(std::integer_sequence<int, s...>) {
  return std::integer_sequence<int, (s + k) % N...>{};
}
template <int W, int way, int... s>
constexpr auto entries(std::integer_sequence<int, s...>) {
  return std::integer_sequence<int, Trellis<W>::from(way, s)...>{};
}

// Of what has the distance d and counts w: the nth of them, if it is nearer than those before.
template <int N>
inline void keep_nearest(const typename Lanes<N>::Float& d, const typename Lanes<N>::Float& w, int nth,
                         typename Lanes<N>::Float& least, typename Lanes<N>::Int& index) {
  using L = Lanes<N>;
  const typename L::Float e = d * d * w;
  const typename L::Int less = e < least;
  index = nth == 0 ? typename L::Int{} : less ? typename L::Int{} + nth : index;
  least = nth == 0 ? e : less ? e : least;
}

template <class V>
inline V least_of(const V& a, const V& b) {
  return b < a ? b : a;
}
// The least of all N lanes, in all of them.
template <int N, int k = N / 2, class V>
inline V least_lane(const V& x) {
  if constexpr (k == 0) return x;
  else return least_lane<N, k / 2>(least_of(x, lanes_of(x, turned<N, k>(std::make_integer_sequence<int, N>{}))));
}
// The first lane that has it; 0 where none has, for NaN.
template <int N>
inline unsigned first_least(const typename Lanes<N>::Float& x) {
  using Int = typename Lanes<N>::Int;
  const Int none = Int{} + N, own = of_lanes<Int>(std::make_integer_sequence<int, N>{});
  return least_lane<N>(x == least_lane<N>(x) ? own : none)[0] % N;
}

// Least error of every pair of states at every token [32, pairs], and which window has it, the first of equals. One far
// token must not drown the others in float32: what every path has to bear comes off.
template <int W>
void pair_errors(const float* levels, const float* v, const float* weight, float* error, uint32_t* nearest) {
  using T = Trellis<W>;
  constexpr int P = T::kPairs, N = P < kNative ? P : kNative, R = P / N;
  using L = Lanes<N>;
  for (int t = 0; t < kPage; ++t, error += P, nearest += P) {
    typename L::Float least[R];
    typename L::Int index[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int nth = 0; nth < T::kEach; ++nth)
        keep_nearest<N>(v[t] - L::get(levels + nth * P + r * N), L::all(weight[t]), nth, least[r], index[r]);
    }
    typename L::Float bear = least[0];
#pragma GCC unroll 8
    for (int r = 1; r < R; ++r) bear = least_of(bear, least[r]);
    bear = least_lane<N>(bear);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      L::put(error + r * N, least[r] - bear);
      if (T::kEach > 1) L::put(nearest + r * N, index[r]);
    }
  }
}

// The same where there are few pairs: vectors run over tokens.
template <int W>
void few_pair_errors(const float* levels, const float* v, const float* weight, float* error, uint32_t* nearest) {
  using T = Trellis<W>;
  constexpr int P = T::kPairs, N = kNative;
  using L = Lanes<N>;
  for (int first = 0; first < kPage; first += N, error += N * P, nearest += N * P) {
    const typename L::Float x = L::get(v + first), w = L::get(weight + first);
    typename L::Float least[P], bear;
    typename L::Int index[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      for (int nth = 0; nth < T::kEach; ++nth) keep_nearest<N>(x - levels[nth * P + p], w, nth, least[p], index[p]);
      bear = p ? least_of(bear, least[p]) : least[p];
    }
    for (int p = 0; p < P; ++p) {
      const typename L::Float error_of = least[p] - bear;
      for (int t = 0; t < N; ++t) error[t * P + p] = error_of[t], nearest[t * P + p] = index[p][t];
    }
  }
}

// Least cost of every state, and the state before that has it: of ways first .. first + n - 1; the first of equals.
template <int W, int first, int n>
inline void enter(const typename Lanes<Trellis<W>::kStates>::Float& cost, const float* error,
                  typename Lanes<Trellis<W>::kStates>::Float& best, typename Lanes<Trellis<W>::kStates>::Int& from) {
  constexpr int S = Trellis<W>::kStates;
  using L = Lanes<S>;
  if constexpr (n == 1) {
    constexpr auto states = entries<W, first>(std::make_integer_sequence<int, S>{});
    best = lanes_of(cost, states) + L::get(error + first * S);
    from = of_lanes<typename L::Int>(states);
  } else {
    typename L::Float other;
    typename L::Int other_from;
    enter<W, first, n / 2>(cost, error, best, from);
    enter<W, first + n / 2, n / 2>(cost, error, other, other_from);
    const typename L::Int less = other < best;
    best = less ? other : best, from = less ? other_from : from;
  }
}

// Spans of a page side by side, so that one need not wait for the other.
template <int W, int spans>
void walk(const float* errors, const uint32_t* nearest, uint8_t* windows) {
  using T = Trellis<W>;
  constexpr int S = T::kStates, span = kPage / spans;
  using L = Lanes<S>;
  uint32_t back[kPage * S];
  typename L::Float cost[spans];
  for (auto& c : cost) c = typename L::Float{} + INFINITY, c[0] = 0;
  for (int t = 0; t < span; ++t)
#pragma GCC unroll 2
    for (int i = 0; i < spans; ++i) {
      typename L::Int from;
      typename L::Float entered;
      enter<W, 0, T::kWays>(cost[i], errors + (i * span + t) * T::kPairs, entered, from);
      L::put(back + (i * span + t) * S, from);
      cost[i] = entered;
    }
  unsigned state[spans] = {};
#pragma GCC unroll 2
  for (int i = 0; i < spans; ++i) state[i] = first_least<S>(cost[i]);
  for (int left = span - 1; left >= 0; --left)
#pragma GCC unroll 2
    for (int i = 0; i < spans; ++i) {
      const int t = i * span + left;
      const unsigned from = back[t * S + state[i]], way = from & (T::kWays - 1);
      const unsigned nth = T::kEach > 1 ? nearest[t * T::kPairs + way * S + state[i]] : 0;
      windows[t] = static_cast<uint8_t>(state[i] << W | nth * S | way);
      state[i] = from;
    }
}

// v, weight [32] of one channel, which begins anew every `span` tokens (16 or 32) -> windows and codes [32]. levels: as
// `order_levels` left them.
template <int W>
void best_path(const float* levels, const float* v, const float* weight, int span, uint8_t* windows, uint8_t* codes) {
  using T = Trellis<W>;
  float errors[kPage * T::kPairs];
  uint32_t nearest[kPage * T::kPairs];
  if constexpr (T::kPairs < 8) few_pair_errors<W>(levels, v, weight, errors, nearest);
  else pair_errors<W>(levels, v, weight, errors, nearest);
  if (span == kPage) walk<W, 1>(errors, nearest, windows);
  else walk<W, 2>(errors, nearest, windows);
  for (int t = 0; t < kPage; ++t) codes[t] = windows[t] >> T::kHistory;
}

}  // namespace
