"""One layer of a CalibratedCache: transformers' cache-layer contract over a `LayerStore`.

`update` stores the new tokens and returns the layer itself; the attention function then calls `attend`:

    nothing packed yet    the model's own attention over the recent buffer: the very numbers of DynamicCache
    otherwise             the packed kernel over sink | pages | recent

New tokens attend to each other exactly. Pages are written after the attention of the step, so what a step sees
does not depend on its own quantisation.
"""

import logging
from functools import cache
from operator import index

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.kernels import dispatch
from kvcalib.quant.rope import Rope
from kvcalib.quant.spec import CacheSpec, Tables
from kvcalib.runtime.attention import Attachment
from kvcalib.runtime.handles import HIDDEN, Handle
from kvcalib.runtime.modes import plain, undisturbed
from kvcalib.runtime.store import LayerStore
from kvcalib.runtime.undo import Undo

logger = logging.getLogger(__name__)


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
        valid_to: int | None = None,
        long_rope: Rope | None = None,
    ):
        super().__init__()
        self.store = LayerStore(spec, key_tables, value_tables, rope, sliding_window, valid_to, long_rope)
        self.attachment = attachment
        self.is_sliding = sliding_window is not None
        self.undo = Undo(self.store, attachment)
        self._owed = []  # keys and values of this call that ask for a gradient

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        """key_states [B, H, T, D] after RoPE, value_states [B, H, T, Dv]."""
        graded = (key_states, value_states) if torch.is_grad_enabled() else ()
        self._owed = [states for states in graded if states.requires_grad]
        self.attachment.insist()
        batch, _, tokens, _ = key_states.shape
        self.undo.begin()
        positions = self._positions(batch, tokens, key_states.device)
        self.lazy_initialization(key_states, value_states)
        with undisturbed():
            self.store.append(key_states, value_states, positions)
        handle = self.attachment.handle(self, key_states, self.store.length)
        return handle, handle

    def _positions(self, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
        positions = self.attachment.positions()
        if positions is None:  # a model without rotary embedding: only the order matters
            return self.store.next_positions(batch, tokens).to(device)
        return _whole(positions, self.store.spec).to(device).expand(batch, tokens)

    def attend(self, module, query, mask, base, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [B, T, Hq, Dv] and weights; see Handle."""
        tokens = query.shape[2]
        allowed = None if mask is None else _allowed(mask, query.shape[0], tokens, self.store.length)
        if allowed is not None or self.store.real is not None:
            with undisturbed():
                self._note_padding(allowed, tokens)
        if self.store.has_moved:
            output, weights = self._attend_packed(module, query, allowed, options), None
        else:
            output, weights = self._attend_recent(query, mask, base)
        if self.store.may_flush:
            with undisturbed():
                self.store.flush()
        return self._without_gradient(output, query), weights

    def _without_gradient(self, output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        owed, self._owed = self._owed, []
        if not torch.is_grad_enabled() or not (owed or query.requires_grad):
            return output
        _no_gradient(logger)
        return _NoGradient.apply(output, query, *owed)

    def _note_padding(self, allowed: torch.Tensor | None, tokens: int) -> None:
        """Which of the new columns are padding, and whether the mask shows any that was."""
        if allowed is not None:
            self.store.drop_padding(allowed[..., self.store.length - tokens :].any(1))
        self.store.check_hidden(allowed, tokens)

    def _attend_recent(self, query: torch.Tensor, mask: torch.Tensor | None, base) -> tuple:
        """Nothing is packed; columns that were padding in every row may be gone from the front of the buffer."""
        gone = self.store.length - self.store.recent_length
        output, weights = base(query, *self.store.recent(), mask if mask is None or not gone else mask[..., gone:])
        return output, weights if weights is None or not gone else pad(weights, (gone, 0))

    def _attend_packed(self, module, query: torch.Tensor, allowed: torch.Tensor | None, options: dict) -> torch.Tensor:
        wanted = getattr(getattr(module, "config", None), "output_attentions", False)
        if options.get("output_attentions", wanted):
            raise UnsupportedModel(
                "a quantised cache gives no attention weights; leave output_attentions out, or use quant=identity"
            )
        if options.get("dropout"):
            raise UnsupportedModel("attention dropout cannot be applied to a quantised cache; call model.eval()")
        for name in ("position_bias", "s_aux"):
            if options.get(name) is not None:
                raise UnsupportedModel(f"attention with {name} cannot read a quantised cache; use quant=identity")
        packed = self.store.packed(allowed, query.shape[2])
        with plain():
            return dispatch.attend(query, packed, scale=options["scaling"], softcap=options.get("softcap"))

    def settle(self) -> None:
        """As `Undo.settle`."""
        self.undo.settle()
        self._owed = []

    def get_seq_length(self) -> int:
        before = self.undo.before
        return self.store.length if before is None else before["length"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns ever seen: a mask column is a token column, whatever has been packed or dropped."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        try:
            count = -index(tokens_to_remove)  # a plain int: a count that is a tensor would be changed in place
        except TypeError as error:
            raise ValueError(f"crop({tokens_to_remove!r}): the number of tokens is an integer") from error
        if count < 0:
            raise ValueError(f"crop({-count}): pass the number of tokens to drop as a negative number")
        self.settle()
        if self.store.layout is not None and count:
            with undisturbed():
                self.store.crop(count)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.settle()
        with undisturbed():
            self.store.select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.store.layout is not None:
            rows = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            self.reorder_cache(torch.arange(self.store.batch, device="cpu")[rows].view(-1))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store.layout is not None:
            self.reorder_cache(torch.arange(self.store.batch, device="cpu").repeat_interleave(repeats))

    def reset(self) -> None:
        self.store.reset()
        self.undo.commit()
        self.is_initialized = False

    def offload(self) -> None:
        raise UnsupportedModel("a CalibratedCache is not offloaded: it is small enough to stay; use offloading=False")

    prefetch = offload


class _NoGradient(torch.autograd.Function):
    """The output as it is, and a sentence in place of a gradient that would lack what keys and values owe."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedModel(
            "a CalibratedCache carries no gradient: call the model under torch.no_grad(), or train with another cache"
        )


def _whole(positions: torch.Tensor, spec: CacheSpec) -> torch.Tensor:
    """As int64. Raises ConfigError for fractions that would be lost: a page keeps where it begins, in whole tokens."""
    whole = positions.long()
    if positions.is_floating_point() and spec.quantised and (whole != positions).any():
        raise ConfigError(
            "position_ids are fractions, and a quantised cache keeps whole ones: pass 0, 1, 2, ... and scale the"
            " frequencies of the model instead (rope_parameters with rope_type linear)"
        )
    return whole


def _allowed(mask: torch.Tensor, batch: int, tokens: int, length: int) -> torch.Tensor:
    """Mask of transformers, bool or additive [B or 1, 1, T, columns] -> bool [B, T, length]: may query t see column j.

    Raises ConfigError for one of another shape, UnsupportedModel where it differs between heads or adds a bias.
    """
    rows, _, queries, columns = mask.shape if mask.dim() == 4 else (0, 0, 0, 0)
    if rows not in (1, batch) or queries != tokens or columns < length:
        raise ConfigError(
            f"an attention mask of shape {tuple(mask.shape)} does not fit {batch} rows of {tokens} new tokens and"
            f" {length} in all: pass attention_mask [{batch}, {length}], or [{batch}, 1, {tokens}, {length}]"
        )
    if mask.shape[1] != 1:
        raise UnsupportedModel(f"an attention mask per head {tuple(mask.shape)} cannot be applied to a quantised cache")
    visible = mask
    if mask.dtype != torch.bool:
        visible = mask > HIDDEN
        if mask.masked_fill(~visible, 0).count_nonzero():
            raise UnsupportedModel(
                "an attention mask that adds a bias cannot be applied to a quantised cache: pass a bool mask, or 0 and"
                " torch.finfo(dtype).min"
            )
    return visible[:, 0, :, :length].expand(batch, -1, -1)


@cache
def _no_gradient(log: logging.Logger) -> None:
    """Says it once."""
    log.warning("a CalibratedCache carries no gradient; call the model under torch.no_grad()")
