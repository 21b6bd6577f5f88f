"""The static frame of a channel: u = (x - zero) / scale maps its interval [lo, hi] to [-1, 1].

zero = (hi + lo) / 2 and scale = (hi - lo) / 2. A constant channel has hi = lo and would divide by
zero, so scale never falls below

    floor = max(2^-20 * |zero|, 1e-6 * largest scale of the layer, 1e-30)

The first term keeps (x - zero) / scale out of the rounding noise of float32 x around a large
offset, the second keeps 1/scale and its square (the sensitivity) within the layer's own range, the
third is for a layer that is zero throughout. A constant channel still comes back as its zero point
up to one part in a million.
"""

import numpy as np
import torch

_OFFSET_NOISE = 2.0**-20
_LAYER_SHARE = 1e-6
_TINY = 1e-30


def frame_from_bounds(lo, hi) -> tuple[torch.Tensor, torch.Tensor]:
    """(zero, scale), float32 of the shape of lo and hi (one layer).

    Raises ValueError for bounds that are not finite, out of order, or too wide for float32.
    """
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise ValueError("bounds of a frame must be finite")
    if (lo > hi).any():
        raise ValueError("lower bound of a frame above its upper bound")
    zero, scale = (hi + lo) / 2, (hi - lo) / 2
    floor = np.maximum(_OFFSET_NOISE * np.abs(zero), max(_LAYER_SHARE * scale.max(), _TINY))
    scale = np.maximum(scale, floor)
    if scale.max() > np.finfo(np.float32).max:
        raise ValueError(f"a frame of half width {scale.max():g} does not fit float32")
    return torch.from_numpy(zero).float(), torch.from_numpy(scale).float()


def symmetric_frame(absmax) -> tuple[torch.Tensor, torch.Tensor]:
    """Frame [-absmax, absmax]: zero 0, scale absmax with the same floor."""
    absmax = np.asarray(absmax, np.float64)
    return frame_from_bounds(-absmax, absmax)
