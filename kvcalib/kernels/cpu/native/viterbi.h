// The search of quant/trellis.py for the best path of one channel through the tokens of a page.
//
// window = to << W | j, and its low H bits are the state `from`: every state is entered by 2**W windows. They fall into
// groups that come from the same state, of which the nearest one wins whatever the path was so far; the groups of all
// pairs of states stand side by side, index = nth way into the state * kStates + state, so that vectors run over pairs.
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

// Least error of every pair of states at every token [32, pairs], and which window has it.
template <int W>
void pair_errors(const float* levels, const float* v, const float* weight, float* error, int32_t* nearest) {
  using T = Trellis<W>;
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
}

// v, weight [32] of one channel, which begins anew every `span` tokens -> windows [32]. levels: as `order_levels` left
// them.
template <int W>
void best_path(const float* levels, const float* v, const float* weight, int span, uint8_t* windows) {
  using T = Trellis<W>;
  constexpr int S = T::kStates;
  float errors[kPage * T::kPairs];
  int32_t nearest[kPage * T::kPairs], back[kPage][S];
  pair_errors<W>(levels, v, weight, errors, nearest);
  for (int first = 0; first < kPage; first += span) {
    float cost[S];
    for (int s = 0; s < S; ++s) cost[s] = s ? INFINITY : 0.0f;
    for (int t = first; t < first + span; ++t) {
      const float* error = errors + t * T::kPairs;
      float best[S];
      int32_t way[S];
      for (int s = 0; s < S; ++s) best[s] = cost[T::from(0, s)] + error[s], way[s] = 0;
      for (int k = 1; k < T::kWays; ++k)
        for (int s = 0; s < S; ++s) {
          const float c = cost[T::from(k, s)] + error[k * S + s];
          way[s] = c < best[s] ? k : way[s], best[s] = c < best[s] ? c : best[s];
        }
      float lowest = best[0];
      for (int s = 1; s < S; ++s) lowest = best[s] < lowest ? best[s] : lowest;
      for (int s = 0; s < S; ++s) cost[s] = best[s] - lowest, back[t][s] = way[s];
    }
    int state = 0;
    for (int s = 1; s < S; ++s) state = cost[s] < cost[state] ? s : state;
    for (int t = first + span - 1; t >= first; --t) {
      const int pair = back[t][state] * S + state, window = T::window(nearest[t * T::kPairs + pair], pair);
      windows[t] = static_cast<uint8_t>(window), state = window & (S - 1);
    }
  }
}

}  // namespace
