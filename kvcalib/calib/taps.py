"""Reading keys and values where the model hands them to its cache.

Every attention layer calls `cache.update(key, value, layer)` and attends to what comes back. A
cache whose `update` is ours therefore sees exactly what run time will store, whatever the family
does before (bias, k_norm, fused projections, rotary kind), with no hook and no module name. Keys
arrive after rotary embedding and are turned back in float32 (`quant.rope`).

Legend: B batch (always 1 here), H kv heads, T tokens, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.models.rotary import RotaryInfo
from kvcalib.quant.rope import Rope, make_rope

OnKV = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Progress = Callable[[Iterable, int, str], Iterable]
Rotary = dict[int, RotaryInfo]


class CaptureCache(DynamicCache):
    """Keeps nothing: hands (layer, key [B, H, T, D] after rotary, value) to `on_kv` and returns
    what that returns. Good for one forward pass without past tokens.
    """

    def __init__(self, config, on_kv: OnKV):
        super().__init__(config=config)
        self._on_kv = on_kv

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self._on_kv(layer_idx, key_states, value_states)


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, no parameter gradients, no checkpointing; everything as before afterwards.

    Without it dropout would randomise, weight gradients double the memory, and checkpointing
    run every layer (and every `update`) twice.
    """
    modules = [(module, module.training) for module in model.modules()]
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    try:
        model.eval()
        for parameter, _ in parameters:
            parameter.requires_grad_(False)
        for module in checkpointed:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True
        for parameter, wanted in parameters:
            parameter.requires_grad_(wanted)
        for module, training in modules:
            module.training = training


def rope_of(info: RotaryInfo, head_dim: int) -> Rope:
    """Canonical rotation of a layer."""
    return make_rope(head_dim, info.kind, info.inv_freq, info.scaling)


def check_length(rotary: Rotary, length: int) -> None:
    """Raises ConfigError for windows longer than the rotary frequencies hold."""
    limits = [info.valid_to for info in rotary.values() if info.valid_to is not None]
    if limits and length > min(limits):
        raise ConfigError(
            f"data.length={length}: this model changes its rotary frequencies beyond {min(limits)}"
            f" tokens; use data.length={min(limits)} or less"
        )


def run(model: PreTrainedModel, ids: torch.Tensor, on_kv: OnKV, rotary: Rotary, *, head: bool):
    """Output of one forward pass over one window, ids [T]; `head`: compute logits too.

    Raises UnsupportedModel naming the layers of `rotary` that handed nothing to the cache.
    """
    seen = set()

    def watch(layer: int, key: torch.Tensor, value: torch.Tensor):
        assert layer not in seen, f"layer {layer} updated its cache twice in one pass"
        seen.add(layer)
        return on_kv(layer, key, value)

    cache = CaptureCache(model.config, watch)
    body = model if head else model.base_model
    output = body(input_ids=ids[None].to(model.device), cache=cache, use_cache=True)
    missing = [layer for layer in rotary if layer not in seen]
    if missing:
        raise UnsupportedModel(
            f"layers {missing} of {type(model).__name__} never handed keys and values to the cache"
            " and so cannot be calibrated; their attention must call cache.update"
        )
    return output


def by_token(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D]."""
    assert x.shape[0] == 1, f"one window at a time, got batch {x.shape[0]}"
    return x[0].transpose(0, 1)


def progress_bar(items: Iterable, total: int, desc: str) -> Iterable:
    """Default `progress`: rate and time left on stderr."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=desc)
