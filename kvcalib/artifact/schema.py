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
              layers.{i}.{key|value}.read_zero, .read_scale  fp32 [H, D]  only with unbiased; scale > 0
    metadata  format = "pt"
              kvcalib = JSON {version, spec, layers, model, calibration, settings, summary}
              sha256 over that JSON and all tensors

`layers` lists the real layer indices, so gaps (layers without a cache of their own) are allowed. `model` is the
identity of the model that was calibrated, `calibration` the text (window hash, counts, seed), `settings` every
setting of the run, `summary` what the fit of each layer came to.
"""

import logging
import math
from dataclasses import dataclass, field

from kvcalib.artifact.usable import TENSORS, spec_problems, table_problems
from kvcalib.errors import ArtifactError
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec

logger = logging.getLogger(__name__)

VERSION = 1


def tensor_fields(spec: TensorSpec) -> tuple[str, ...]:
    """Fields of `Tables` that a file of this format holds."""
    fields = ["zero", "scale", "levels"]
    fields += ["weight"] if spec.ranks_by_error else []
    fields += ["widths"] if spec.levels == "mixed" else []
    fields += ["feedback", "order"] if spec.feeds_back else []
    fields += ["trellis"] if spec.rounding == "trellis" else []
    fields += ["edges"] if spec.q_norm else []
    fields += ["read_zero", "read_scale"] if spec.unbiased else []
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
    valid_as: list = field(default_factory=list, init=False, repr=False, compare=False)
    """What `validate` has seen: tensors, and how often each had been written to."""


def validate(artifact: Artifact) -> None:
    """Raises ArtifactError with every problem found: layer, tensor and what is wrong with it.

    Looks once, and again when a tensor has been put in the place of another or written to.
    """
    stamp = [artifact.spec, *_stamp(artifact)]
    if _is_same(stamp, artifact.valid_as):
        return
    problems = spec_problems(artifact.spec)
    if problems:
        raise ArtifactError(f"the calibration is not usable: {_listed(problems)}")
    if not artifact.layers:
        problems.append("it holds no layer")
    for index, layer in artifact.layers.items():
        for name in TENSORS:
            spec, tables = getattr(artifact.spec, name), getattr(layer, name)
            problems += [f"layers.{index}.{name}: {text}" for text in table_problems(name, spec, tables)]
    if problems:
        raise ArtifactError(f"the calibration is not usable: {_listed(problems)}")
    artifact.valid_as[:] = stamp


def _stamp(artifact: Artifact) -> list:
    """(layer, tensor, version) of everything that kernels read."""
    return [
        (index, tensor, None if tensor is None or tensor.is_inference() else tensor._version)
        for index, layer in artifact.layers.items()
        for tables in (layer.key, layer.value)
        for tensor in tables
    ]


def _is_same(stamp: list, seen: list) -> bool:
    if len(stamp) != len(seen) or stamp[0] != seen[0]:
        return False
    pairs = zip(stamp[1:], seen[1:], strict=True)
    return all(a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in pairs)


def _listed(problems: list[str]) -> str:
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


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
        differences.sort(key=lambda text: ("sha256" in text, text.startswith("shapes.")))  # what tells most comes first
        raise ArtifactError(
            "this artifact was calibrated for another model: "
            + "; ".join(differences[:3])
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
