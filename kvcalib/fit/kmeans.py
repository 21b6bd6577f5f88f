"""Weighted one-dimensional k-means: scikit-learn's, and the exact optimum beside it.

Both minimise sum_i w_i (x_i - nearest level)^2 over k levels and return them sorted, float64.
In one dimension an optimal cell is an interval of the sorted points, so with prefix sums of w, wx
and wx^2 the cost of any interval is O(1) and

    best(m, j) = min over i < j of best(m - 1, i) + cost(i, j)

is a dynamic program. The minimising i grows with j (the cost satisfies the quadrangle inequality),
so each row is solved by divide and conquer, all nodes of one depth at once in numpy:
O(k n log n), tens of milliseconds for n = 4096 and k = 16.
"""

import logging
import warnings

import numpy as np

log = logging.getLogger(__name__)


def weighted_kmeans(points: np.ndarray, weights: np.ndarray, k: int, *, seed: int) -> np.ndarray:
    """k levels by scikit-learn's KMeans (k-means++, best of 8 starts, `sample_weight`).

    Weights are scaled to mean 1 first: scikit-learn turns weights of 1e-40 into infinite centres.
    """
    from sklearn.cluster import KMeans  # offline only: the runtime never needs scikit-learn
    from threadpoolctl import threadpool_limits

    points, weights = _distinct(points, weights)
    if len(points) <= k:
        return pad_levels(points, k)
    solver = KMeans(k, init="k-means++", n_init=8, max_iter=1000, tol=0.0, random_state=seed)
    with threadpool_limits(1):  # a few thousand points: threads would only wait for each other
        solver.fit(points[:, None], sample_weight=weights)
    return pad_levels(np.unique(solver.cluster_centers_[:, 0]), k)


def exact_kmeans(points: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """The k levels of least distortion."""
    points, weights = _distinct(points, weights)
    if len(points) <= k:
        return pad_levels(points, k)
    cost = _IntervalCost(points, weights)
    best, splits = cost(np.zeros(len(points), np.int64), np.arange(1, len(points) + 1)), []
    for m in range(2, k + 1):
        best, split = _next_row(best, cost, m)
        splits.append(split)
    return cost.means(_cells(splits, len(points)))


def pad_levels(levels: np.ndarray, k: int) -> np.ndarray:
    """Adds -1 and 1 where they lie outside, then middles of the widest gaps, until there are k."""
    levels = np.asarray(levels, np.float64)
    while len(levels) < k:
        if levels[0] > -1:
            levels = np.insert(levels, 0, -1.0)
        elif levels[-1] < 1:
            levels = np.append(levels, 1.0)
        else:
            widest = int(np.argmax(np.diff(levels)))
            levels = np.insert(levels, widest + 1, levels[widest : widest + 2].mean())
    return levels


def distortion(points: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> float:
    """Weighted mean squared distance to the nearest level."""
    points, weights = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    levels = np.asarray(levels, np.float64)
    error = points - levels[nearest(points, levels)]
    return float(np.average(error * error, weights=weights))


def nearest(points: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Index of the nearest of the sorted levels; a tie goes to the lower level."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, points, side="left")


def _distinct(points, weights) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct points that carry weight, weights of mean 1; all-zero weights count as 1."""
    points, weights = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    if not points.size:
        raise ValueError("k-means of no points")
    if not (np.isfinite(points).all() and np.isfinite(weights).all()):
        raise ValueError("points or weights contain NaN or infinity")
    if not weights.max() > 0:
        warnings.warn("all weights are zero: fitting without weights", stacklevel=3)
        weights = np.ones_like(weights)
    weights = weights / weights.max()
    points, inverse = np.unique(points, return_inverse=True)
    total = np.bincount(inverse.ravel(), weights.ravel())
    held = total > 0
    return points[held], total[held] / total[held].mean()


class _IntervalCost:
    """Weighted sum of squares about the mean of points[i:j], from prefix sums (i < j)."""

    def __init__(self, points: np.ndarray, weights: np.ndarray):
        self._shift = np.average(points, weights=weights)
        x = points - self._shift  # centred: less cancellation in the difference of squares
        terms = np.stack([weights, weights * x, weights * x * x])
        self._w, self._wx, self._wxx = np.pad(np.cumsum(terms, 1), ((0, 0), (1, 0)))

    def __call__(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        w, wx = self._w[j] - self._w[i], self._wx[j] - self._wx[i]
        return np.maximum(self._wxx[j] - self._wxx[i] - wx * wx / w, 0.0)

    def means(self, edges: np.ndarray) -> np.ndarray:
        """Means of the cells between consecutive edges."""
        return np.diff(self._wx[edges]) / np.diff(self._w[edges]) + self._shift


def _next_row(best: np.ndarray, cost: _IntervalCost, m: int) -> tuple[np.ndarray, np.ndarray]:
    """(best cost, position of the last split) of points[:j] in m cells for j = 1..n.

    best[j - 1] is the cost of points[:j] in m - 1 cells. Entries with j < m are infinite.
    """
    n = len(best)
    row, split = np.full(n, np.inf), np.zeros(n, np.int64)
    lo, hi = np.array([m]), np.array([n])  # the range of j of every open node
    first, last = np.array([m - 1]), np.array([n - 1])  # where its split may lie
    while len(lo):
        mid = (lo + hi) // 2
        top = np.minimum(last, mid - 1)
        value, where = _best_split(best, cost, mid, first, top)
        row[mid - 1], split[mid - 1] = value, where
        lo, hi = np.concatenate([lo, mid + 1]), np.concatenate([mid - 1, hi])
        first, last = np.concatenate([first, where]), np.concatenate([where, last])
        open_ = lo <= hi
        lo, hi, first, last = lo[open_], hi[open_], first[open_], last[open_]
    return row, split


def _best_split(best, cost, j, first, last) -> tuple[np.ndarray, np.ndarray]:
    """For every node: the least best[i - 1] + cost(i, j) over first <= i <= last, and its i."""
    sizes = last - first + 1
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    node = np.repeat(np.arange(len(j)), sizes)
    i = np.arange(sizes.sum()) - starts[node] + first[node]
    total = best[i - 1] + cost(i, j[node])
    least = np.minimum.reduceat(total, starts)
    hit = np.flatnonzero(total == least[node])
    where = i[hit[np.unique(node[hit], return_index=True)[1]]]
    return least, where


def _cells(splits: list[np.ndarray], n: int) -> np.ndarray:
    """Edges 0 < ... < n of the optimal cells, walked back from the last row."""
    edges = [n]
    for split in reversed(splits):
        edges.append(int(split[edges[-1] - 1]))
    return np.array([*edges, 0][::-1])
