"""Whether a format can be read at all, and whether the tables of a layer are those of its format."""

import torch

from kvcalib.quant import trellis
from kvcalib.quant.codebook import table_of, table_offset
from kvcalib.quant.page import TILE
from kvcalib.quant.spec import LARGEST, PAGE, CacheSpec, Tables, TensorSpec

TENSORS = ("key", "value")
CHOICES = {
    "levels": ("uniform", "nuq", "nf", "fp8", "mixed", "none"),
    "range": ("static", "group", "token", "norm"),
    "scope": ("layer", "head", "channels"),
    "rank": ("error", "range", "threshold", "tails"),
    "rotation": ("none", "hadamard"),
    "rounding": ("nearest", "feedback", "trellis"),
    "books": ("layer", "head", "channel"),
}
ROPE = {"key": ("pre", "post", "none"), "value": ("none",)}
MAX_OUTLIERS = 0.5
MOST = 2**16 - 1
"""Outliers of a page: rows point to them in uint16."""


def spec_problems(spec: CacheSpec) -> list[str]:
    """Every field of the format that has a value, or a combination of values, that nothing can read."""
    found = [
        f"spec.{name}={getattr(spec, name)!r} must be a count of tokens"
        for name in ("window", "sink")
        if not _is_int(getattr(spec, name)) or getattr(spec, name) < 0
    ]
    for name in TENSORS:
        tensor = getattr(spec, name)
        problems = _field_problems(tensor, ROPE[name]) or _combination_problems(name, tensor)
        found += [f"spec.{name}.{text}" for text in problems]
    return found


def _field_problems(spec: TensorSpec, rope: tuple[str, ...]) -> list[str]:
    found = []
    if not _is_int(spec.bits) or spec.bits not in (*range(1, 9), 16):
        found.append(f"bits={spec.bits!r} must be 1 to 8, or 16")
    for name, allowed in {**CHOICES, "rope": rope}.items():
        if getattr(spec, name) not in allowed:
            found.append(f"{name}={getattr(spec, name)!r} must be {' or '.join(allowed)}")
    if not _is_int(spec.group) or spec.group < 1 or PAGE % spec.group:
        found.append(f"group={spec.group!r} must divide {PAGE}")
    is_number = _is_int(spec.outliers) or isinstance(spec.outliers, float)
    if not is_number or not 0 <= spec.outliers <= MAX_OUTLIERS:
        found.append(f"outliers={spec.outliers!r} must be 0 to {MAX_OUTLIERS}")
    for name in ("q_norm", "unbiased"):
        if not isinstance(getattr(spec, name), bool):
            found.append(f"{name}={getattr(spec, name)!r} must be true or false")
    return found


