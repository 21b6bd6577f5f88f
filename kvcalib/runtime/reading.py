"""What attention reads of a `LayerStore`: its tensors as they are, and which of their slots each query may see."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvcalib.kernels.packed import Packed
from kvcalib.quant.spec import PAGE

if TYPE_CHECKING:
    from kvcalib.runtime.store import LayerStore


def packed(store: LayerStore, allowed: torch.Tensor | None, tokens: int) -> Packed:
    """allowed bool [B, T, length]: may query t see column j; None: the past and itself. tokens = T."""
    key, value = store.recent()
    device = key.device
    if allowed is None and tokens == 1:
        visible = None  # a single query comes after everything that is there
    elif allowed is None:
        ahead = torch.arange(store.recent_length, device=device) - (store.recent_length - tokens)
        visible = (ahead <= torch.arange(tokens, device=device)[:, None]).expand(store.batch, -1, -1)
    else:
        visible = allowed[..., store.length - store.recent_length :]
    counts = _count_tensors(tuple(store.page_counts), tuple(store.sink_counts), device)
    return Packed(
        pages=store.pages,
        page_counts=counts[0],
        sink_key=store.sink_key,
        sink_value=store.sink_value,
        sink_counts=counts[1],
        recent_key=key,
        recent_value=value,
        recent_visible=store.waiting[:, None, :] if visible is None else visible & store.waiting[:, None, :],
        moved_visible=None if allowed is None else _moved_visible(store, allowed),
        layout=store.layout,
        key_tables=store.key_tables,
        value_tables=store.value_tables,
        rope=store.rope,
    )


def _moved_visible(store: LayerStore, allowed: torch.Tensor) -> torch.Tensor:
    """What the mask says of every sink slot and page slot: bool [B, T, S + 32 * pages]."""
    slots = store.sink_key.shape[2] + PAGE * max(store.page_counts)
    visible = allowed.new_zeros(store.batch, allowed.shape[1], slots)
    for row in range(store.batch):
        taken, columns = _moved_slots(store, row)
        visible[row][:, taken] = allowed[row][:, columns]
    return visible


def _moved_slots(store: LayerStore, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots that a row uses in sink and pages, and the columns that their tokens came from."""
    device = store.positions.device
    columns = store.real_columns(row)
    sink = torch.arange(store.sink_counts[row], device=device)
    tokens = store.layout.read(store.pages[row, : store.page_counts[row]], "tokens")
    used = (torch.arange(PAGE, device=device) < tokens).flatten().nonzero()[:, 0]
    first = store.sink_counts[row] + store.forgotten[row]
    taken = torch.cat([sink, store.sink_key.shape[2] + used])
    return taken, torch.cat([columns[: len(sink)], columns[first : first + len(used)]])


@lru_cache(maxsize=64)
def _count_tensors(*counts_and_device) -> tuple[torch.Tensor, ...]:
    """Counts that change once in 32 tokens, the same in every layer, as tensors that nobody writes to."""
    *counts, device = counts_and_device
    return tuple(torch.tensor(count, device=device) for count in counts)
