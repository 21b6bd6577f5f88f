"""The meaning of attention over a packed cache, and of packing, in plain torch: fast kernels are spellings of this.

Attention dequantises all pages, rotates the keys to their positions and runs one softmax over sink | pages | recent, in
fp32. It materialises what a fast kernel must not.
"""

import torch

from kvcalib.kernels.packed import Packed
from kvcalib.quant.codec import dequantise, quantise
from kvcalib.quant.page import PageLayout, read_page, write_page
from kvcalib.quant.rope import Rope, to_post_rope, to_pre_rope
from kvcalib.quant.spec import PAGE, Tables


def attend(query: torch.Tensor, packed: Packed, *, scale: float, softcap: float | None = None) -> torch.Tensor:
    """query [B, Hq, T, D] post-RoPE, model channel order -> attention output [B, T, Hq, Dv] in query's dtype.

    Rows of queries that see nothing (padding) come out as zeros.
    """
    batch, query_heads, tokens, dim = query.shape
    key, value, visible = _gather(packed, tokens)
    kv_heads = key.shape[1]
    grouped = query[..., packed.rope.order].float().view(batch, kv_heads, -1, tokens, dim)
    scores = grouped @ key.transpose(-1, -2).unsqueeze(2) * scale  # [B, H, G, T, N]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    weights = weights.masked_fill(hidden, 0.0)  # a query that sees nothing: softmax gave NaN
    output = weights @ value.unsqueeze(2)
    return output.view(batch, query_heads, tokens, -1).transpose(1, 2).to(query.dtype)


def pack(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    layout: PageLayout,
    key_tables: Tables,
    value_tables: Tables,
    rope: Rope,
) -> torch.Tensor:
    """Keys post-RoPE in the model's channel order, values [H, n, D] -> pages uint8 [P, nbytes].

    columns, positions int64 [32 * P]: which of the n tokens fill the pages, and where they are in the text; counts
    [P]: how many of the 32 are in use.
    """
    key = key.index_select(1, columns).transpose(0, 1)  # [T, H, D]
    value = value.index_select(1, columns).transpose(0, 1)
    key = to_pre_rope(key, positions, rope) if layout.spec.key.rope == "pre" else key[..., rope.order].float()
    coded_key = quantise(key.unflatten(0, (-1, PAGE)), layout.spec.key, key_tables)
    coded_value = quantise(value.unflatten(0, (-1, PAGE)), layout.spec.value, value_tables)
    return write_page(coded_key, coded_value, positions[::PAGE], layout, counts.int())


def _gather(packed: Packed, tokens: int):
    """Keys [B, H, N, D] (canonical channels), values [B, H, N, Dv], visible [B, T, N]."""
    order = packed.rope.order
    page_key, page_value, page_stored = _unpack_pages(packed)
    key = torch.cat([packed.sink_key[..., order].float(), page_key, packed.recent_key[..., order].float()], dim=2)
    value = torch.cat([packed.sink_value.float(), page_value, packed.recent_value.float()], dim=2)
    sink_stored = torch.arange(packed.sink_key.shape[2], device=key.device) < packed.sink_counts[:, None]
    moved = torch.cat([sink_stored, page_stored], dim=1)[:, None, :].expand(-1, tokens, -1)
    if packed.moved_visible is not None:
        moved = moved & packed.moved_visible
    return key, value, torch.cat([moved, packed.recent_visible], dim=-1)


def _unpack_pages(packed: Packed):
    """Pages in use -> keys after RoPE, values [B, H, N, D], stored [B, N]."""
    layout = packed.layout
    count = int(packed.page_counts.max())
    row_uses = torch.arange(count, device=packed.pages.device) < packed.page_counts[:, None]
    pages = packed.pages[:, :count]
    if not row_uses.all():
        pages = pages.masked_fill(~row_uses[..., None], 0)  # capacity that a row does not use is undefined memory
    coded_key, coded_value, first = read_page(pages, layout)
    key = dequantise(coded_key, layout.spec.key, packed.key_tables)
    if layout.spec.key.rope == "pre":
        positions = first[..., None].long() + torch.arange(PAGE, device=pages.device)
        key = to_post_rope(key, positions, packed.rope)
    value = dequantise(coded_value, layout.spec.value, packed.value_tables)
    stored = torch.arange(PAGE, device=pages.device) < layout.read(pages, "tokens")
    return _heads_first(key), _heads_first(value), stored.flatten(1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, pages, P, H, D] -> [B, H, tokens, D]."""
    return x.flatten(1, 2).transpose(1, 2)