def _combination_problems(name: str, spec: TensorSpec) -> list[str]:
    found = []
    if (spec.levels == "none") != (spec.bits == 16):
        found.append(f"bits={spec.bits} does not go with levels={spec.levels} (16 bits are levels=none)")
    if spec.levels == "fp8" and (spec.bits, spec.range) != (8, "static"):
        found.append(f"levels=fp8 needs bits=8 and range=static, not bits={spec.bits} and range={spec.range}")
    if spec.range == "norm" and spec.levels not in ("nuq", "nf", "mixed"):
        found.append(f"range=norm needs levels nuq, nf or mixed, not {spec.levels}")
    if spec.rounding == "feedback" and not spec.quantised:
        found.append("rounding=feedback needs quantised levels, not levels=none")
    if spec.rounding == "trellis" and (spec.levels != "mixed" or spec.books != "layer" or spec.bits > trellis.WIDEST):
        found.append(f"rounding=trellis needs levels=mixed, books=layer and at most {trellis.WIDEST} bits")
    if name == "key" and spec.rounding == "trellis" and spec.rope == "none":
        found.append("rounding=trellis of keys needs rope=pre or post")
    if spec.q_norm and (spec.levels != "nuq" or spec.rounding != "nearest" or spec.books == "channel"):
        found.append("q_norm=true needs levels=nuq, rounding=nearest and books=layer or head")
    if spec.unbiased and (
        spec.levels not in ("nuq", "mixed")
        or spec.range not in ("static", "norm")
        or spec.rank not in ("error", "range")
        or spec.q_norm
    ):
        found.append(
            "unbiased=true needs levels nuq or mixed, range static or norm, rank error or range, and no q_norm"
        )
    if name == "key" and spec.rotation != "none":
        found.append(f"rotation={spec.rotation} must be none (rotary embedding does not commute with it)")
    if spec.rotation != "none" and (not spec.quantised or spec.range == "static"):
        found.append(f"rotation={spec.rotation} needs quantised values with range=token or norm")
    if spec.rank == "threshold" and (spec.range != "static" or spec.rounding != "nearest" or spec.levels == "fp8"):
        found.append("rank=threshold needs range=static, rounding=nearest and other levels than fp8")
    if spec.rank == "tails" and (spec.range != "token" or spec.scope != "layer"):
        found.append("rank=tails needs range=token and scope=layer")
    return found


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def table_problems(name: str, spec: TensorSpec, tables: Tables) -> list[str]:
    """What is wrong with the tables of the keys, or of the values, of a layer."""
    found = []
    if tables.zero.dim() != 2 or tables.zero.shape != tables.scale.shape:
        shapes = f"zero {tuple(tables.zero.shape)} and scale {tuple(tables.scale.shape)}"
        return [f"{shapes} are not both [heads, dim]"]
    if (
        spec.quantised
        and spec.range in ("token", "norm")
        and spec.scope == "channels"
        and tables.zero.shape[1] % spec.group
    ):
        found.append(f"group={spec.group} does not divide its {tables.zero.shape[1]} channels")
    (heads, dim), most = tables.zero.shape, min(MOST, PAGE * tables.zero.numel())
    if spec.quantised and spec.outliers_per_page(heads, dim) > most:
        found.append(
            f"outliers={spec.outliers} are more than the {most} that a page of {heads} x {dim} channels can hold"
        )
    if not (tables.zero.abs() < LARGEST).all():
        found.append(f"zero is not finite, or {LARGEST:.0e} and beyond")
    if not ((tables.scale > 0) & (tables.scale < LARGEST)).all():
        found.append(f"scale is not finite and positive, or {LARGEST:.0e} and beyond")
    for field, there in (("widths", spec.levels == "mixed"), ("trellis", spec.rounding == "trellis")):
        if getattr(tables, field) is not None and not there:  # kernels would read codes by it
            found.append(f"{field} do not go with levels={spec.levels} and rounding={spec.rounding}")
    if spec.levels == "mixed":
        found += _width_problems(name, spec, tables)
    elif spec.quantised:
        found += _level_problems(spec, tables) or _edge_problems(spec, tables)
    if spec.ranks_by_error and not _is_weight(tables):
        found.append("outliers rank by error, but weight is missing, not [heads, dim], negative or not finite")
    if spec.feeds_back:
        found += _feedback_problems(tables)
    if spec.rounding == "trellis":
        found += _trellis_problems(spec, tables)
    return found + _read_frame_problems(spec, tables)


def _read_frame_problems(spec: TensorSpec, tables: Tables) -> list[str]:
    frame = tables.read_zero, tables.read_scale
    if not spec.unbiased:
        return [] if frame == (None, None) else ["read_zero and read_scale are for unbiased=true"]
    if any(t is None or t.shape != tables.zero.shape for t in frame):
        return [f"read_zero or read_scale is missing or not {list(tables.zero.shape)}"]
    if not ((tables.read_zero.abs() < LARGEST) & (tables.read_scale > 0) & (tables.read_scale < LARGEST)).all():
        return [f"read_zero or read_scale is not finite, {LARGEST:.0e} and beyond, or a scale is not positive"]
    return []


