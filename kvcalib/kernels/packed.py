"""What an attention kernel receives: the stored cache of one layer, as plain tensors.

B batch rows, H kv heads, D head dim, S sink tokens, R recent columns, T query tokens.

Rows advance on their own: row r owns the first page_counts[r] pages and the first sink_counts[r] sink tokens; the
rest of its capacity is undefined and must not be read. Recent columns are shared by all rows, so `recent_visible`
also hides what a row has already moved to its sink or pages, its padding, and the future.
"""

from typing import NamedTuple

import torch

from kvcalib.quant.page import PageLayout
from kvcalib.quant.rope import Rope
from kvcalib.quant.spec import Tables


class Packed(NamedTuple):
    """pages uint8 [B, capacity, layout.nbytes]; page_counts, sink_counts int64 [B]; sink_key, recent_key [B, H, S|R, D]
    post-RoPE in the model's channel order and dtype; sink_positions int64 [B, S]; query_positions int64 [B, T];
    recent_visible bool [B, T, R]."""

    pages: torch.Tensor
    page_counts: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    sink_counts: torch.Tensor
    sink_positions: torch.Tensor
    recent_key: torch.Tensor
    recent_value: torch.Tensor
    recent_visible: torch.Tensor
    query_positions: torch.Tensor
    layout: PageLayout
    key_tables: Tables
    value_tables: Tables
    rope: Rope
