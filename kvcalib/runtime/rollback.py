"""Taking tokens back from a `LayerStore`: the last columns go, row by row.

What still waits is simply dropped. Whole pages are forgotten. A page that is cut in the middle gives up the tokens
that stay: they wait again in the recent buffer, as precise as they were stored, each in the column that it came
from. Below the first page the sink does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.runtime.growth import with_capacity

if TYPE_CHECKING:
    from kvcalib.runtime.store import LayerStore


def crop(store: LayerStore, count: int) -> None:
    """Forgets the last `count` columns of every row. Raises UnsupportedModel where `_check` does."""
    _check(store, count)
    if count == 0:
        return
    length = store.length - count
    if not store.has_moved:
        kept = max(length - (store.length - store.recent_length), 0)  # padding of all rows may be gone from the front
        store.waiting = store.waiting[:, :kept].clone()
        store.positions = store.positions[:, :kept].clone()
        _shorten(store, length)
        return
    kept = [_keep(store, row, _tokens_in(store, row, length)) for row in range(store.batch)]
    _shorten(store, length)
    _wait_again(store, kept)
    used = max(store.page_counts)
    if store.pages.shape[1] > 2 * used:
        store.pages = with_capacity(store.pages, used, 1, used)
    if not any(store.sink_counts):
        store.sink_key, store.sink_value, store.sink_positions = (
            store.sink_key[:, :, :0].clone(),
            store.sink_value[:, :, :0].clone(),
            store.sink_positions[:, :0].clone(),
        )


def _check(store: LayerStore, count: int) -> None:
    """Raises UnsupportedModel where a sliding window has forgotten what the next token would see after this crop."""
    if store.sliding_window is None or store.layout is None:
        return
    for row, forgotten in enumerate(store.forgotten):
        left = _tokens_in(store, row, max(store.length - count, 0)) - store.sink_counts[row] - forgotten
        if forgotten and count and left < store.sliding_window - 1:
            raise UnsupportedModel(
                f"crop({-count}) goes back to where a layer with a sliding window of {store.sliding_window} tokens has "
                "forgotten what it would see; start again from the text"
            )


def _shorten(store: LayerStore, length: int) -> None:
    store.length = length
    if store.real is not None:
        store.real = store.real[:, :length].clone()


def _tokens_in(store: LayerStore, row: int, columns: int) -> int:
    """Real tokens of a row in its first `columns` columns."""
    return columns if store.real is None else int(store.real[row, :columns].sum())


def _keep(store: LayerStore, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cuts a row to its first `tokens` tokens; returns those that wait: key, value [H, n, D], positions [n]."""
    pages = store.pages[row, : store.page_counts[row]]
    sizes = store.layout.read(pages, "tokens")[:, 0].tolist()
    moved = store.sink_counts[row] + store.forgotten[row] + sum(sizes)
    if tokens >= moved:
        columns = store.waiting[row].nonzero()[: tokens - moved, 0]
        return store.recent_key[row][:, columns], store.recent_value[row][:, columns], store.positions[row, columns]
    left = tokens - store.sink_counts[row] - store.forgotten[row]
    if left < 0:
        store.page_counts[row], store.sink_counts[row] = 0, 0
        return store.sink_key[row, :, :tokens], store.sink_value[row, :, :tokens], store.sink_positions[row, :tokens]
    whole = 0
    while sizes[whole] <= left:
        left -= sizes[whole]
        whole += 1
    key, value, positions = store.decode(pages[whole : whole + 1])
    store.page_counts[row] = whole
    return key[:left].transpose(0, 1), value[:left].transpose(0, 1), positions[:left]


def _wait_again(store: LayerStore, rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Fills the recent buffer with what each row keeps: its last real columns."""
    columns = [store.real_columns(row) for row in range(store.batch)]
    places = [own[len(own) - len(positions) :] for own, (_, _, positions) in zip(columns, rows, strict=True)]
    first = min((int(place[0]) for place in places if len(place)), default=store.length)
    width, shape = store.length - first, store.recent_key.shape[:2]
    key = store.recent_key.new_zeros(*shape, width, store.layout.key_dim)
    value = store.recent_value.new_zeros(*shape, width, store.layout.value_dim)
    store.waiting = store.waiting.new_zeros(store.batch, width)
    store.positions = store.positions.new_zeros(store.batch, width)
    for row, (place, (row_key, row_value, positions)) in enumerate(zip(places, rows, strict=True)):
        key[row][:, place - first] = row_key.to(key.dtype)
        value[row][:, place - first] = row_value.to(value.dtype)
        store.waiting[row, place - first] = True
        store.positions[row, place - first] = positions
    store.recent_key, store.recent_value = key, value
