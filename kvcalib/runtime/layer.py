"""One layer of a CalibratedCache: transformers' cache-layer contract over a `LayerStore`.

`update` stores the new tokens and returns the layer itself; the attention function then calls `attend`:

    nothing packed yet    the model's own attention over the recent buffer: the very numbers of DynamicCache
    otherwise             the packed kernel over sink | pages | recent

New tokens attend to each other exactly. Pages are written after the attention of the step, so what a step sees
does not depend on its own quantisation.
"""

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcalib.errors import UnsupportedModel
from kvcalib.kernels import dispatch
from kvcalib.quant.rope import Rope
from kvcalib.quant.spec import CacheSpec, Tables
from kvcalib.runtime.attention import Attachment, Handle
from kvcalib.runtime.store import LayerStore


class CalibratedLayer(CacheLayerMixin, Handle):
    is_croppable = True

    def __init__(
        self,
        spec: CacheSpec,
        key_tables: Tables,
        value_tables: Tables,
        rope: Rope,
        attachment: Attachment,
        sliding_window: int | None = None,
    ):
        super().__init__()
        self.store = LayerStore(spec, key_tables, value_tables, rope)
        self.attachment = attachment
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        """key_states [B, H, T, D] after RoPE, value_states [B, H, T, Dv]."""
        self.lazy_initialization(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        self.store.append(key_states.detach(), value_states.detach(), self._positions(batch, tokens, key_states.device))
        return self, self

    def _positions(self, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
        positions = self.attachment.positions()
        if positions is None:  # a model without rotary embedding: only the order matters
            positions = torch.arange(self.store.length, self.store.length + tokens)[None]
        assert positions.shape[-1] == tokens, f"{tokens} keys for positions {tuple(positions.shape)}"
        return positions.to(device).expand(batch, tokens)

    def attend(self, module, query, mask, base, **options) -> torch.Tensor:
        """Output [B, T, Hq, Dv]; see Handle."""
        tokens = query.shape[2]
        allowed = _allowed(mask, query, self.store.length)
        if mask is not None:
            self.store.drop_padding(allowed[..., -tokens:].any(1))
        if self.store.has_pages:
            output = self._attend_packed(query, allowed, options)
        else:
            output, _ = base(query, *self.store.recent(), mask)
        self.store.flush()
        return output

    def _attend_packed(self, query: torch.Tensor, allowed: torch.Tensor, options: dict) -> torch.Tensor:
        for name in ("position_bias", "s_aux"):
            if options.get(name) is not None:
                raise UnsupportedModel(
                    f"attention with {name} over a quantised cache is not supported; use quant=identity"
                )
        packed = self.store.packed(allowed[..., -self.store.recent_length :])
        return dispatch.attend(
            query,
            packed,
            scale=options["scaling"],
            softcap=options.get("softcap"),
            sliding_window=self.sliding_window,
        )

    def get_seq_length(self) -> int:
        return self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns ever seen: a mask column is a token column, whatever has been packed or dropped."""
        return self.store.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to drop as a negative number")
        if self.store.layout is not None and tokens_to_remove < 0:
            self.store.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.store.select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.store.layout is not None:
            self.store.select_rows(torch.arange(self.store.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store.layout is not None:
            self.store.select_rows(torch.arange(self.store.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        self.store.reset()
        self.is_initialized = False

    def offload(self) -> None:
        raise UnsupportedModel("a CalibratedCache is not offloaded: it is small enough to stay; use offloading=False")

    prefetch = offload


def _allowed(mask: torch.Tensor | None, query: torch.Tensor, length: int) -> torch.Tensor:
    """Mask of transformers (None, bool, or additive) -> bool [B, T, length]: may query t see column j."""
    batch, _, tokens, _ = query.shape
    if mask is None:
        columns = torch.arange(length, device=query.device)
        return (columns <= columns[length - tokens :, None]).expand(batch, -1, -1)
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return visible[:, 0, :, :length].expand(batch, -1, -1)
