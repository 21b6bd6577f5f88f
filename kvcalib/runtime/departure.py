"""From the recent buffer of a `LayerStore` to its sink and pages, row by row.

A row moves when a page is full before its window. What it then has in pages stays as it is; the buffer gives up the
columns that no row waits for.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.kernels import dispatch
from kvcalib.quant.spec import LARGEST, PAGE
from kvcalib.runtime.growth import with_capacity

if TYPE_CHECKING:
    from kvcalib.runtime.store import LayerStore

logger = logging.getLogger(__name__)
_ROLLBACK = 64
"""Tokens that a sliding-window layer keeps beyond its window, so that a crop can take a few tokens back."""
_AT_ONCE = 16
"""Pages that are encoded together."""
_POSITIONS = 2**24
"""The kernels take a position apart into four digits to the base of 64."""


def flush(store: LayerStore) -> None:
    """Moves every complete page that lies before the window out of the recent buffer."""
    moved = [_flush_row(store, row) for row in range(store.batch)]
    if any(moved):
        if store.sliding_window is not None:
            _forget(store)
        _compact(store)


def _flush_row(store: LayerStore, row: int) -> bool:
    columns = store.waiting[row].nonzero()[:, 0]
    sink = store.spec.sink - store.sink_counts[row]
    sizes = _page_sizes(store.positions[row, columns[sink:]], columns.numel() - sink - store.spec.window)
    if not sizes:
        return False
    if 4 * sum(sizes) < PAGE * len(sizes):
        _scattered(logger)
    if sink:
        _move_sink(store, row, columns[:sink])
    _write_pages(store, row, columns[sink : sink + sum(sizes)], sizes)
    store.waiting[row, columns[: sink + sum(sizes)]] = False
    return True


@cache
def _scattered(log: logging.Logger) -> None:
    """Says it once."""
    log.warning(
        "position_ids jump every few tokens, and a page holds consecutive ones: such a cache is larger than it need be"
    )


def _move_sink(store: LayerStore, row: int, columns: torch.Tensor) -> None:
    if store.sink_key.shape[2] == 0:
        shape = (*store.recent_key.shape[:2], store.spec.sink)
        store.sink_key = store.recent_key.new_zeros(*shape, store.layout.key_dim)
        store.sink_value = store.recent_value.new_zeros(*shape, store.layout.value_dim)
        store.sink_positions = store.positions.new_zeros(store.batch, store.spec.sink)
    store.sink_key[row] = store.recent_key[row][:, columns]
    store.sink_value[row] = store.recent_value[row][:, columns]
    store.sink_positions[row] = store.positions[row, columns]
    store.sink_counts[row] = store.spec.sink


def _encode(store: LayerStore, row: int, columns: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Columns of one row, cut into pages of `sizes` tokens -> uint8 [pages, nbytes]."""
    counts = torch.tensor(sizes, device=columns.device)
    starts = counts.cumsum(0) - counts
    index = starts[:, None] + torch.arange(PAGE, device=columns.device).clamp_max(counts[:, None] - 1)
    columns = columns[index.flatten()]  # a short page is filled with copies of its last token
    positions = store.positions[row, columns]
    key, value = store.recent_key[row], store.recent_value[row]
    for tensor in (key, value):
        _check_size(tensor.index_select(1, columns), row, positions)
    if store.spec.key.rope == "pre":
        _check_positions(positions, row)
        store.frequencies.check(positions)
    tables = store.layout, store.key_tables, store.value_tables, store.rope
    return dispatch.pack(key, value, columns, positions, counts, *tables)


def _check_positions(positions: torch.Tensor, row: int) -> None:
    first, last = int(positions.min()), int(positions.max())
    if first < 0 or last >= _POSITIONS:
        raise ConfigError(
            f"position_ids of row {row} go from {first} to {last}; keys are rotated when a page is read, and positions"
            f" from 0 to {_POSITIONS - 1} are told apart there: pass others, or calibrate with quant.key.rope=post"
        )


def _check_size(tensor: torch.Tensor, row: int, positions: torch.Tensor) -> None:
    if not (tensor.abs() < LARGEST).all():
        raise UnsupportedModel(
            f"the model gave keys or values that are NaN, infinite or beyond {LARGEST:.0e} (positions "
            f"{int(positions[0])} to {int(positions[-1])} of row {row}), in {tensor.dtype}; load it in bfloat16 or"
            " float32"
        )


def _write_pages(store: LayerStore, row: int, columns: torch.Tensor, sizes: list[int]) -> None:
    """Encodes a few pages at a time, so that a long prompt needs no more memory than its pages."""
    wanted = store.page_counts[row] + len(sizes)
    if wanted > store.pages.shape[1]:
        capacity = max(wanted, store.pages.shape[1] + store.pages.shape[1] // 8)
        store.reserve_pages(capacity)
    for first in range(0, len(sizes), _AT_ONCE):
        portion, start = sizes[first : first + _AT_ONCE], store.page_counts[row]
        tokens = sum(portion)
        store.pages[row, start : start + len(portion)] = _encode(store, row, columns[:tokens], portion)
        store.page_counts[row] = start + len(portion)
        columns = columns[tokens:]


def _forget(store: LayerStore) -> None:
    """Drops the pages that lie behind the sliding window of a row, a few at a time.

    Masks count columns, and position ids may jump: what counts is how many tokens came after a page.
    """
    before, copied = store.pages, False
    for row in range(store.batch):
        pages = before[row, : store.page_counts[row]]
        tokens = store.layout.read(pages, "tokens")[:, 0].long()
        came = len(store.real_columns(row)) - store.sink_counts[row] - store.forgotten[row]
        seen = came - tokens.cumsum(0) < store.sliding_window + _ROLLBACK
        gone = int(seen.int().argmax()) if seen.any() else 0
        if gone < 2:
            continue
        if not copied:
            store.pages, copied = before.clone(), True
        store.pages[row, : len(pages) - gone] = pages[gone:]
        store.forgotten[row] += int(tokens[:gone].sum())
        store.page_counts[row] -= gone


def _compact(store: LayerStore) -> None:
    """Forgets the leading columns that no row waits for, and memory that only a long prompt needed."""
    needed = store.waiting.any(0).nonzero()
    first = int(needed[0]) if needed.numel() else store.recent_length
    kept = store.recent_length - first
    capacity = max(kept, store.spec.window + PAGE)  # steady state of decoding: full again at the next flush
    store.recent_key = with_capacity(store.recent_key[:, :, first:], capacity, 2, kept)
    store.recent_value = with_capacity(store.recent_value[:, :, first:], capacity, 2, kept)
    store.waiting = store.waiting[:, first:].clone()
    store.positions = store.positions[:, first:].clone()
    used = max(store.page_counts)
    if store.sliding_window is not None and store.pages.shape[1] > 2 * used:
        store.pages = with_capacity(store.pages, used, 1, used)


def _page_sizes(positions: torch.Tensor, ready: int) -> list[int]:
    """Tokens per page for the first `ready` of the waiting positions: 32, or what is left before a gap."""
    if ready <= 0:
        return []
    gaps = ((positions.diff() != 1).nonzero()[:, 0] + 1).tolist()
    sizes, start = [], 0
    for end in [*gaps, None]:
        run = PAGE if end is None else end - start
        while run >= PAGE and ready - start >= PAGE:
            sizes.append(PAGE)
            start += PAGE
            run = PAGE if end is None else end - start
        if end is None or run > ready - start:
            break
        if run:
            sizes.append(run)
            start += run
    return sizes
