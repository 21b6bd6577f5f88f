"""Ranges measured at run time: (step, base) in fp16 such that v = (u - base) / step spans the levels.

    uniform levels 0 .. L-1     step = (max - min) / (L - 1)    base = min
    levels in [-1, 1]           step = (max - min) / 2          base = (max + min) / 2
    range="norm"                step = 4 * root mean square     no base: half the bytes, no dependence on two extremes

Min and max leave the outliers out. All are taken over

    group     `group` consecutive tokens of a page, per channel    -> [..., P/group, H, D]
    token     one token over "layer" / "head" / "channels"         -> [..., P, 1, 1] / [P, H, 1] / [P, H, D/group]

Codes are chosen against the fp16 numbers that are stored, so their rounding costs nothing. A constant group has
step 0 and comes back as its base.
"""

import torch

from kvcalib.quant.spec import PAGE, TensorSpec

_FP16_MAX = torch.finfo(torch.float16).max


def range_shape(spec: TensorSpec, heads: int, dim: int) -> tuple[int, ...]:
    """Shape of step and base for one page; () for a static range."""
    if not spec.quantised or spec.range == "static":
        return ()
    if spec.range == "group":
        return (PAGE // spec.group, heads, dim)
    return {"layer": (PAGE, 1, 1), "head": (PAGE, heads, 1), "channels": (PAGE, heads, dim // spec.group)}[spec.scope]


_NORM_SPAN = 4.0
"""Root mean squares from the centre to the edge of [-1, 1]; a normal token reaches beyond once in 16,000 elements."""


def measure(
    u: torch.Tensor, inlier: torch.Tensor | None, spec: TensorSpec, levels: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """u fp32 [..., P, H, D], inlier bool alike or None -> step, base fp16 of `range_shape`; None if there is none."""
    if spec.range == "static":
        return None, None
    cells = _cells(u, spec)
    if spec.range == "norm":
        return _to_fp16(_NORM_SPAN * cells.square().mean(-1).sqrt()), None
    low, high = cells.amin(-1), cells.amax(-1)
    if inlier is not None:
        kept = _cells(inlier, spec)
        any_kept = kept.any(-1)
        low = torch.where(any_kept, cells.masked_fill(~kept, torch.inf).amin(-1), low)
        high = torch.where(any_kept, cells.masked_fill(~kept, -torch.inf).amax(-1), high)
    if spec.levels == "uniform":
        step, base = (high - low) / (levels - 1), low
    else:
        step, base = (high - low) / 2, (high + low) / 2
    return _to_fp16(step), _to_fp16(base)


def expand(step_or_base: torch.Tensor, spec: TensorSpec, dim: int) -> torch.Tensor:
    """fp16 of `range_shape` -> fp32 broadcastable to [..., P, H, D]."""
    wide = step_or_base.float()
    if spec.range == "group":
        return wide.repeat_interleave(spec.group, dim=-3)
    if spec.scope == "channels":
        return wide.repeat_interleave(spec.group, dim=-1)
    return wide


def factor(step: torch.Tensor | None, spec: TensorSpec, dim: int) -> torch.Tensor | float:
    """What a level is multiplied with to become u: the expanded step, or 1 for a static range."""
    return 1.0 if step is None else expand(step, spec, dim)


def _cells(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """[..., P, H, D] -> [*range_shape, elements of one cell]."""
    if spec.range == "group":
        return x.unflatten(-3, (-1, spec.group)).movedim(-3, -1)
    if spec.scope == "layer":
        return x.flatten(-2)[..., None, None, :]
    if spec.scope == "head":
        return x.unsqueeze(-2)
    return x.unflatten(-1, (-1, spec.group))


def _to_fp16(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP16_MAX, _FP16_MAX).half()
