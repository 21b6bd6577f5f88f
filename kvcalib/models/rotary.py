"""How each attention layer rotates its keys: pairing, rotary dims, frequencies, gain.

For a key channel pair (a, b) at position p and frequency w the model caches

    a' = g (a cos pw - b sin pw)        b' = g (b cos pw + a sin pw)

with the pairs laid out as

    half         (i, i + dims/2)   Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, ...
    interleaved  (2i, 2i + 1)      Cohere, GLM, ...
    none         not rotated       NoPE layers, learned absolute positions

over the first `dims` channels of a head; the rest passes through. Frequencies and gain g are those
of the model's own rotary module. The pairing is found by calling the family's own
`apply_rotary_pos_emb` on a random vector and comparing, so a new family needs no row here unless it
leaves some layers unrotated by a rule that is not the attribute `use_rope`: then it gets a row in
UNROTATED.

`check_rotary` proves the result on the loaded model. A sequence of a single token attends to
nothing but itself, so every layer sees the same input at whatever position the token stands, and
its key before RoPE must come out the same from position 0 and from position 7.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcalib.errors import UnsupportedModel
from kvcalib.models.families import attention_modules, sliding_windows, text_config

UNROTATED: dict[str, Callable[[nn.Module], bool]] = {
    "cohere2": lambda layer: layer.sliding_window is None,
    "exaone4": lambda layer: layer.sliding_window is not None and not layer.is_sliding,
    "exaone_moe": lambda layer: layer.sliding_window is not None and not layer.is_sliding,
}


@dataclass(frozen=True)
class RotaryInfo:
    """inv_freq fp32 [dims/2], true for sequences of up to `valid_to` tokens (None: of any length).

    Beyond `valid_to` (dynamic and longrope scaling) the model itself changes frequency with the
    length of the sequence; `rotary(model, length=...)` gives those of a longer one.
    """

    kind: str
    dims: int
    inv_freq: torch.Tensor
    scaling: float
    sliding_window: int | None
    valid_to: int | None = None


def rotary(model: PreTrainedModel, *, length: int | None = None) -> dict[int, RotaryInfo]:
    """RotaryInfo of every cached attention layer, by index, for sequences of up to `length` tokens.

    Raises UnsupportedModel where the rotation is of no known kind.
    """
    windows, shared = sliding_windows(model), {}
    infos = {}
    for index, layer in attention_modules(model).items():
        module, layer_type = _rotary_module(model, layer), _layer_type(model, index)
        if module is None or _is_unrotated(model, layer):
            infos[index] = RotaryInfo("none", 0, torch.empty(0, dtype=torch.float32), 1.0, windows[index])
            continue
        key = (id(module), layer_type, type(layer))
        if key not in shared:
            shared[key] = _describe(layer, module, layer_type, length)
        infos[index] = RotaryInfo(*shared[key][:4], windows[index], shared[key][4])
    return infos


def valid_length(infos: dict[int, RotaryInfo]) -> int | None:
    """Longest sequence, in tokens, that all of `infos` hold for; None: any."""
    return min((info.valid_to for info in infos.values() if info.valid_to is not None), default=None)


def check_length(tokens: int, valid_to: int | None) -> None:
    """Raises UnsupportedModel for a sequence of more than `valid_to` tokens, see `valid_length`."""
    if valid_to is not None and tokens > valid_to:
        raise UnsupportedModel(
            f"a sequence of {tokens} tokens is too long for a quantised cache of this model: beyond {valid_to} tokens"
            " its rotary frequencies change with the length, which packed keys cannot follow;"
            f" keep prompt and answer within {valid_to} tokens, or use transformers' DynamicCache"
        )


def check_rotary(model: PreTrainedModel, infos: dict[int, RotaryInfo]) -> None:
    """Run one token at two positions and compare the un-rotated keys; two cheap forward passes.

    Raises UnsupportedModel naming the first layer where they differ. Models whose positions are
    added to the embedding (no layer rotates) have nothing to check.
    """
    if all(info.kind == "none" for info in infos.values()):
        return
    token, short = _loud_token(model), rotary(model)
    here, there = (_single_token_keys(model, token, position) for position in (0, 7))
    for index, info in infos.items():
        if short[index].valid_to is not None:  # the two passes are short, whatever infos are for
            info = replace(info, inv_freq=short[index].inv_freq, scaling=short[index].scaling)
        left, right = (unrotate_key(key[index], at, info) for key, at in ((here, 0), (there, 7)))
        tolerance = 16 * torch.finfo(here[index].dtype).eps * left.abs().max()
        if (left - right).abs().max() > tolerance:
            raise UnsupportedModel(
                f"layer {index} of model type {model.config.model_type!r} does not rotate its keys"
                f" by {info.kind!r} RoPE over {info.dims} channels as its rotary module says"
            )


def unrotate_key(key: torch.Tensor, position: int, info: RotaryInfo) -> torch.Tensor:
    """Cached key [..., D] at one position -> fp32 key before RoPE, in the model's channel order."""
    key = key.float()
    if info.kind == "none":
        return key
    angle = position * info.inv_freq.to(key.device)
    cos, sin = angle.cos() / info.scaling, angle.sin() / info.scaling
    return torch.cat([_turn(key[..., : info.dims], cos, -sin, info.kind), key[..., info.dims :]], dim=-1)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: str) -> torch.Tensor:
    """Turn every pair of x [..., dims] by the angle whose cos and sin [dims/2] are given."""
    axis = -2 if kind == "half" else -1
    pairs = x.unflatten(-1, (2, -1) if kind == "half" else (-1, 2))
    a, b = pairs.unbind(axis)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=axis).flatten(-2)


