"""What an attention kernel receives: the stored cache of one layer, as plain tensors.

B batch rows, H kv heads, D head dim, S sink tokens, N page slots of 32 tokens, R recent columns, T query tokens.

Rows advance on their own: row r owns the first page_counts[r] pages and the first sink_counts[r] sink tokens; the
rest of its capacity is undefined and must not be read. Recent columns are shared by all rows, so `recent_visible`
also hides what a row has already moved to its sink or pages, its padding, and the future. What has moved is in the
past of every query, so it is visible unless a mask (sliding window, custom) says otherwise in `moved_visible`.
"""

from typing import NamedTuple

import torch

from kvcalib.quant.page import PageLayout
from kvcalib.quant.rope import Rope
from kvcalib.quant.spec import Tables


class Packed(NamedTuple):
    """pages uint8 [B, capacity, layout.nbytes]; page_counts, sink_counts int64 [B]; sink_key, recent_key [B, H, S|R, D]
    post-RoPE in the model's channel order and dtype; recent_visible bool [B, T, R]; moved_visible bool
    [B, T, S + 32 * most pages of a row], or None: everything."""

    pages: torch.Tensor
    page_counts: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    sink_counts: torch.Tensor
    recent_key: torch.Tensor
    recent_value: torch.Tensor
    recent_visible: torch.Tensor
    moved_visible: torch.Tensor | None
    layout: PageLayout
    key_tables: Tables
    value_tables: Tables
    rope: Rope
