"""A filled cache as one safetensors file, so that a prefix computed once serves other processes.

    tensors   layers.{i}.{name}                    what `LayerStore.tensors` names, cut to what is in use
              layers.{i}.conv.{k}, .recurrent.{k}  the state of a linear-attention layer
    metadata  format = "pt"
              kvcalib_cache = JSON {version, model, weights, artifact, layers: {i: counts and flags}}
              sha256 over that JSON and all tensors

The bits of the pages are the file's own: nothing is decoded or encoded again, so a reloaded cache continues exactly as
the saved one would have. A file belongs to one artifact and to one model, weights and dtype included.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcalib.artifact.files import UNREADABLE, read_whole, save_whole
from kvcalib.artifact.fingerprint import checksum, fingerprint
from kvcalib.artifact.schema import Artifact, model_differences
from kvcalib.errors import ArtifactError
from kvcalib.models.identity import identity, weights_sample
from kvcalib.quant.page import PageLayout
from kvcalib.runtime import soundness
from kvcalib.runtime.store import COUNTS, LayerStore

VERSION = 1
_METADATA_KEY = "kvcalib_cache"
_STATES = ("conv", "recurrent")
_FLAGS = ("number_of_states", "conv_kernel_size", "has_previous_state", "record_past")


def gather(layers: list) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors, and counts and flags by layer, which nothing that comes later changes."""
    tensors, described = {}, {}
    for index, layer in enumerate(layers):
        held, described[index] = _linear_state(layer) if _is_linear(layer) else _store_state(layer.store.seen())
        tensors |= {f"layers.{index}.{name}": tensor.cpu().contiguous() for name, tensor in held.items()}
    return tensors, described


def save_cache(gathered: tuple[dict, dict], artifact: Artifact, model, path: str | Path) -> Path:
    """Returns the path. Raises ConfigError where it cannot be written."""
    tensors, described = gathered
    header = json.dumps(_owner(artifact, model) | {"layers": described}, sort_keys=True)
    return save_whole(path, tensors, {_METADATA_KEY: header, "sha256": checksum(header, tensors)})


def load_cache(layers: list, artifact: Artifact, model, path: str | Path) -> None:
    """Fills the empty layers of a new cache. Raises ArtifactError with the path and what is wrong with the file."""
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"a saved cache is named by its path, not by {type(path).__name__}")
    header, tensors = _read(path)
    owner = _owner(artifact, model)
    if header["artifact"] != owner["artifact"]:
        raise ArtifactError(f"{path} was saved with another artifact; load it with the artifact that filled the cache")
    differences = [d.replace("artifact has", "file has") for d in model_differences(header["model"], owner["model"])]
    if not differences and header["weights"] != owner["weights"]:
        differences = ["some weights are not those that computed it"]
    if differences:
        raise ArtifactError(
            f"{path} was saved with another model: {'; '.join(differences[:4])}; fill a new cache from the text"
        )
    described = header["layers"]
    if described.keys() != {str(index) for index in range(len(layers))} or {*map(type, described.values())} - {dict}:
        raise ArtifactError(f"{path} holds {len(described)} layers, this model has {len(layers)}; save the cache again")
    for index, layer in enumerate(layers):
        start = f"layers.{index}."
        held = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
        restore = _restore_linear if _is_linear(layer) else _restore_store
        if problem := restore(layer, held, described[str(index)], model):
            raise ArtifactError(f"{path} holds no whole cache: layer {index}: {problem}; save it again")
    lengths = {layer.store.length for layer in layers if not _is_linear(layer)}
    if len(lengths) > 1:
        raise ArtifactError(f"{path} holds no whole cache: its layers have {sorted(lengths)} tokens; save it again")


