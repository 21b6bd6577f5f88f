"""What a calibration file remembers about the model it was made for.

Two hashes: of the config fields that shape keys and values (no names, paths, dtypes or library
versions; a vocabulary may grow), and of the weights that produce them. A fine-tuned or re-quantised model has the first
in common with its parent and not the second.
"""

from __future__ import annotations

import hashlib
import json
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcalib.errors import UnsupportedModel
from kvcalib.models.families import attention_modules, layer_shapes, text_config

FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)
KV_WEIGHTS = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "k_norm", "k_layernorm")
_hashes: WeakKeyDictionary[PreTrainedModel, tuple[list, str]] = WeakKeyDictionary()


def identity(model: PreTrainedModel) -> dict:
    """JSON-ready description of a model, equal in every process that loads the same weights."""
    shapes = layer_shapes(model)
    return {
        "architecture": type(model).__name__,
        "model_type": text_config(model).model_type,
        "layers": text_config(model).num_hidden_layers,
        "shapes": {str(i): [s.heads, s.key_dim, s.value_dim, s.query_heads] for i, s in shapes.items()},
        "dtype": str(model.dtype).removeprefix("torch."),
        "config_sha256": config_hash(model),
        "weights_sha256": weights_hash(model),
    }


def config_hash(model: PreTrainedModel) -> str:
    """sha256 of the config fields that decide what is cached."""
    config = text_config(model).to_dict()
    text = json.dumps({name: config.get(name) for name in FIELDS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_hash(model: PreTrainedModel) -> str:
    """sha256 over names, dtypes and raw bytes of the weights that make keys and values.

    Gigabytes for a large model, so it is kept for as long as no weight has been replaced or
    written to. Writing through `.data` leaves no trace but the values: a sample of those tells.
    """
    weights = _kv_weights(model)
    stamp = [(w.data_ptr(), version(w), w.dtype, w.device, _sample(values)) for _, w, values in weights]
    if model not in _hashes or _hashes[model][0] != stamp:
        _hashes[model] = (stamp, _hash(weights))
    return _hashes[model][1]


def version(tensor: torch.Tensor) -> int | None:
    """Grows with every write; None for a tensor of inference mode, which counts none."""
    return None if tensor.is_inference() else tensor._version


def weights_sample(model: PreTrainedModel) -> str:
    """sha256 over a sample of every weight of the model: what a cached token depends on, at no cost."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        values = _values(model, name, weight)
        digest.update(f"{name}:{weight.dtype}:{list(weight.shape)}".encode())
        digest.update(_sample(values))
    return digest.hexdigest()


def _hash(weights: list[tuple[str, torch.Tensor, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, _, weight in weights:
        digest.update(f"{name}:{weight.dtype}:{list(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> bytes:
    """Hash of about 4096 elements; the odd step spreads them over rows and columns."""
    step = weight.numel() // 4096 | 1
    sample = weight.flatten()[::step].contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(sample.numpy()).digest()


def _kv_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, weight, its values) of the projections of keys and values, all layers; fused ones include the queries."""
    return [
        (f"{index}.{name}", weight, _values(layer, name, weight))
        for index, layer in attention_modules(model).items()
        for name, weight in sorted(layer.state_dict().items())
        if name.split(".")[0] in KV_WEIGHTS
    ]


def _values(module: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight itself; where accelerate keeps it on the CPU or on disk, a meta tensor stands in the module."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedModel(
            f"weights {name} are a {type(weight).__name__} and no tensor; load the model unquantised"
        )
    if weight.device.type != "meta":
        return weight
    owner, _, leaf = name.rpartition(".")
    hook = getattr(module.get_submodule(owner), "_hf_hook", None)
    if hook is None:
        raise UnsupportedModel(f"weights {name} are on the device meta, without numbers; load the model")
    return hook.weights_map[leaf]
