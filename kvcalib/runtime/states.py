"""The states of linear-attention layers that stand beside ours: transformers' own, which models change in place."""

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcalib.runtime.modes import undisturbed

_TENSORS = ("conv_states", "recurrent_states")
_FIELDS = (
    *_TENSORS,
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


class States:
    """layers: of a cache, of any kind."""

    def __init__(self, layers: list):
        self._layers = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def tensors(self) -> list[torch.Tensor]:
        """Every state that there is."""
        return [
            state
            for layer in self._layers
            for name in _TENSORS
            for state in getattr(layer, name).values()
            if state is not None
        ]

    def state(self) -> list[dict]:
        """Copies, of the size of the states, for as long as a pass lasts: they do not grow with the text."""
        with undisturbed():
            return [{name: _copied(getattr(layer, name)) for name in _FIELDS} for layer in self._layers]

    def restore(self, state: list[dict]) -> None:
        for layer, fields in zip(self._layers, state, strict=True):
            for name, field in fields.items():
                setattr(layer, name, field)


def _copied(field: dict) -> dict:
    return {index: each.clone() if isinstance(each, torch.Tensor) else each for index, each in field.items()}
