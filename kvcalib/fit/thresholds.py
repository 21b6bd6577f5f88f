"""Two-sided outlier thresholds: exact linear-interpolation percentiles of a stream, per channel.

A percentile near an end of a sample depends on the few smallest (or largest) values alone, so
`Tails` keeps the k smallest and k largest values of every channel and forgets the rest: exact,
mergeable in any order of batches, and independent of how the stream is cut. With n values, share s
and numpy's definition (virtual index q * (n - 1), linear in between) the two thresholds are the
percentiles q = s/2 and 1 - s/2, so that a share s of the values lies outside, s/2 on each side.

Legend: N values of a batch, C channels, k values kept per side.
"""

import numpy as np
import torch


def two_sided(share: float) -> tuple[float, float]:
    """Lower and upper quantile that leave `share` of the values outside, half on each side."""
    if not 0 <= share < 1:
        raise ValueError(f"share of outliers must lie in [0, 1), got {share}")
    return share / 2, 1 - share / 2


def tail_size(share: float, count: int) -> int:
    """Values to keep per side so that every quantile up to `share` from an end is exact."""
    return min(count, int(np.ceil(share * count)) + 2)


class Tails:
    """The k smallest and k largest values of each channel of a stream of [N, C] batches."""

    def __init__(self, k: int):
        self.k = k
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self._ends = None  # [C, at most 2k] ascending

    def observe(self, x: torch.Tensor) -> None:
        """Takes in x [N, C] of any float dtype. Raises ValueError for NaN or infinite values."""
        self.count += len(x)
        values = np.ascontiguousarray(x.detach().float().cpu().numpy().T)
        if self._ends is not None:
            values = np.concatenate([self._ends, values], 1)
        values.sort(1)  # vectorised in numpy and faster than any top-k of these sizes; NaN goes last
        if not np.isfinite(values[:, [0, -1]]).all():
            raise ValueError("values contain NaN or infinity")
        if values.shape[1] > 2 * self.k:
            values = np.concatenate([values[:, : self.k], values[:, -self.k :]], 1)
        self._ends = values

    def result(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(low [k, C] ascending, high [k, C] descending, number of values per channel)."""
        assert self._ends is not None, "nothing observed"
        low, high = self._ends.T[: self.k], self._ends.T[::-1][: self.k]
        return torch.from_numpy(low.copy()), torch.from_numpy(high.copy()), self.count


def tail_quantile(
    low: torch.Tensor, high: torch.Tensor, *, count: int, q_lo: float, q_hi: float
) -> tuple[np.ndarray, np.ndarray]:
    """Percentiles q_lo and q_hi per channel, float64 [C], equal to numpy's on the whole stream.

    Raises ValueError when fewer values were kept than a quantile needs.
    """
    lower = _interpolate(low.double().numpy(), q_lo * (count - 1), count)
    upper = _interpolate(high.double().numpy(), (1 - q_hi) * (count - 1), count)
    return lower, upper


def _interpolate(tail: np.ndarray, index: float, count: int) -> np.ndarray:
    """Value at a fractional index counted from the end that `tail` [k, C] starts with."""
    first = int(np.floor(index + 1e-9))
    fraction = max(index - first, 0.0)
    second = min(first + 1, count - 1) if fraction > 1e-9 else first
    if second >= len(tail):
        raise ValueError(f"index {second} of {count} values needed, {len(tail)} kept per side")
    return tail[first] + (tail[second] - tail[first]) * fraction
