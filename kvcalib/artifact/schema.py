"""The shipped artifact: what is in it, and what makes a file a valid one.

One safetensors file.

    tensors   layers.{i}.{key|value}.zero     fp32 [H, D]      frame, see quant/spec.py
              layers.{i}.{key|value}.scale    fp32 [H, D]      > 0
              layers.{i}.{key|value}.levels   bf16 [1, H or H * D, L]  rows strictly increasing
              layers.{i}.{key|value}.weight   fp32 [H, D]      only where outliers rank by error
              layers.{i}.{key|value}.widths   uint8 [H, D]     only for levels="mixed": equal inside pairs and tiles
    metadata  format = "pt"
              kvcalib = JSON {version, spec, layers, model, calibration, settings, summary}

`layers` lists the real layer indices, so gaps (layers without a cache of their own) are allowed. `model` is the
identity of the model that was calibrated, `calibration` the text (window hash, counts, seed), `settings` every
setting of the run, `summary` what was measured.
"""

import logging
import math
from dataclasses import dataclass, field

import torch

from kvcalib.errors import ArtifactError
from kvcalib.quant.codebook import table_of, table_offset
from kvcalib.quant.page import TILE
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec

logger = logging.getLogger(__name__)

VERSION = 1
TENSORS = ("key", "value")


def tensor_fields(spec: TensorSpec) -> tuple[str, ...]:
    """Fields of `Tables` that a file of this format holds."""
    fields = ["zero", "scale", "levels"]
    fields += ["weight"] if spec.ranks_by_error else []
    return (*fields, "widths") if spec.levels == "mixed" else tuple(fields)


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
    problems = []
    if not artifact.layers:
        problems.append("it holds no layer")
    for index, layer in artifact.layers.items():
        for name in TENSORS:
            spec, tables = getattr(artifact.spec, name), getattr(layer, name)
            problems += [f"layers.{index}.{name}: {text}" for text in _problems(name, spec, tables)]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ArtifactError(f"the calibration is not usable: {shown}")


def _problems(name: str, spec: TensorSpec, tables: Tables) -> list[str]:
    found = []
    if tables.zero.dim() != 2 or tables.zero.shape != tables.scale.shape:
        found.append(f"zero {tuple(tables.zero.shape)} and scale {tuple(tables.scale.shape)} are not both [heads, dim]")
    if not tables.zero.isfinite().all():
        found.append("zero is not finite")
    if not (tables.scale.isfinite().all() and (tables.scale > 0).all()):
        found.append("scale is not finite and positive")
    if spec.levels == "mixed":
        found += _width_problems(name, spec, tables)
    elif spec.quantised:
        found += _level_problems(spec, tables)
    if spec.ranks_by_error and not _is_weight(tables):
        found.append("outliers rank by error, but weight is missing, not [heads, dim], negative or not finite")
    return found


def _is_weight(tables: Tables) -> bool:
    weight = tables.weight
    return (
        weight is not None
        and weight.shape == tables.scale.shape
        and bool((weight >= 0).all() and weight.isfinite().all())
    )


def _width_problems(name: str, spec: TensorSpec, tables: Tables) -> list[str]:
    widths = tables.widths
    if widths is None or widths.shape != tables.zero.shape or widths.min() < 1 or widths.max() > spec.bits:
        return [f"widths are not [heads, dim] with 1 to {spec.bits} bits each"]
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


def model_differences(stored: dict, current: dict, prefix: str = "") -> list[str]:
    """Every leaf where two JSON identities differ, as 'field: artifact has A, model has B'."""
    differences = []
    for key in sorted(stored.keys() | current.keys()):
        old, new = stored.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += model_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences.append(f"{prefix}{key}: artifact has {_short(old)}, model has {_short(new)}")
    return differences


def check_model(artifact: Artifact, identity: dict) -> None:
    """Raises ArtifactError that says what differs between the calibrated model and this one.

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


def json_safe(value):
    """NaN and infinities have no JSON: None instead, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return value


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
