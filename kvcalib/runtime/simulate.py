"""Teacher-forced simulation of a quantised cache: one pass over a whole window, batch of equal lengths, no padding.

Every query attends to exact and to quantised keys and values at once, and `stale[i, j]` says which of the two query
i sees of token j:

    ideal      chunk=None   j is past the sink and at least `window` tokens old (window 0: every token, its own too);
                            this is what papers measure
    stepwise   chunk=C      j lies in a page that was complete when the chunk of i began, as in a real cache that is
                            fed C tokens at a time

A text that grows over a change of its rotary frequencies is refused, as the real cache refuses it (frequencies.py).
The quantised tensors are read back from the pages that the cache would hold, so the stepwise simulation and the real
cache agree to rounding.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvcalib.artifact.schema import Artifact, LayerTables
from kvcalib.kernels import dispatch
from kvcalib.quant.codec import dequantise
from kvcalib.quant.page import PageLayout, read_page
from kvcalib.quant.rope import Rope, to_post_rope
from kvcalib.quant.spec import PAGE, CacheSpec
from kvcalib.runtime.attention import Attachment, attach
from kvcalib.runtime.frequencies import Frequencies
from kvcalib.runtime.handles import HIDDEN, Handle
from kvcalib.runtime.ropes import LayerRopes, layer_ropes

_QUERIES = 64
"""Queries that are attended at a time."""


class SimulatedCache(Cache):
    """Use once: model(ids, cache=SimulatedCache(artifact, model)) gives the logits of the quantised cache."""

    def __init__(self, artifact: Artifact, model, chunk: int | None = None):
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        attachment = attach(model, self)
        for index, ropes in layer_ropes(model, artifact.layers).items():
            layers[index] = SimulatedLayer(artifact.spec, artifact.layers[index], ropes, attachment, chunk)
        super().__init__(layers=layers)


class SimulatedLayer(CacheLayerMixin, Handle):
    """Keeps nothing: it answers one call of `attend` for the tokens of one call of `update`."""

    def __init__(
        self,
        spec: CacheSpec,
        tables: LayerTables,
        ropes: LayerRopes,
        attachment: Attachment,
        chunk: int | None,
    ):
        super().__init__()
        self.spec, self.tables = spec, tables
        self.frequencies = Frequencies(ropes.rope, ropes.valid_to, ropes.long)
        self.attachment, self.chunk = attachment, chunk
        self.is_sliding = ropes.sliding_window is not None

    @property
    def rope(self) -> Rope:
        return self.frequencies.rope

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(self, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        self.key, self.value = key, value
        positions = self.attachment.positions()
        if positions is None:
            positions = torch.arange(key.shape[2])[None]
        self.positions = positions.to(key.device).expand(key.shape[0], -1)
        self.frequencies = self.frequencies.of_text(self.positions[:, : self.chunk])
        handle = self.attachment.handle(self, key, key.shape[2])
        return handle, handle

    def attend(self, module, query, mask, base, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        stale = stale_pairs(query.shape[2], self.spec, self.chunk, query.device)
        if not (self.spec.quantised and stale.any()):
            return base(query, self.key, self.value, mask)
        key, value = self._quantised()
        settled = stale | ~_past(stale)
        settled[:, : self.spec.sink] = True  # exact in both
        if bool(settled.all()):
            return base(query, key, value, mask)
        return _attend_mixed(query, (self.key, key), (self.value, value), stale, mask, options), None

    def _quantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [B, H, T, D] as they come back from pages; the sink stays exact."""
        if self.spec.key.rope == "pre":
            self.frequencies.check(self.positions)
        rows = [self._row(*row) for row in zip(self.key, self.value, self.positions, strict=True)]
        key, value = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return key, value

    def _row(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor):
        """One row, [H, T, D] each: packed by the kernel that packs a real cache, and read back."""
        sink, tokens = self.spec.sink, key.shape[1]
        layout = PageLayout(self.spec, self.tables.key, self.tables.value)
        slots = torch.arange(sink, sink + -(-(tokens - sink) // PAGE) * PAGE, device=key.device)
        columns = slots.clamp_max(tokens - 1)  # copies of the last token fill the last page
        counts = (tokens - slots[::PAGE]).clamp_max(PAGE)
        tables = self.tables.key, self.tables.value, self.rope
        pages = dispatch.pack(key, value, columns, positions[columns], counts, layout, *tables)
        coded_key, coded_value, _ = read_page(pages, layout)
        keys = dequantise(coded_key, self.spec.key, self.tables.key).flatten(0, 1)[: tokens - sink]
        values = dequantise(coded_value, self.spec.value, self.tables.value).flatten(0, 1)[: tokens - sink]
        keys = to_post_rope(keys, positions[sink:], self.rope) if self.spec.key.rope == "pre" else keys
        keys = keys[..., self.rope.order.argsort()]
        return tuple(
            torch.cat([exact[:, :sink], coded.transpose(0, 1).to(exact.dtype)], 1)
            for exact, coded in ((key, keys), (value, values))
        )


def stale_pairs(tokens: int, spec: CacheSpec, chunk: int | None, device=None) -> torch.Tensor:
    """bool [T, T]: query i reads token j from its page (only j <= i is meaningful)."""
    index = torch.arange(tokens, device=device)
    past_sink = index >= spec.sink
    if chunk is None:
        return past_sink & (index[:, None] - index >= spec.window)
    page_end = spec.sink + (torch.div(index - spec.sink, PAGE, rounding_mode="floor") + 1) * PAGE
    chunk_start = index // chunk * chunk
    return past_sink & (page_end + spec.window <= chunk_start[:, None])


def _past(square: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(square).tril()


def _attend_mixed(query, keys, values, stale, mask, options) -> torch.Tensor:
    """Softmax over scores that take each key exact or quantised; values likewise. fp32 inside.

    Goes through the queries in blocks, each up to its last past token: a square of all pairs would be slow and large.
    """
    batch, query_heads, tokens, dim = query.shape
    grouped = query.float().view(batch, keys[0].shape[1], -1, tokens, dim)
    keys = [key.float().transpose(-1, -2).unsqueeze(2) for key in keys]
    values = [value.float().unsqueeze(2) for value in values]
    visible = _past(stale) if mask is None else mask[:, :, None]
    hidden = ~(visible if visible.dtype == torch.bool else visible > HIDDEN)
    blocks = []
    for start in range(0, tokens, _QUERIES):
        rows, past = slice(start, start + _QUERIES), slice(0, start + _QUERIES)
        block_keys, block_values = [key[..., past] for key in keys], [value[..., past, :] for value in values]
        block = grouped[..., rows, :], block_keys, block_values, stale[rows, past], hidden[..., rows, past]
        blocks.append(_attend_block(*block, options))
    output = torch.cat(blocks, dim=-2)
    return output.view(batch, query_heads, tokens, -1).transpose(1, 2).to(query.dtype)


def _attend_block(query, keys, values, stale, hidden, options) -> torch.Tensor:
    """query [B, H, G, t, D] -> [B, H, G, t, Dv]; keys, values: (exact, quantised) of n tokens; stale [t, n]."""
    scores = torch.where(stale, query @ keys[1], query @ keys[0]) * options["scaling"]
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return weights.masked_fill(~stale, 0) @ values[1] + weights.masked_fill(stale, 0) @ values[0]
