"""Write and read the artifact file; a half-written or foreign file never loads."""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download

from kvcalib.artifact.files import UNREADABLE, read_whole, save_whole
from kvcalib.artifact.fingerprint import checksum
from kvcalib.artifact.schema import (
    VERSION,
    Artifact,
    LayerTables,
    json_safe,
    shortened,
    tensor_fields,
    validate,
)
from kvcalib.artifact.usable import TENSORS, spec_problems
from kvcalib.errors import ArtifactError, MissingInput
from kvcalib.hub import obtain
from kvcalib.quant.spec import CacheSpec, Tables

FILE_NAME = "kvcalib.safetensors"
_BF16 = dict.fromkeys(("levels", "feedback", "trellis"), torch.bfloat16)
_DTYPES = {**_BF16, "widths": torch.uint8, "order": torch.int16}
_METADATA_KEY = "kvcalib"
_METADATA = ("format", _METADATA_KEY, "sha256")
_DICTS = ("spec", "model", "calibration", "settings", "summary")
_HEADER = ("version", "layers", *_DICTS)


def save_artifact(artifact: Artifact, path: str | Path) -> Path:
    """Validates and writes, whole or not at all; returns the path."""
    validate(artifact)
    tensors = {}
    for index, layer in artifact.layers.items():
        for name in TENSORS:
            for field in tensor_fields(getattr(artifact.spec, name)):
                tensor = getattr(getattr(layer, name), field)
                stored = tensor.to(_stored_dtype(field))
                tensors[f"layers.{index}.{name}.{field}"] = stored.clone().contiguous()
    header = json.dumps(_header(artifact), sort_keys=True)
    return save_whole(path, tensors, {_METADATA_KEY: header, "sha256": checksum(header, tensors)})


def load_artifact(path: str | Path) -> Artifact:
    """Reads and checks an artifact: a file, a folder that holds kvcalib.safetensors, or a hub id.

    Raises ArtifactError with the path and the reason.
    """
    file = locate(path)
    try:
        metadata, tensors = read_whole(file)
    except UNREADABLE as error:
        raise ArtifactError(
            f"{file} is not a readable safetensors file ({error}): copy it again, or export it with"
            " `python -m kvcalib stage=export stage.force=true`"
        ) from error
    if _METADATA_KEY not in metadata:
        raise ArtifactError(
            f"{file} is a safetensors file but not a kvcalib artifact (its header has no 'kvcalib' entry)"
        )
    if metadata.get("sha256") != checksum(metadata[_METADATA_KEY], tensors):
        raise ArtifactError(f"{file} is damaged (its checksum does not match); copy or export it again")
    if metadata.keys() - {*_METADATA} or metadata.get("format", "pt") != "pt":
        raise ArtifactError(f"{file} is damaged (its header does not say {', '.join(_METADATA)}); copy it again")
    artifact = _assemble(file, _parse_header(file, metadata[_METADATA_KEY]), tensors)
    try:
        validate(artifact)
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error
    return artifact


def locate(path: str | Path) -> Path:
    """Local file, folder with the default file name, folder of a run, or a file fetched from the hub."""
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"an artifact is named by its path or a hub id, not by {type(path).__name__}")
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            inside = [local / FILE_NAME, local / "export" / FILE_NAME]
            local = next((file for file in inside if file.is_file()), inside[0])
        if local.is_file():
            return local
    except UNREADABLE as error:
        raise ArtifactError(f"no artifact at {path} ({error}); give the path of {FILE_NAME}") from error
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")) or local.suffix:
        raise ArtifactError(f"no artifact at {local}; export one with `python -m kvcalib stage=export`")
    return _from_hub(str(path))


def _from_hub(hub_id: str) -> Path:
    def file(**kwargs) -> Path:
        return Path(hf_hub_download(hub_id, FILE_NAME, **kwargs))

    try:
        return obtain(hub_id, lambda: file(local_files_only=True), file)
    except MissingInput as error:
        raise ArtifactError(
            f"no artifact {hub_id}: {error}; pass the path of {FILE_NAME}, or export one with"
            " `python -m kvcalib stage=export`"
        ) from error


def _stored_dtype(field: str) -> torch.dtype:
    return _DTYPES.get(field, torch.float32)


def _header(artifact: Artifact) -> dict:
    return json_safe(
        {
            "version": artifact.version,
            "spec": artifact.spec.to_dict(),
            "layers": sorted(artifact.layers),
            "model": artifact.model,
            "calibration": artifact.calibration,
            "settings": artifact.settings,
            "summary": artifact.summary,
        }
    )


def _parse_header(file: Path, text: str) -> dict:
    try:
        header = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArtifactError(f"{file}: its header is damaged ({error})") from error
    if not isinstance(header, dict) or "version" not in header:
        raise ArtifactError(f"{file}: its header names no version")
    if header["version"] != VERSION:
        raise ArtifactError(
            f"{file} has artifact version {header['version']}, this kvcalib reads version {VERSION}; export it again"
        )
    missing = [name for name in _HEADER if name not in header]
    if missing:
        raise ArtifactError(f"{file}: its header lacks {', '.join(missing)}")
    for name in _DICTS:
        if not isinstance(header[name], dict):
            raise ArtifactError(f"{file}: {name} in its header is {shortened(header[name])}, not a dictionary")
    layers = header["layers"]
    if not isinstance(layers, list) or any(type(i) is not int or i < 0 for i in layers) or len({*layers}) < len(layers):
        raise ArtifactError(
            f"{file}: layers in its header is {shortened(layers)}, not a list of different layer indices"
        )
    return header


def _spec(file: Path, header: dict) -> CacheSpec:
    try:
        spec = CacheSpec.from_dict(header["spec"])
    except (TypeError, KeyError) as error:
        raise ArtifactError(f"{file}: its quantiser spec is damaged ({error})") from error
    problems = spec_problems(spec)
    if problems:
        raise ArtifactError(f"{file}: {'; '.join(problems)}")
    return spec


def _assemble(file: Path, header: dict, tensors: dict[str, torch.Tensor]) -> Artifact:
    spec = _spec(file, header)
    fields = {name: tensor_fields(getattr(spec, name)) for name in TENSORS}
    expected = {f"layers.{i}.{name}.{field}" for i in header["layers"] for name in TENSORS for field in fields[name]}
    if expected != tensors.keys():
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise ArtifactError(f"{file}: missing tensors {missing[:4]}, unexpected tensors {extra[:4]}")
    for name, tensor in tensors.items():
        if tensor.dtype != (dtype := _stored_dtype(name.rpartition(".")[2])):
            raise ArtifactError(f"{file}: {name} is in {tensor.dtype}, not in {dtype}")

    def tables(index: int, name: str) -> Tables:
        stored = {field: tensors[f"layers.{index}.{name}.{field}"] for field in fields[name]}
        wide = {field: t.float() for field, t in stored.items() if t.is_floating_point() and field != "feedback"}
        return Tables(**(stored | wide))  # feedback is as large as the rest together

    layers = {i: LayerTables(tables(i, "key"), tables(i, "value")) for i in header["layers"]}
    rest = {name: header[name] for name in ("model", "calibration", "settings", "summary", "version")}
    return Artifact(spec=spec, layers=layers, **rest)
