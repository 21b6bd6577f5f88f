"""Levels that need no data: uniform, NormalFloat, fp8. All sorted, distinct, exact in bfloat16."""

from statistics import NormalDist

import numpy as np
import torch

from kvcalib.fit.levels import to_bf16_distinct


def uniform(bits: int, *, static: bool) -> np.ndarray:
    """2^bits equal steps: -1 to 1 in a static frame, the integers from 0 where a step is stored."""
    if not static:
        return np.arange(2.0**bits)
    return to_bf16_distinct(np.linspace(-1, 1, 2**bits))


def normal_float(bits: int) -> np.ndarray:
    """NormalFloat levels (QLoRA, appendix E): quantiles of a normal, with an exact 0, -1 and 1.

    The tail left out is the mean of 1/(2 * 2^bits) and 1/(2 * (2^bits - 1)); for 4 bits this is
    the published 1 - 0.9677083. One bit has no room for -1, 0 and 1 and gives the two ends.
    """
    if bits == 1:
        return np.array([-1.0, 1.0])
    count, half = 2**bits, 2 ** (bits - 1)
    offset = 1 - (1 / (2 * count) + 1 / (2 * (count - 1))) / 2
    normal = NormalDist()
    above = [normal.inv_cdf(p) for p in np.linspace(0.5, offset, half + 1)[1:]]
    below = [-normal.inv_cdf(p) for p in np.linspace(0.5, offset, half)[1:]]
    levels = np.array(sorted([*below, 0.0, *above]))
    return to_bf16_distinct(levels / levels.max())


def fp8_e4m3() -> np.ndarray:
    """The 253 distinct finite values of float8 e4m3 (no infinities, largest 448)."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return np.unique(codes[torch.isfinite(codes)].numpy() + 0.0)