def _loud_token(model: PreTrainedModel) -> int:
    """A token of large embedding: padding tokens embed to zero and would prove nothing."""
    weight = model.get_input_embeddings().weight[:1024]
    return int(weight.detach().float().norm(dim=-1).argmax())


def _single_token_keys(model: PreTrainedModel, token: int, position: int) -> dict[int, torch.Tensor]:
    """Keys [1, H, 1, D] that each layer hands to its cache for one token at `position`."""
    cache, keys = DynamicCache(config=model.config), {}
    update = cache.update

    def record(key, value, layer_idx, *args, **kwargs):
        keys[layer_idx] = key
        return update(key, value, layer_idx, *args, **kwargs)

    cache.update = record
    ids = torch.tensor([[token]], device=model.device)
    with torch.no_grad():
        model(ids, position_ids=torch.full_like(ids, position), cache=cache, use_cache=True)
    return keys


def _describe(layer: nn.Module, module: nn.Module, layer_type: str | None, length: int | None) -> tuple:
    inv_freq, scaling, valid_to = _frequencies(module, layer_type, length)
    kind = _pairing(layer, module, layer_type)
    return kind, 2 * inv_freq.numel(), inv_freq, scaling, valid_to


def _rotary_module(model: PreTrainedModel, layer: nn.Module) -> nn.Module | None:
    """The module that makes cos and sin for this layer: its own, else the decoder's only one."""
    decoder = model.get_decoder()
    module = getattr(layer, "rotary_emb", None) or getattr(decoder, "rotary_emb", None)
    if module is not None and not any(name.endswith("inv_freq") for name, _ in module.named_buffers()):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} is not supported: {type(module).__name__} keeps no inv_freq"
        )
    return module


def _layer_type(model: PreTrainedModel, index: int) -> str | None:
    """The layer's type where the model has one rotary embedding per type (Gemma 3), else None."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    types = getattr(text_config(model), "layer_types", None)
    return types[index] if types and types[index] in parameters else None


def _is_unrotated(model: PreTrainedModel, layer: nn.Module) -> bool:
    rule = UNROTATED.get(text_config(model).model_type)
    return rule(layer) if rule else not getattr(layer, "use_rope", True)


def _frequencies(module: nn.Module, layer_type: str | None, length: int | None) -> tuple:
    """inv_freq fp32, gain, and the last position they hold for.

    `original_inv_freq` is what the module started with; the live buffer depends on the last pass.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    config, kind = module.config, module.rope_type
    parameters = config.rope_parameters
    if layer_type:
        kind, parameters = kind[layer_type], parameters[layer_type]
    inv_freq = getattr(module, f"{prefix}original_inv_freq", None)
    inv_freq = getattr(module, f"{prefix}inv_freq") if inv_freq is None else inv_freq
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    valid_to = {
        "dynamic": config.max_position_embeddings,
        "longrope": parameters.get("original_max_position_embeddings"),
    }.get(kind)
    if valid_to is not None and length is not None and length > valid_to:
        kwargs = {"layer_type": layer_type} if layer_type else {}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, inv_freq.device, seq_len=length, **kwargs)
        valid_to = None if kind == "longrope" else length
    return inv_freq.detach().float().clone(), float(scaling), valid_to


def _pairing(layer: nn.Module, module: nn.Module, layer_type: str | None) -> str:
    """Rotate a random key by the family's own function and see which pairing gives the same."""
    apply = getattr(sys.modules[type(layer).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise UnsupportedModel(f"{type(layer).__name__} has no apply_rotary_pos_emb to learn its RoPE from")
    probe = copy.deepcopy(module).float()
    inv_freq, scaling, _ = _frequencies(probe, layer_type, None)
    key = torch.randn(1, 1, 1, 2 * inv_freq.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    key = key.to(inv_freq.device)
    kwargs = {"layer_type": layer_type} if layer_type else {}
    at_one = torch.ones(1, 1, dtype=torch.long, device=key.device)
    cos, sin = probe.forward(key, at_one, **kwargs)  # not probe(...): hooks are copied too
    alone = list(inspect.signature(apply).parameters)[1] == "cos"
    theirs = apply(key, cos, sin) if alone else apply(key, key, cos, sin)[1]
    for kind in ("half", "interleaved"):
        ours = _turn(key, scaling * inv_freq.cos(), scaling * inv_freq.sin(), kind)
        if torch.allclose(ours, theirs, atol=1e-4):
            return kind
    raise UnsupportedModel(f"{type(layer).__name__} pairs its rotary channels in a way that is not known")
