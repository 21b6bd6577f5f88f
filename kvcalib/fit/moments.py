"""What levels cost every channel of a sample, out of one pass over it.

A weighted histogram per channel: each bin keeps the sums of w, w v and w v^2, so that the distortion of a table

    sum w (v - l)^2 = sum w v^2 - 2 l sum w v + l^2 sum w

is exact up to bins that an edge between two levels cuts (they go to the level nearest to their mean), for any number
of tables and any choice of channels, without the points. Points beyond -1 and 1 fall into the end bins with their
true value.
"""

from typing import NamedTuple

import numpy as np

from kvcalib.fit.kmeans import nearest


class Moments(NamedTuple):
    """Sums of w, w v, w v^2, float64 [channels, bins]."""

    mass: np.ndarray
    first: np.ndarray
    second: np.ndarray


def measure(v: np.ndarray, weight: np.ndarray, bins: int) -> Moments:
    """v, weight [n, channels]. Raises ValueError for NaN or infinity."""
    v, weight = np.asarray(v, np.float64), np.asarray(weight, np.float64)
    if not (np.isfinite(v).all() and np.isfinite(weight).all()):
        raise ValueError("points or weights contain NaN or infinity")
    channels = v.shape[1]
    place = np.clip((v + 1) * (bins / 2), 0, bins - 1).astype(np.int64)
    index = (place + np.arange(channels) * bins).ravel()
    first = weight * v
    sums = (np.bincount(index, part.ravel(), channels * bins) for part in (weight, first, first * v))
    return Moments(*(total.reshape(channels, bins) for total in sums))


def pooled(moments: Moments, channels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(centres, weights) of all points of some channels (bool [channels]), ascending, weights of mean 1.

    Without any weight every bin counts alike, at its middle.
    """
    mass, first = moments.mass[channels].sum(0), moments.first[channels].sum(0)
    full = mass > 0
    if not full.any():
        bins = len(mass)
        return (np.arange(bins) + 0.5) * (2 / bins) - 1, np.ones(bins)
    return first[full] / mass[full], mass[full] / mass[full].mean()


def distortion(moments: Moments, levels: np.ndarray) -> np.ndarray:
    """Sorted levels [L] -> sum over the points of w (v - nearest level)^2, float64 [channels]."""
    mass, first, second = moments
    mean = np.divide(first, mass, out=np.zeros_like(mass), where=mass > 0)
    level = levels[nearest(mean, levels)]
    return np.maximum(second - 2 * level * first + level**2 * mass, 0).sum(1)
