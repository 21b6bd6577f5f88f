"""Levels in bfloat16: rounded, kept distinct, and fitted once more to what rounding left.

Kernels hold a table of levels in bfloat16, so the artifact stores bfloat16-exact numbers and
calibration must judge those, not the unrounded ones. bfloat16 numbers are ordered like the signed
magnitudes of their 16 bits: "the next number" is that integer plus one.
"""

import numpy as np
import torch

from kvcalib.fit.kmeans import distortion, nearest


def to_bf16_distinct(levels: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 numbers as float64, rows strictly increasing: a repeated level moves up one ulp.

    Raises ValueError for levels that are not finite or not sorted.
    """
    levels = np.asarray(levels, np.float64)
    if (np.diff(levels) < 0).any():
        raise ValueError("levels are not sorted")
    index = _ordinal(levels)
    count = np.arange(levels.shape[-1])
    rounded = _from_ordinal(np.maximum.accumulate(index - count, axis=-1) + count)
    if not np.isfinite(rounded).all():
        raise ValueError("levels do not fit bfloat16")
    return rounded


def _ordinal(levels: np.ndarray) -> np.ndarray:
    bits = torch.from_numpy(levels).to(torch.bfloat16).view(torch.int16).numpy().astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFF))


def _from_ordinal(index: np.ndarray) -> np.ndarray:
    bits = np.where(index >= 0, index, -index - 0x8000).astype(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).double().numpy() + 0.0


def reassign(points: np.ndarray, weights: np.ndarray, levels: np.ndarray, *, steps: int = 20) -> np.ndarray:
    """Moves bfloat16 levels to the rounded means of their own cells while distortion falls."""
    best = distortion(points, weights, levels)
    for _ in range(steps):
        moved = to_bf16_distinct(_cell_means(points, weights, levels))
        found = distortion(points, weights, moved)
        if found >= best:
            break
        levels, best = moved, found
    return levels


def _cell_means(points: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Weighted mean of every level's cell; an empty cell keeps its level."""
    cell = nearest(points, levels)
    total = np.bincount(cell, weights, len(levels))
    sums = np.bincount(cell, weights * points, len(levels))
    return np.where(total > 0, sums / np.where(total > 0, total, 1), levels)


def q_norm(points: np.ndarray, levels: np.ndarray) -> tuple[float, float]:
    """(factor, offset) such that level * factor + offset, of the nearest levels, has the points' mean and spread.

    KVQuant's Q-Norm (arXiv 2401.18079v3): every point counts alike, whatever it weighed in the fit. Codes are still
    chosen by the levels themselves.
    """
    points = np.asarray(points, np.float64)
    rounded = levels[nearest(points, levels)]
    spread = rounded.std()
    factor = float(points.std() / spread) if spread > 0 else 1.0
    return factor, float(points.mean() - factor * rounded.mean())


def moved_levels(points: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, float]:
    """Levels after Q-Norm, bfloat16-exact, and their weighted distortion: a point has the nearest of those before."""
    factor, offset = q_norm(points, levels)
    moved = to_bf16_distinct(levels * factor + offset)
    error = moved[nearest(points, levels)] - points
    return moved, float(np.average(error * error, weights=weights))