def _feedback_problems(tables: Tables) -> list[str]:
    heads, dim = tables.zero.shape
    feedback, order = tables.feedback, tables.order
    if feedback is None or feedback.shape != (heads, dim, dim) or not feedback.isfinite().all():
        return [f"feedback is missing, not finite or not [{heads}, {dim}, {dim}]"]
    if feedback.triu().any() or not torch.equal(feedback, feedback.bfloat16().to(feedback)):
        return ["feedback is not zero on and above the diagonal, or not exact in bf16"]
    if (
        order is None
        or order.shape != (heads, dim)
        or not (order.sort(-1).values == torch.arange(dim, device=order.device)).all()
    ):
        return [f"order is missing or its rows are not permutations of the {dim} channels"]
    return []


def _trellis_problems(spec: TensorSpec, tables: Tables) -> list[str]:
    table, entries = tables.trellis, trellis.table_offset(spec.bits + 1)
    if table is None or table.shape != (entries,) or not table.isfinite().all():
        return [f"trellis is missing, not finite or not [{entries}]"]
    return [] if torch.equal(table, table.bfloat16().float()) else ["trellis is not exact in bf16"]


def _is_weight(tables: Tables) -> bool:
    weight = tables.weight
    return (
        weight is not None
        and weight.shape == tables.scale.shape
        and bool((weight >= 0).all() and weight.isfinite().all())
    )


def _width_problems(name: str, spec: TensorSpec, tables: Tables) -> list[str]:
    widths = tables.widths
    if (
        widths is None
        or widths.shape != tables.zero.shape
        or widths.dtype != torch.uint8
        or widths.min() < 1
        or widths.max() > spec.bits
    ):
        return [f"widths are not uint8 [heads, dim] with 1 to {spec.bits} bits each"]
    pairs = widths.unflatten(-1, (2, -1))
    tiles = widths.split(TILE, dim=-1)
    even = (pairs[:, 0] == pairs[:, 1]).all() if name == "key" else all((t == t[:, :1]).all() for t in tiles)
    if not even:
        return [f"widths differ inside a {'rotary pair' if name == 'key' else 'tile of 16 channels'}"]
    if tables.levels.dim() != 2 or tables.levels.shape[1] != table_offset(spec.bits + 1):
        return [f"levels {tuple(tables.levels.shape)}, expected rows with the tables of 1 to {spec.bits} bits"]
    tables_of = (tables._replace(levels=table_of(tables.levels, w)) for w in range(1, spec.bits + 1))
    return [text for each in tables_of for text in _level_problems(spec, each)]


def _level_problems(spec: TensorSpec, tables: Tables) -> list[str]:
    levels = tables.levels
    books = spec.book_count(*tables.zero.shape)
    if levels.dim() != 2 or levels.shape[0] != books or not 2 <= levels.shape[1] <= 2**spec.bits:
        return [f"levels {tuple(levels.shape)}, expected [{books}, 2 to {2**spec.bits}]"]
    if not levels.isfinite().all() or not (levels[:, 1:] > levels[:, :-1]).all():
        return ["levels are not finite and strictly increasing"]
    if not torch.equal(levels, levels.bfloat16().float()):
        return ["levels are not exact in bf16"]
    return []


def _edge_problems(spec: TensorSpec, tables: Tables) -> list[str]:
    levels, edges = tables.levels, tables.edges
    if not spec.q_norm:
        return [] if edges is None else ["edges are for q_norm=true"]
    if edges is None or edges.shape != (levels.shape[0], levels.shape[-1] - 1):
        return [f"edges are missing or not [{levels.shape[0]}, {levels.shape[-1] - 1}]"]
    if not edges.isfinite().all() or not (edges[:, 1:] > edges[:, :-1]).all():
        return ["edges are not finite and strictly increasing"]
    return []
