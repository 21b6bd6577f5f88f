"""Outliers of a page: which elements, and their fp16 corrections.

A page always has the same number of outliers, chosen by rank, so that a page has a fixed size, ties never
over-select, and a burst beyond the budget costs the least important elements first. The rank of an element is

    rank="error"   weight * (u - u')^2, its share of the damage: squared error of its dense code times the calibrated
                   sensitivity of its channel. For static ranges and norms, where the dense code does not depend on the
                   choice.
    rank="range"   static, group: |u|, the distance from the calibrated centre in units of the calibrated range;
                   token, norm: the deviation from the mean of the token in units of its standard deviation
    rank="threshold"  |u| as well, but what lies inside the frame stays dense: its slot stores a correction of 0
    rank="tails"   the same number of largest and of smallest elements of every token

Equals go by position, lowest first: a token that repeats within a page has equal values, and pages must not depend on
who sorted them.

An outlier stays in the dense codes (clamped to an end level) and stores correction = u - u', so the dense path of a
kernel is untouched and a correction only ever adds.

Positions number the elements of a page head by head, channel by channel, token by token:
position = (head * D + channel) * 32 + token. They are sorted, so the outliers of a head (and of each half of
its channels) are one run.
"""

import torch

from kvcalib.quant.spec import PAGE, TensorSpec

_FP16_MAX = torch.finfo(torch.float16).max


def select_by_error(error: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """error = u - u' of the dense codes [..., P, H, D], weight [H, D] -> positions int64 [..., count], ascending."""
    return _largest(error.square() * weight, count)


def select_by_range(u: torch.Tensor, spec: TensorSpec, count: int) -> torch.Tensor:
    """u fp32 [..., P, H, D] -> positions int64 [..., count], ascending."""
    if spec.rank == "tails":
        return _tails(u, count)
    if spec.range not in ("token", "norm"):
        return _largest(u.abs(), count)
    span = (-2, -1) if spec.scope == "layer" else -1
    centred = u - u.mean(span, keepdim=True)
    spread = centred.square().mean(span, keepdim=True).sqrt()
    return _largest(centred.abs() / spread.clamp_min(torch.finfo(torch.float32).tiny), count)


def _tails(u: torch.Tensor, count: int) -> torch.Tensor:
    by_token, each = u.flatten(-2), count // (2 * PAGE)
    ends = [by_token.topk(each, dim=-1, largest=largest).indices for largest in (True, False)]
    chosen = torch.zeros_like(by_token).scatter_(-1, torch.cat(ends, -1), 1.0)
    return _largest(chosen.unflatten(-1, u.shape[-2:]), count)


def _largest(score: torch.Tensor, count: int) -> torch.Tensor:
    by_position = _by_position(score)
    top = by_position.topk(count, dim=-1, sorted=False)
    last = top.values.amin(-1, keepdim=True)
    if torch.equal((by_position == last).sum(-1), (top.values == last).sum(-1)):
        return top.indices.sort(dim=-1).values
    return _first_of_equals(by_position, last, count)


def _first_of_equals(by_position: torch.Tensor, last: torch.Tensor, count: int) -> torch.Tensor:
    """Everything above `last` and as many of its equals as there is room for."""
    above, equal = by_position > last, by_position == last
    room = count - above.sum(-1, keepdim=True)
    taken = above | equal & (equal.cumsum(-1) <= room)
    return taken.nonzero()[:, -1].view(*by_position.shape[:-1], count)


def inlier_mask(positions: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """positions int64 [..., n] -> bool [..., P, H, D], False at the outliers."""
    flat = torch.ones(*positions.shape[:-1], heads * dim * PAGE, dtype=torch.bool, device=positions.device)
    return _from_position(flat.scatter_(-1, positions, False), heads, dim)


def corrections(error: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """error = u - u' fp32 [..., P, H, D] -> fp16 [..., n]."""
    return _by_position(error).gather(-1, positions).clamp(-_FP16_MAX, _FP16_MAX).half()


def merge(dense: torch.Tensor, positions: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """Adds the corrections to dense u' fp32 [..., P, H, D]."""
    flat = _by_position(dense).scatter_add(-1, positions, correction.float())
    return _from_position(flat, dense.shape[-2], dense.shape[-1])


def row_pointers(positions: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """positions [..., n] -> int64 [..., 2H + 1]: where each half head (channels below and from D/2) begins."""
    half = torch.arange(2 * heads + 1, device=positions.device)
    edges = (half // 2 * dim + half % 2 * (dim // 2)) * PAGE
    return torch.searchsorted(positions.contiguous(), edges.expand(*positions.shape[:-1], -1).contiguous())


def _by_position(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-3, -1).flatten(-3)


def _from_position(flat: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    return flat.unflatten(-1, (heads, dim, PAGE)).movedim(-1, -3)
