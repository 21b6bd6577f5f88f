"""The shipped artifact: what is in it, and what makes a file a valid one.

One safetensors file.

    tensors   layers.{i}.{key|value}.zero     fp32 [H, D]      frame, see quant/spec.py
              layers.{i}.{key|value}.scale    fp32 [H, D]      > 0
              layers.{i}.{key|value}.levels   bf16 [1, H or H * D, L]  rows strictly increasing
              layers.{i}.{key|value}.weight   fp32 [H, D]      only where outliers rank by error
              layers.{i}.{key|value}.widths   uint8 [H, D]     only for levels="mixed": equal inside pairs and tiles
              layers.{i}.{key|value}.feedback bf16 [H, D, D]  where rounding feeds back: zero on and above the diagonal
              layers.{i}.{key|value}.order    int16 [H, D]     with feedback: rows are permutations of the channels
              layers.{i}.{key|value}.trellis  bf16 [L]         for rounding="trellis": by window, see quant/trellis.py
              layers.{i}.{key|value}.edges    fp32 [1 or H, L - 1]  only with q_norm: rows strictly increasing
    metadata  format = "pt"
              kvcalib = JSON {version, spec, layers, model, calibration, settings, summary}
              sha256 over that JSON and all tensors

`layers` lists the real layer indices, so gaps (layers without a cache of their own) are allowed. `model` is the
identity of the model that was calibrated, `calibration` the text (window hash, counts, seed), `settings` every
setting of the run, `summary` what was measured.
"""

import logging
import math
from dataclasses import dataclass, field

import torch

from kvcalib.errors import ArtifactError
from kvcalib.quant import trellis
from kvcalib.quant.codebook import table_of, table_offset
from kvcalib.quant.page import TILE
from kvcalib.quant.spec import LARGEST, PAGE, CacheSpec, Tables, TensorSpec

logger = logging.getLogger(__name__)

VERSION = 1
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


def tensor_fields(spec: TensorSpec) -> tuple[str, ...]:
    """Fields of `Tables` that a file of this format holds."""
    fields = ["zero", "scale", "levels"]
    fields += ["weight"] if spec.ranks_by_error else []
    fields += ["widths"] if spec.levels == "mixed" else []
    fields += ["feedback", "order"] if spec.feeds_back else []
    fields += ["trellis"] if spec.rounding == "trellis" else []
    fields += ["edges"] if spec.q_norm else []
    return tuple(fields)


@dataclass(frozen=True)
class LayerTables:
    key: Tables
    value: Tables


@dataclass(frozen=True)
class Artifact:
    """layers: {layer index: LayerTables}. The dicts are JSON."""

    spec: CacheSpec
    layers: dict[int, LayerTables]
    model: dict
    calibration: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    version: int = VERSION


def validate(artifact: Artifact) -> None:
    """Raises ArtifactError with every problem found: layer, tensor and what is wrong with it."""
    problems = spec_problems(artifact.spec)
    if problems:
        raise ArtifactError(f"the calibration is not usable: {_listed(problems)}")
    if not artifact.layers:
        problems.append("it holds no layer")
    for index, layer in artifact.layers.items():
        for name in TENSORS:
            spec, tables = getattr(artifact.spec, name), getattr(layer, name)
            problems += [f"layers.{index}.{name}: {text}" for text in _problems(name, spec, tables)]
    if problems:
        raise ArtifactError(f"the calibration is not usable: {_listed(problems)}")