def _read(path: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        metadata, tensors = read_whole(path)
    except IsADirectoryError as error:
        raise ArtifactError(f"{path} is a folder: give the file that cache.save(path) wrote") from error
    except FileNotFoundError as error:
        raise ArtifactError(f"no saved cache at {path}; write one with cache.save(path)") from error
    except UNREADABLE as error:
        raise ArtifactError(f"{path} is not a readable safetensors file ({error}); save the cache again") from error
    text = metadata.get(_METADATA_KEY)
    if text is None:
        raise ArtifactError(f"{path} is a safetensors file but not a saved cache; cache.save(path) writes one")
    if metadata.get("sha256") != checksum(text, tensors):
        raise ArtifactError(f"{path} is damaged (its checksum does not match); save the cache again")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{path}: its header is damaged ({error}); save the cache again") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        version = header.get("version") if isinstance(header, dict) else None
        raise ArtifactError(
            f"{path} has cache version {version}, this kvcalib reads version {VERSION}; save the cache again"
        )
    whole = {"artifact": str, "model": dict, "weights": str, "layers": dict}
    if wrong := [name for name, kind in whole.items() if type(header.get(name)) is not kind]:
        raise ArtifactError(f"{path} is no saved cache: its header has no {', '.join(wrong)}; save the cache again")
    return header, tensors


def _owner(artifact: Artifact, model) -> dict:
    return {
        "version": VERSION,
        "artifact": fingerprint(artifact),
        "model": identity(model),
        "weights": weights_sample(model),
    }


def _is_linear(layer) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _store_state(store: LayerStore) -> tuple[dict[str, torch.Tensor], dict]:
    if store.layout is None:
        return {}, {"length": 0}
    held = dict(store.tensors())
    key, value = store.recent()
    pages = store.pages[:, : max(store.page_counts)].clone()
    for row, count in enumerate(store.page_counts):
        pages[row, count:] = 0  # capacity that the row does not use is undefined memory
    held |= {"recent_key": key, "recent_value": value, "pages": pages}
    return held, {name: getattr(store, name) for name in ("length", *COUNTS)} | {"is_long": store.frequencies.is_long}


def _restore_store(layer, held: dict[str, torch.Tensor], counts: dict, _model) -> str | None:
    """What is wrong, if anything."""
    store: LayerStore = layer.store
    if not held and counts == {"length": 0}:
        return None
    layout = PageLayout(store.spec, store.key_tables, store.value_tables)
    if problem := next(soundness.problems(store.spec, layout, held, counts), None):
        return problem
    if counts["is_long"] and store.frequencies.long is None:
        return "it rotates as for long texts, which this model does not"
    store.layout = layout
    store.real = None
    for name, tensor in held.items():
        setattr(store, name, tensor)
    for name in ("length", *COUNTS):
        setattr(store, name, counts[name])
    store.frequencies = replace(store.frequencies, is_long=counts["is_long"])
    layer.is_initialized = True
    return None


def _linear_state(layer: LinearAttentionCacheLayerMixin) -> tuple[dict[str, torch.Tensor], dict]:
    held = {
        f"{name}.{k}": tensor.clone()
        for name in _STATES
        for k, tensor in getattr(layer, f"{name}_states").items()
        if tensor is not None
    }
    return held, {name: getattr(layer, name) for name in _FLAGS}


def _restore_linear(
    layer: LinearAttentionCacheLayerMixin, held: dict[str, torch.Tensor], flags: dict, model
) -> str | None:
    """What is wrong, if anything."""
    states = {str(k) for k in range(layer.number_of_states)}
    by_state = [flags.get(name) for name in ("conv_kernel_size", "has_previous_state")]
    if flags.keys() != {*_FLAGS} or any(type(each) is not dict or each.keys() != states for each in by_state):
        return "its counts are not those of a cache"
    if held.keys() - {f"{name}.{k}" for name in _STATES for k in states}:
        return "its tensors are not those of a cache"
    layer.record_past = flags["record_past"]
    for k in range(layer.number_of_states):
        layer.conv_kernel_size[k] = flags["conv_kernel_size"][str(k)]
        layer.has_previous_state[k] = flags["has_previous_state"][str(k)]
    for name, tensor in held.items():
        kind, _, k = name.partition(".")
        getattr(layer, f"{kind}_states")[int(k)] = tensor.to(model.device)
        getattr(layer, f"is_{kind}_states_initialized")[int(k)] = True
        layer.dtype, layer.device = tensor.dtype, model.device
    return None
