"""Weighted 1-D histogram: the sufficient statistics of k-means, bounded whatever the sample.

Every bin keeps its total weight and its weighted sum, both float64. A bin becomes one point at its weighted mean: the
only thing lost is the spread inside a bin, at most (width / 2)^2, 6e-8 for 4096 bins over [-1, 1] against cell
variances of 1e-3 to 1e-2. Points beyond [lo, hi] fall into the end bins with their true value.
"""

import numpy as np


def compress(
    points: np.ndarray, weights: np.ndarray, *, bins: int = 4096, lo: float = -1.0, hi: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(centres, weights) of the bins that hold weight, ascending, float64.

    points, weights: of one shape. Raises ValueError for NaN or negative weights.
    """
    points = np.asarray(points, np.float64).ravel()
    weights = np.asarray(weights, np.float64).ravel()
    assert points.shape == weights.shape, (points.shape, weights.shape)
    if not (np.isfinite(points).all() and np.isfinite(weights).all()):
        raise ValueError("points or weights contain NaN or infinity")
    if weights.size and weights.min() < 0:
        raise ValueError("weights must not be negative")
    index = np.clip((points - lo) * (bins / (hi - lo)), 0, bins - 1).astype(np.int64)
    weight, total = np.bincount(index, weights, bins), np.bincount(index, weights * points, bins)
    full = weight > 0
    return total[full] / weight[full], weight[full]