def _listed(problems: list[str]) -> str:
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


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
    if not isinstance(spec.q_norm, bool):
        found.append(f"q_norm={spec.q_norm!r} must be true or false")
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
    if name == "key" and spec.rotation != "none":
        found.append(f"rotation={spec.rotation} must be none (rotary embedding does not commute with it)")
    return found


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problems(name: str, spec: TensorSpec, tables: Tables) -> list[str]:
    found = []
    if tables.zero.dim() != 2 or tables.zero.shape != tables.scale.shape:
        shapes = f"zero {tuple(tables.zero.shape)} and scale {tuple(tables.scale.shape)}"
        return [f"{shapes} are not both [heads, dim]"]
    if spec.quantised and spec.range == "token" and spec.scope == "channels" and tables.zero.shape[1] % spec.group:
        found.append(f"group={spec.group} does not divide its {tables.zero.shape[1]} channels")
    if not (tables.zero.abs() < LARGEST).all():
        found.append(f"zero is not finite, or {LARGEST:.0e} and beyond")
    if not ((tables.scale > 0) & (tables.scale < LARGEST)).all():
        found.append(f"scale is not finite and positive, or {LARGEST:.0e} and beyond")
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
    return found


def _feedback_problems(tables: Tables) -> list[str]:
    heads, dim = tables.zero.shape
    feedback, order = tables.feedback, tables.order
    if feedback is None or feedback.shape != (heads, dim, dim) or not feedback.isfinite().all():
        return [f"feedback is missing, not finite or not [{heads}, {dim}, {dim}]"]
    if feedback.triu().any() or not torch.equal(feedback, feedback.bfloat16().to(feedback)):
        return ["feedback is not zero on and above the diagonal, or not exact in bf16"]
    if order is None or order.shape != (heads, dim) or not (order.sort(-1).values == torch.arange(dim)).all():
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


def model_differences(stored: dict, current: dict, prefix: str = "") -> list[str]:
    """Every leaf where two JSON identities differ, as 'field: artifact has A, model has B'."""
    differences = []
    for key in sorted(stored.keys() | current.keys()):
        old, new = stored.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += model_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences.append(f"{prefix}{key}: artifact has {shortened(old)}, model has {shortened(new)}")
    return differences


def check_model(artifact: Artifact, identity: dict) -> None:
    """Raises ArtifactError that says what differs between the calibrated model, or the tables, and this model.

    Calibrating in one precision and serving in another is normal, and rounds every weight: then the hash of the
    weights cannot be compared, and a log line says so.
    """
    stored, current = dict(artifact.model), dict(identity)
    if stored.get("dtype") != current.get("dtype"):
        logger.info("calibrated in %s, used in %s: weights are not compared", stored.get("dtype"), current.get("dtype"))
        for name in ("dtype", "weights_sha256"):
            stored.pop(name, None), current.pop(name, None)
    differences = model_differences(stored, current)
    if differences:
        raise ArtifactError(
            "this artifact was calibrated for another model: "
            + "; ".join(differences[:6])
            + ". Calibrate this model (python -m kvcalib model.path=...) or load the one that the artifact names"
        )
    problems = check_shapes(artifact.layers, identity["shapes"])
    if problems:
        raise ArtifactError(
            f"the tables of this artifact do not fit the model: {_listed(problems)}; export it again with"
            " `python -m kvcalib stage=export stage.force=true`"
        )


def check_shapes(layers: dict[int, LayerTables], shapes: dict[str, list[int]]) -> list[str]:
    """Where tables differ from the model's {layer: [kv heads, key dim, value dim, query heads]}."""
    wanted = {int(index): shape for index, shape in shapes.items()}
    found = [f"layer {i} has no tables" for i in sorted(wanted.keys() - layers.keys())]
    found += [
        f"layer {i} has tables, but the model caches nothing there" for i in sorted(layers.keys() - wanted.keys())
    ]
    for index in sorted(wanted.keys() & layers.keys()):
        heads, *dims = wanted[index][:3]
        for name, dim in zip(TENSORS, dims, strict=True):
            shape = tuple(getattr(layers[index], name).zero.shape)
            if shape != (heads, dim):
                found.append(f"layers.{index}.{name} is {shape}, the model's heads are {(heads, dim)}")
    return found


def json_safe(value):
    """NaN and infinities have no JSON: None instead, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return value


def shortened(value) -> str:
    """For a message of one line."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
