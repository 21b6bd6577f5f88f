"""Tables of levels for a trellis (see `quant.trellis`), by Lloyd's algorithm: the best paths through the sample, then
every level to the mean of what chose it, in turns.

Which of its many local optima it reaches is decided by the start. `_NORMAL` holds the best tables for standard
normal numbers that about a thousand random starts of every width came to. A sample starts with the same quantiles of
its own distribution.
"""

from typing import NamedTuple

import numpy as np
import torch

from kvcalib.quant import trellis

_STEPS = 4
_SPANS = 1024
"""Spans of the sample that paths are searched through."""

# fmt: off
_NORMAL = {
    1: [-0.49, 1.3, 0.4, -1.12, 0.98, -0.39, -1.22, 0.42],
    2: [-1.33, -0.2, 1.05, 0.34, -1.74, -0.39, 0.26, 0.96, 1.48, -1.09, 0.23, -0.44, 0.56, 1.79, -0.91, -2.38,
        0.47, 1.33, -0.34, -1.33, 2.31, 0.56, -0.22, -0.76, -0.28, 0.49, -0.98, 1.21, -0.48, -1.52, 1.06, 0.14],
    3: [-2.08, -0.91, -1.25, -0.43, 0.07, 0.81, 0.5, 1.36, -1.27, -0.42, 0.08, -0.92, 0.51, 1.31, 2.76, 0.81,
        -0.75, -1.56, -0.3, -2.7, 1.03, 0.39, 1.79, -0.01, -0.33, 0.01, -0.71, -1.68, 1.67, 2.18, 0.99, 0.39],
    4: [-2.55, -1.29, -1.69, -1.13, -0.86, -0.35, -0.61, -0.17, 0.04, 0.41, 0.25, 0.62, 0.91, 1.45, 1.1, 1.85,
        -1.97, -0.99, -0.82, -1.53, -0.61, -0.17, 0.05, -0.37, 0.24, 0.62, 0.87, 0.42, 1.23, 2.01, 3.15, 1.42,
        -1.43, -1.77, -1.07, -3.16, -0.36, -0.53, -0.16, -0.82, 0.45, 0.21, 0.63, 0.01, 1.72, 1.11, 1.59, 0.82,
        -1.1, -0.75, -1.35, -2.2, -0.17, 0.02, -0.39, -0.57, 0.65, 0.83, 0.43, 0.21, 2.25, 2.6, 1.33, 1.05],
    5: [-2.61, -3.86, -1.93, -2.4, -1.48, -1.79, -1.14, -1.37, -0.85, -1.02, -0.58, -0.73, -0.32, -0.45, -0.06,
        -0.19, 0.2, 0.06, 0.46, 0.32, 0.75, 0.58, 1.06, 0.85, 1.41, 1.17, 1.84, 1.53, 2.44, 1.97, 3.65, 2.64, -3.25,
        -2.89, -2.23, -2.07, -1.69, -1.57, -1.3, -1.19, -0.99, -0.88, -0.71, -0.59, -0.45, -0.32, -0.19, -0.07,
        0.07, 0.19, 0.33, 0.46, 0.6, 0.71, 0.9, 1.01, 1.23, 1.34, 1.62, 1.74, 2.1, 2.26, 2.86, 3.2],
}
# fmt: on
GAIN = (0.0, 0.4, 0.9, 0.9, 0.8, 0.5, 0.0)
"""dB of distortion that a trellis typically saves at each width, which is what the allocation of bits reckons with."""


class Sample(NamedTuple):
    """v, weight (sensitivity) and kept (1 for inliers, which alone count) fp32 [spans, span], token after token."""

    v: torch.Tensor
    weight: torch.Tensor
    kept: torch.Tensor


def fit_table(
    centres: np.ndarray, mass: np.ndarray, separate: torch.Tensor, sample: Sample, width: int
) -> torch.Tensor:
    """Levels fp32 [2**(w + h)] by window, bfloat16-exact.

    centres, mass: all points, compressed; separate: the fitted levels that stand alone, which are taken, once for every
    history, where paths do not save anything.
    """
    alone = separate.repeat_interleave(2 ** trellis.history(width))
    if trellis.history(width) == 0 or len(sample.v) == 0:
        return alone
    quantiles = torch.special.ndtr(torch.tensor(_NORMAL[width], dtype=torch.float64)).numpy()
    below = (np.cumsum(mass) - mass / 2) / mass.sum()
    order = torch.randperm(len(sample.v), generator=torch.Generator().manual_seed(0))
    fitted, judged = (Sample(*(t[part] for t in sample)) for part in (order[:_SPANS], order[-_SPANS:]))
    start = torch.from_numpy(np.interp(quantiles, below, centres)).float()
    levels = _lloyd(fitted, start, width).bfloat16().float()
    return min(levels, alone, key=lambda table: _distortion(judged, table, width))


def _lloyd(sample: Sample, levels: torch.Tensor, width: int) -> torch.Tensor:
    """The roots of the weights: with the weights themselves a few tokens would decide over so many levels."""
    weight = (sample.weight * sample.kept).flatten().sqrt()
    weight = weight / weight.mean().clamp_min(torch.finfo(torch.float32).tiny)
    moments = weight * sample.v.flatten()
    for _ in range(_STEPS):
        window = trellis.search(sample.v, sample.kept, levels, width).flatten()
        total = torch.bincount(window, weight, len(levels))
        moment = torch.bincount(window, moments, len(levels))
        levels = torch.where(total > 0, moment / total.clamp_min(torch.finfo(torch.float32).tiny), levels)
    return levels


def _distortion(sample: Sample, levels: torch.Tensor, width: int) -> float:
    error = sample.v - levels[trellis.search(sample.v, sample.kept, levels, width)]
    return float((sample.weight * sample.kept * error.square()).double().sum())
