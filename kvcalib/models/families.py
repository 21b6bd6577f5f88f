"""Which layers of a model keep keys and values, their shapes, and which models are refused.

Nothing here is a list of supported models. A model is accepted when its attention layers

    1. hand keys and values to `Cache.update`, and
    2. attend through transformers' ALL_ATTENTION_FUNCTIONS, so that a registered function can
       take over, or have a row in TORCH_ATTENTION: theirs is torch's scaled_dot_product_attention,

which is read from the code of the layer's `forward`, because the class flag
`_supports_attention_backend` is missing on models that do both (StableLM, Qwen3-Next). How a layer
caches is asked from transformers' own `DynamicCache(config=...)`: full and sliding attention are
quantised, layers with a recurrent or convolution state alone are left alone, and everything else is
refused by name. Models that a look at the layers cannot refuse have a row in REFUSED.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvcalib.errors import UnsupportedModel

REFUSED = {
    "bloom": "its attention adds ALiBi biases, which a packed cache does not carry",
    "mpt": "its attention adds ALiBi biases, which a packed cache does not carry",
    "diffllama": "its attention takes the values apart between cache and attention function",
}

TORCH_ATTENTION = ("falcon",)
"""Model types that hand what their cache returns straight to torch's scaled_dot_product_attention."""

QUANTISED = ("DynamicLayer", "DynamicSlidingWindowLayer")
LEFT_ALONE = ("LinearAttentionLayer",)


@dataclass(frozen=True)
class LayerShape:
    """Per layer: `heads` K,V heads, channels of a key and of a value head, query heads."""

    heads: int
    key_dim: int
    value_dim: int
    query_heads: int


def text_config(model: PreTrainedModel):
    """The config of the language model, also inside a multimodal one."""
    return model.config.get_text_config(decoder=True)


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was made for, in tokens; None where the config does not say."""
    return getattr(text_config(model), "max_position_embeddings", None)


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention module of every layer whose keys and values are cached, by layer index.

    Raises UnsupportedModel, naming the layer and the reason.
    """
    _refuse_model(model)
    modules = {module.layer_idx: module for module in _caching_modules(model)}
    kinds = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    for index, kind in enumerate(kinds):
        if kind not in QUANTISED + LEFT_ALONE:
            raise _refusal(model, f"layer {index} keeps a {kind}, which is neither attention nor state alone")
        if kind in QUANTISED and index not in modules:
            raise _refusal(model, f"layer {index} hands no keys and values to a transformers cache")
    for index, module in modules.items():
        _refuse_layer(model, index, module)
    if not modules:
        raise _refusal(model, "none of its layers caches keys and values")
    return dict(sorted(modules.items()))


def attends_by_torch(model: PreTrainedModel) -> bool:
    """Whether attention is a call of torch's own function, which no registered one can replace."""
    return text_config(model).model_type in TORCH_ATTENTION


def layer_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Shape of the cached keys and values of every attention layer, by layer index."""
    return {index: _shape(model, module) for index, module in attention_modules(model).items()}


def sliding_windows(model: PreTrainedModel) -> list[int | None]:
    """Tokens that each layer of the model looks back on, None for all of them."""
    layers = DynamicCache(config=model.config).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _shape(model: PreTrainedModel, module: nn.Module) -> LayerShape:
    config = text_config(model)
    dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    heads = getattr(module, "kv_heads", None) or _fused_heads(config, module, dim)  # kv_heads: GPTBigCode
    value_dim, query_heads = dim, None
    if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
        heads = module.k_proj.out_features // dim
        value_dim = module.v_proj.out_features // heads
    if hasattr(module, "new_decoder_architecture"):  # Falcon: one key head, or one per query head
        query_heads = module.num_heads
        heads = 1 if module.multi_query and not module.new_decoder_architecture else query_heads
    return LayerShape(heads, dim, value_dim, query_heads or heads * getattr(module, "num_key_value_groups", 1))


def _fused_heads(config, module: nn.Module, dim: int) -> int:
    """Key heads by the config, unless one projection of all heads says that the family does not read that setting."""
    said, all_heads = getattr(config, "num_key_value_heads", None), config.num_attention_heads
    sizes = [getattr(part, "out_features", getattr(part, "nf", None)) for part in module.children()]
    return all_heads if said is None or dim * 3 * all_heads in sizes else said


def _caching_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Modules with a layer index whose forward calls `update`, the verb of a K,V cache."""
    found = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    return [m for m in found if "update" in _names_used(m)]


def _names_used(module: nn.Module) -> tuple[str, ...]:
    """Global and attribute names in the code of the module's forward, decorators removed."""
    return inspect.unwrap(type(module).forward).__code__.co_names


def _refuse_model(model: PreTrainedModel) -> None:
    config = text_config(model)
    if model.config.is_encoder_decoder:
        raise _refusal(model, "it is an encoder-decoder: its cross-attention cache does not grow with the text")
    if getattr(config, "add_cross_attention", False):
        raise _refusal(model, "it has cross-attention layers")
    if config.model_type in REFUSED:
        raise _refusal(model, REFUSED[config.model_type])
    if getattr(config, "alibi", False):
        raise _refusal(model, "its attention adds ALiBi biases (config.alibi)")
    if "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise _refusal(model, "some of its layers read the keys and values of another layer")


def _refuse_layer(model: PreTrainedModel, index: int, module: nn.Module) -> None:
    name = type(module).__name__
    if "ALL_ATTENTION_FUNCTIONS" not in _names_used(module) and not attends_by_torch(model):
        raise _refusal(
            model,
            f"layer {index} ({name}) computes attention itself, not through ALL_ATTENTION_FUNCTIONS",
        )
    for part in ("k_proj", "v_proj"):
        if not hasattr(getattr(module, part, None), "out_features") and hasattr(module, part):
            kind = type(getattr(module, part)).__name__
            raise _refusal(
                model, f"{part} of layer {index} is a {kind} of no known size; merge adapters into the weights"
            )
    if hasattr(module, "kv_lora_rank"):
        raise _refusal(model, f"layer {index} ({name}) caches a compressed latent (MLA), not keys and values")
    if getattr(module, "sinks", None) is not None:
        raise _refusal(model, f"layer {index} ({name}) adds a learned sink to its scores")
    if not getattr(module, "is_causal", True):
        raise _refusal(model, f"layer {index} ({name}) is not causal")


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"model type {text_config(model).model_type!r} is not supported: {reason}")
