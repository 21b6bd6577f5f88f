"""Quantise and dequantise whole pages: the one definition that calibration, simulation and run time share.

    u = (rotated x - zero) / scale        outliers by rank        step, base fp16
    c = nearest level of (u - base) / step                        correction = u - u' at the outliers, fp16

With `unbiased` the correction is made in the frame that codes come back in, so that outliers stay exact.
With rounding="feedback" or "trellis", u in the second line is what `quant.feedback` wants in its place; with
"trellis" c is a path, see `quant.trellis`.

Outliers that rank by error need the dense codes first, so their range keeps them in (static, norm); outliers that
rank by range are chosen first and left out of min and max.

Shapes: x [..., P, H, D] with P = 32 tokens of one page.
"""

from typing import NamedTuple

import torch

from kvcalib.quant import codebook, feedback, ranges, sparse, trellis
from kvcalib.quant.rotation import rotate, unrotate
from kvcalib.quant.spec import PAGE, Tables, TensorSpec

_FP16_MAX = torch.finfo(torch.float16).max


class Coded(NamedTuple):
    """One or more pages of one tensor, before packing.

    codes       uint8 [..., P, H, D]; for a tensor that is not quantised: fp16 u instead
    step, base  fp16 [..., *range_shape], None for a static range; base also None for a norm
    positions   int64 [..., n], ascending; corrections fp16 [..., n]; None without outliers
    """

    codes: torch.Tensor
    step: torch.Tensor | None = None
    base: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    corrections: torch.Tensor | None = None


def normalise(x: torch.Tensor, spec: TensorSpec, tables: Tables) -> tuple[torch.Tensor, torch.Tensor | None, Coded]:
    """x -> (v = what is compared with the levels, inlier mask or None, Coded with u in place of codes).

    Calibration fits levels to v of the inliers; `quantise` encodes it. The factor from v back to x is
    step * scale (step = 1 for a static range).
    """
    heads, dim = x.shape[-2:]
    u = (rotate(x.float(), spec.rotation) - tables.zero) / tables.scale
    count = spec.outliers_per_page(heads, dim)
    positions = sparse.select_by_range(u, spec, count) if count and not spec.ranks_by_error else None
    inlier = None if positions is None else sparse.inlier_mask(positions, heads, dim)
    if spec.rank == "threshold" and inlier is not None:
        inlier = inlier | (u.abs() <= 1)
    coded = Coded(u, *ranges.measure(u, inlier, spec, tables.levels.shape[-1]), positions)
    v = to_range(u, coded, spec)
    if spec.ranks_by_error and count:
        error = (codebook.decode(codebook.encode(v, tables), tables) - v) * ranges.factor(coded.step, spec, dim)
        positions = sparse.select_by_error(error, tables.weight, count)
        inlier, coded = sparse.inlier_mask(positions, heads, dim), coded._replace(positions=positions)
    return v, inlier, coded


def quantise(x: torch.Tensor, spec: TensorSpec, tables: Tables) -> Coded:
    """x [..., P, H, D], any float dtype."""
    if not spec.quantised:
        return Coded(((x.float() - tables.zero) / tables.scale).clamp(-_FP16_MAX, _FP16_MAX).half())
    v, _, coded = normalise(x, spec, tables)
    codes, u = _encode(v, coded, spec, tables)
    dense = coded._replace(codes=codes)
    if coded.positions is None:
        return dense
    error = _as_read(u, tables) - _dequantise_dense(dense, spec, tables)
    if spec.rank == "threshold":
        error = torch.where(u.abs() > 1, error, 0.0)
    return dense._replace(corrections=sparse.corrections(error, coded.positions))


def _encode(v: torch.Tensor, coded: Coded, spec: TensorSpec, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the u that they and the corrections should come back as."""
    if spec.rounding == "nearest":
        return codebook.encode(v, tables), coded.codes
    return wanted(coded, spec, tables)


def wanted(coded: Coded, spec: TensorSpec, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of `normalise` -> codes and wanted u of rounding with error feedback."""
    u = coded.codes
    inlier = None if coded.positions is None else sparse.inlier_mask(coded.positions, *u.shape[-2:])
    base = 0.0 if coded.base is None else ranges.expand(coded.base, spec, u.shape[-1])
    return feedback.encode(u, ranges.factor(coded.step, spec, u.shape[-1]), base, inlier, tables, spec.span)


def round_trip(
    x: torch.Tensor, spec: TensorSpec, tables: Tables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x -> (v, v as its codes mean it, inlier mask or None)."""
    v, inlier, coded = normalise(x, spec, tables)
    codes, _ = _encode(v, coded, spec, tables)
    return v, to_range(_dequantise_dense(coded._replace(codes=codes), spec, tables), coded, spec), inlier


def dequantise(coded: Coded, spec: TensorSpec, tables: Tables) -> torch.Tensor:
    """Inverse of `quantise` up to the quantisation error: fp32 [..., P, H, D]."""
    if not spec.quantised:
        return coded.codes.float() * tables.scale + tables.zero
    u = _dequantise_dense(coded, spec, tables)
    if coded.positions is not None:
        u = sparse.merge(u, coded.positions, coded.corrections)
    zero, scale = tables.read_frame
    return unrotate(u * scale + zero, spec.rotation)


def simulate(x: torch.Tensor, spec: TensorSpec, tables: Tables) -> torch.Tensor:
    """Quantise and dequantise [..., T, H, D] in pages from the first token on, as the cache would.

    A last incomplete page is completed with copies of the last token, which leaves ranges as they are. A tensor that
    is not quantised goes through fp16: that is what a page keeps of it.
    """
    if x.shape[-3] == 0:
        return x.float()
    tokens = x.shape[-3]
    index = torch.arange(-(-tokens // PAGE) * PAGE, device=x.device).clamp_max(tokens - 1)
    pages = x.index_select(-3, index).unflatten(-3, (-1, PAGE))
    return dequantise(quantise(pages, spec, tables), spec, tables).flatten(-4, -3)[..., :tokens, :, :]


def _as_read(u: torch.Tensor, tables: Tables) -> torch.Tensor:
    """u in the frame that codes come back in."""
    if tables.read_scale is None:
        return u
    return u * (tables.scale / tables.read_scale) + (tables.zero - tables.read_zero) / tables.read_scale


def to_range(u: torch.Tensor, coded: Coded, spec: TensorSpec) -> torch.Tensor:
    """u -> v = (u - base) / step, what is compared with the levels."""
    if coded.step is None:
        return u
    dim = u.shape[-1]
    step = ranges.expand(coded.step, spec, dim)
    centred = u if coded.base is None else u - ranges.expand(coded.base, spec, dim)
    return centred / torch.where(step == 0, 1.0, step)


def _dequantise_dense(coded: Coded, spec: TensorSpec, tables: Tables) -> torch.Tensor:
    dim = coded.codes.shape[-1]
    if spec.span is None:
        levels = codebook.decode(coded.codes, tables)
    else:
        levels = trellis.decode(coded.codes, tables, spec.span)
    u = levels * ranges.factor(coded.step, spec, dim)
    return u if coded.base is None else u + ranges.expand(coded.base, spec, dim)
