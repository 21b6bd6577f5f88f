"""Stage export: frames and levels become the one file that ships, `kvcalib.safetensors`."""

from pathlib import Path

from transformers import PreTrainedModel

from kvcalib.artifact.io import FILE_NAME, save_artifact
from kvcalib.artifact.schema import Artifact, LayerTables, tensor_fields
from kvcalib.calib import codebooks, files, outliers
from kvcalib.errors import ConfigError
from kvcalib.models.identity import identity
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec

_CALIBRATION = ("windows", "source", "count", "sink", "sample_tokens")


def export(
    model: PreTrainedModel,
    frames: Path,
    levels: Path,
    spec: CacheSpec,
    *,
    out: Path,
    settings: dict | None = None,
    summary: dict | None = None,
) -> dict:
    """Folders written by `outliers` and `codebooks`; settings, summary: JSON for the header.

    Raises ConfigError if a folder was made for another format, ArtifactError for unusable numbers.
    """
    frame_file = files.Reader(Path(frames) / outliers.FILE, "outliers")
    level_file = files.Reader(Path(levels) / codebooks.FILE, "codebooks")
    _check_spec(frame_file, spec, "outliers")
    _check_spec(level_file, spec, "codebooks")
    layers = {
        i: LayerTables(
            _tables(level_file, i, "key", spec.key),
            _tables(level_file, i, "value", spec.value),
        )
        for i in files.layers(frame_file)
    }
    calibration = {field: level_file.header[field] for field in _CALIBRATION}
    artifact = Artifact(spec, layers, identity(model), calibration, settings or {}, summary or {})
    path = save_artifact(artifact, Path(out) / FILE_NAME)
    return {"file": path.name, "bytes": path.stat().st_size, "layers": len(layers)}


def _check_spec(reader: files.Reader, spec: CacheSpec, stage: str) -> None:
    """The window does not enter the numbers; the sink does, `collect` left it out."""
    made = CacheSpec.from_dict(reader.header["spec"])
    if (made.key, made.value, reader.header["sink"]) != (spec.key, spec.value, spec.sink):
        raise ConfigError(
            f"the {stage} stage was run for another quant.key, quant.value or quant.sink; "
            f"run `python -m kvcalib stage={stage} stage.force=true`"
        )


def _tables(levels: files.Reader, layer: int, name: str, spec: TensorSpec) -> Tables:
    return Tables(**{field: levels[f"layers.{layer}.{name}.{field}"] for field in tensor_fields(spec)})
