"""What a cache layer returns from `update` in place of keys and values: something that attends by itself."""

import torch

from kvcalib.errors import UnsupportedModel

HIDDEN = -9_000.0
"""What an additive mask holds for a hidden token, or less: -1e4, also where bfloat16 rounds it, is in use."""
_OF_TENSORS = {"transpose", "permute", "view", "reshape", "expand", "repeat_interleave", "contiguous", "float", "split"}


class Handle:
    """What `update` returns as key and as value: something that attends by itself."""

    def attend(self, module, query, mask, base, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query [B, Hq, T, D] -> [B, T, Hq, Dv] and, where `base` gave them, the weights.

        base(query, key, value, mask): the model's own attention.
        """
        raise NotImplementedError

    @property
    def shape(self):
        """What attention code of a model that is not attached asks first."""
        raise foreign()

    def __getattr__(self, name: str):
        """A sentence for a model that goes on with keys or values as if they were tensors."""
        if name in _OF_TENSORS:
            raise _unreadable(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _unreadable(function.__name__)


def _unreadable(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"this model computes with cached keys or values outside of its attention function ({name}), and a quantised"
        " cache has none to give; use DynamicCache"
    )


def foreign() -> UnsupportedModel:
    return UnsupportedModel("this CalibratedCache was made for another model; make one for this model")


class TorchHandle:
    """A handle that answers when a model itself calls scaled_dot_product_attention on it."""

    def __init__(self, handle: Handle, key: torch.Tensor, length: int):
        self.handle = handle
        self.shape = (*key.shape[:2], length, key.shape[3])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.scaled_dot_product_attention:
            raise UnsupportedModel(
                f"attention by {function.__name__} cannot read a quantised cache; load the model with"
                " attn_implementation='sdpa' and leave output_attentions out"
            )
        query, handle = args[:2]
        options = dict(kwargs)
        mask = options.pop("attn_mask")

        def base(query, key, value, mask):
            return function(query, key, value, attn_mask=mask, **options).transpose(1, 2), None

        output, _ = handle.handle.attend(None, query, mask, base, scaling=query.shape[-1] ** -0.5)
        return output.transpose(1, 2).contiguous()

    def transpose(self, *dims):
        raise UnsupportedModel("this model computes attention weights by itself; leave output_attentions out")
