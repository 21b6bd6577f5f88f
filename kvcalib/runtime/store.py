"""Storage of one layer: sink | pages | recent columns.

Tokens arrive as columns, all rows at once, padding included. They wait in the recent buffer exactly as the model
gave them. When a row has a full page of real tokens beyond its window, its sink tokens (once) and then whole pages
move out of the buffer: the page is quantised, written, and never touched again.

    row r:  [pad pad][sink ... S][page 0][page 1] ... [window >= R tokens + less than one page]
                      exact        packed              exact

Page boundaries count real tokens from the end of the sink, so they do not depend on padding, on the other rows, or
on how many tokens came at once. Padding is dropped as soon as every row has moved past it. A page holds consecutive
positions; where position ids jump (a second turn of a padded batch, packed documents) it ends early. Layers with a
sliding window forget pages that no later query can see.

Nothing here knows transformers.
"""

from functools import lru_cache

import torch

from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.kernels import dispatch
from kvcalib.kernels.packed import Packed
from kvcalib.quant.codec import dequantise
from kvcalib.quant.page import PageLayout, read_page
from kvcalib.quant.rope import Rope, to_post_rope
from kvcalib.quant.spec import PAGE, CacheSpec, Tables
from kvcalib.runtime import rollback
from kvcalib.runtime.frequencies import Frequencies

_ROLLBACK = 64
"""Tokens that a sliding-window layer keeps beyond its window, so that a crop can take a few tokens back."""


_AT_ONCE = 16
"""Pages that are encoded together."""


class LayerStore:
    """Keys and values of one layer for B rows. All tensors are on one device, in the model's dtype where exact.

    sliding_window: how far a query looks back; valid_to, long_rope: see frequencies.py.
    """

    def __init__(
        self,
        spec: CacheSpec,
        key_tables: Tables,
        value_tables: Tables,
        rope: Rope,
        sliding_window: int | None = None,
        valid_to: int | None = None,
        long_rope: Rope | None = None,
    ):
        self.spec, self.key_tables, self.value_tables = spec, key_tables, value_tables
        self.sliding_window, self.frequencies = sliding_window, Frequencies(rope, valid_to, long_rope)
        self.layout: PageLayout | None = None
        self.length, self.real, self.by_order = 0, None, False

    @property
    def rope(self) -> Rope:
        return self.frequencies.rope

    @property
    def has_moved(self) -> bool:
        """Whether any row keeps tokens outside of the recent buffer."""
        return self.layout is not None and max(self.page_counts + self.sink_counts) > 0

    @property
    def batch(self) -> int:
        return self.recent_key.shape[0]

    @property
    def recent_length(self) -> int:
        return self.waiting.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that grows with the cache, by name."""
        if self.layout is None:
            return {}
        names = ("pages", "sink_key", "sink_value", "sink_positions", "recent_key", "recent_value")
        held = {name: getattr(self, name) for name in (*names, "waiting", "positions")}
        return held if self.real is None else held | {"real": self.real}

    def constants(self) -> list[torch.Tensor]:
        """Every tensor that does not grow: frames, levels, rotary frequencies."""
        tables = [tensor for group in (self.key_tables, self.value_tables) for tensor in group if tensor is not None]
        return tables + self.frequencies.tensors()

    # --- arrival -----------------------------------------------------------------------------------------------

    def append(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> None:
        """key [B, H, T, D] post-RoPE, value [B, H, T, Dv], positions int64 [B, T]; all columns taken as real."""
        if self.layout is None:
            self._allocate(key, value)
            self.frequencies.begin(positions)
        if key.device != self.recent_key.device:  # a cache from a file
            self._move_to(key.device)
        if key.shape[0] != self.batch:
            raise ConfigError(f"the cache holds {self.batch} rows and got {key.shape[0]}; make one for the new batch")
        start, tokens = self.recent_length, key.shape[2]
        self._reserve(start + tokens)
        self.recent_key[:, :, start : start + tokens] = key
        self.recent_value[:, :, start : start + tokens] = value
        new = torch.ones_like(positions, dtype=torch.bool)
        self.waiting = torch.cat([self.waiting, new], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)
        self._lengthen_real(tokens)
        self.length += tokens

    @property
    def real(self) -> torch.Tensor | None:
        """Which columns hold a token, bool [B, length]; None while all of them do."""
        return None if self._real is None else self._real[:, : self.length]

    @real.setter
    def real(self, real: torch.Tensor | None) -> None:
        self._real = real

    def _lengthen_real(self, tokens: int) -> None:
        if self._real is None:
            return
        if self._real.shape[1] < self.length + tokens:
            capacity = self.length + tokens + max(PAGE, self.length // 8)
            self._real = _with_capacity(self._real, capacity, 1, self.length)
        self._real[:, self.length : self.length + tokens] = True

    def next_positions(self, batch: int, tokens: int) -> torch.Tensor:
        """Positions [B, T] of the columns that come next when they are not told: the count of real tokens so far."""
        self.by_order = True
        known = self.layout is not None and self.real is not None
        past = self.real.sum(1, keepdim=True) if known else torch.full((batch, 1), self.length)
        return past + torch.arange(tokens, device=past.device)

    def drop_padding(self, real: torch.Tensor) -> None:
        """real bool [B, T]: which of the last T columns hold a token of the row."""
        if real.all():
            return
        if self.by_order:
            skipped = (~real).cumsum(1)
            self.positions[:, -real.shape[1] :] -= skipped
        if self.real is None:
            self.real = torch.ones(self.batch, self.length, dtype=torch.bool, device=real.device)
        self.real[:, -real.shape[1] :] &= real
        self.waiting[:, -real.shape[1] :] &= real

    def check_hidden(self, allowed: torch.Tensor | None, tokens: int) -> None:
        """allowed bool [B, T, length], None for all. Raises ConfigError where a token is to see what was padding."""
        if self.real is None or tokens == self.length or not self.spec.quantised:
            return
        shown = ~self.real
        if allowed is not None:
            shown &= (allowed & self.real[:, -tokens:, None]).any(1)
        if shown.any():
            row, column = shown.nonzero()[0].tolist()
            raise ConfigError(
                f"the attention mask shows column {column} of row {row}, which it hid when that token came: a quantised"
                " cache keeps nothing of padding; pass attention_mask in every call and hide the same columns"
            )

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        batch, heads, _, key_dim = key.shape
        self.layout = PageLayout(self.spec, self.key_tables, self.value_tables)
        shape, expected = (
            (heads, key_dim, value.shape[-1]),
            (self.layout.heads, self.layout.key_dim, self.layout.value_dim),
        )
        assert shape == expected, f"keys and values of shape {shape}, calibrated {expected}"
        self.pages = torch.empty(batch, 0, self.layout.nbytes, dtype=torch.uint8, device=key.device)
        self.page_counts, self.sink_counts, self.forgotten = [0] * batch, [0] * batch, [0] * batch
        self.recent_key, self.recent_value = key[:, :, :0].clone(), value[:, :, :0].clone()
        self.sink_key, self.sink_value = self.recent_key, self.recent_value
        self.waiting = torch.empty(batch, 0, dtype=torch.bool, device=key.device)
        self.positions = torch.empty(batch, 0, dtype=torch.int64, device=key.device)
        self.sink_positions, self.real = self.positions, None
        self._move_to(key.device)

    def _move_to(self, device: torch.device) -> None:
        self.key_tables, self.value_tables = self.key_tables.to(device), self.value_tables.to(device)
        self.frequencies.to(device)
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    def _reserve(self, columns: int) -> None:
        """Grows the recent buffer in steps that keep appending amortised O(1)."""
        if columns > self.recent_key.shape[2]:
            capacity = columns if self.recent_length == 0 else columns + max(PAGE, columns // 4)
            self.recent_key = _with_capacity(self.recent_key, capacity, 2, self.recent_length)
            self.recent_value = _with_capacity(self.recent_value, capacity, 2, self.recent_length)

    # --- departure to pages ------------------------------------------------------------------------------------

    @property
    def may_flush(self) -> bool:
        """Whether there are tokens enough for a page before the window."""
        return self.spec.quantised and self.recent_length >= PAGE + self.spec.window

    def flush(self) -> None:
        """Moves every complete page that lies before the window out of the recent buffer."""
        if not self.may_flush:
            return
        moved = [self._flush_row(row) for row in range(self.batch)]
        if any(moved):
            self._compact()

    def _flush_row(self, row: int) -> bool:
        columns = self.waiting[row].nonzero()[:, 0]
        sink = self.spec.sink - self.sink_counts[row]
        sizes = _page_sizes(self.positions[row, columns[sink:]], columns.numel() - sink - self.spec.window)
        if not sizes:
            return False
        if sink:
            self._move_sink(row, columns[:sink])
        self._write_pages(row, columns[sink : sink + sum(sizes)], sizes)
        self.waiting[row, columns[: sink + sum(sizes)]] = False
        if self.sliding_window is not None:
            self._forget(row)
        return True

    def _move_sink(self, row: int, columns: torch.Tensor) -> None:
        if self.sink_key.shape[2] == 0:
            shape = (*self.recent_key.shape[:2], self.spec.sink)
            self.sink_key = self.recent_key.new_zeros(*shape, self.layout.key_dim)
            self.sink_value = self.recent_value.new_zeros(*shape, self.layout.value_dim)
            self.sink_positions = self.positions.new_zeros(self.batch, self.spec.sink)
        self.sink_key[row] = self.recent_key[row][:, columns]
        self.sink_value[row] = self.recent_value[row][:, columns]
        self.sink_positions[row] = self.positions[row, columns]
        self.sink_counts[row] = self.spec.sink

    def _encode(self, row: int, columns: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Columns of one row, cut into pages of `sizes` tokens -> uint8 [pages, nbytes]."""
        counts = torch.tensor(sizes, device=columns.device)
        starts = counts.cumsum(0) - counts
        index = starts[:, None] + torch.arange(PAGE, device=columns.device).clamp_max(counts[:, None] - 1)
        columns = columns[index.flatten()]  # a short page is filled with copies of its last token
        positions = self.positions[row, columns]
        key, value = self.recent_key[row], self.recent_value[row]
        for tensor in (key, value):
            self._check_finite(tensor.index_select(1, columns), row, positions)
        if self.spec.key.rope == "pre":
            self.frequencies.check(positions)
        tables = self.layout, self.key_tables, self.value_tables, self.rope
        return dispatch.pack(key, value, columns, positions, counts, *tables)

    @staticmethod
    def _check_finite(tensor: torch.Tensor, row: int, positions: torch.Tensor) -> None:
        if not tensor.isfinite().all():
            raise UnsupportedModel(
                f"the model gave keys or values that are NaN or infinite (positions {int(positions[0])} to "
                f"{int(positions[-1])} of row {row}), in {tensor.dtype}; load it in bfloat16 or float32"
            )

    def _write_pages(self, row: int, columns: torch.Tensor, sizes: list[int]) -> None:
        """Encodes a few pages at a time, so that a long prompt needs no more memory than its pages."""
        wanted = self.page_counts[row] + len(sizes)
        if wanted > self.pages.shape[1]:
            capacity = max(wanted, self.pages.shape[1] + self.pages.shape[1] // 8)
            self.pages = _with_capacity(self.pages, capacity, 1, max(self.page_counts))
        for first in range(0, len(sizes), _AT_ONCE):
            portion, start = sizes[first : first + _AT_ONCE], self.page_counts[row]
            tokens = sum(portion)
            self.pages[row, start : start + len(portion)] = self._encode(row, columns[:tokens], portion)
            self.page_counts[row] = start + len(portion)
            columns = columns[tokens:]

    def _forget(self, row: int) -> None:
        """Drops the pages of a row that lie behind its sliding window, a few at a time."""
        pages = self.pages[row, : self.page_counts[row]]
        tokens = self.layout.read(pages, "tokens")[:, 0].long()
        last = self.layout.read(pages, "first_position")[:, 0].long() + tokens - 1
        seen = last > int(self.positions[row, -1]) - self.sliding_window - _ROLLBACK
        gone = int(seen.int().argmax()) if seen.any() else 0
        if gone >= 2:
            self.forgotten[row] += int(tokens[:gone].sum())
            self.pages[row, : len(pages) - gone] = pages[gone:].clone()
            self.page_counts[row] -= gone

    def _compact(self) -> None:
        """Forgets the leading columns that no row waits for, and memory that only a long prompt needed."""
        needed = self.waiting.any(0).nonzero()
        first = int(needed[0]) if needed.numel() else self.recent_length
        kept = self.recent_length - first
        capacity = max(kept, self.spec.window + PAGE)  # steady state of decoding: full again at the next flush
        self.recent_key = _with_capacity(self.recent_key[:, :, first:], capacity, 2, kept)
        self.recent_value = _with_capacity(self.recent_value[:, :, first:], capacity, 2, kept)
        self.waiting = self.waiting[:, first:].clone()
        self.positions = self.positions[:, first:].clone()
        used = max(self.page_counts)
        if self.sliding_window is not None and self.pages.shape[1] > 2 * used:
            self.pages = _with_capacity(self.pages, used, 1, used)

    # --- reading -----------------------------------------------------------------------------------------------

    def recent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, H, R, D] of the recent keys and values."""
        return self.recent_key[:, :, : self.recent_length], self.recent_value[:, :, : self.recent_length]

    def packed(self, allowed: torch.Tensor | None, tokens: int) -> Packed:
        """allowed bool [B, T, length]: may query t see column j; None: the past and itself. tokens = T."""
        key, value = self.recent()
        device = key.device
        if allowed is None and tokens == 1:
            visible = None  # a single query comes after everything that is there
        elif allowed is None:
            ahead = torch.arange(self.recent_length, device=device) - (self.recent_length - tokens)
            visible = (ahead <= torch.arange(tokens, device=device)[:, None]).expand(self.batch, -1, -1)
        else:
            visible = allowed[..., self.length - self.recent_length :]
        counts = _count_tensors(tuple(self.page_counts), tuple(self.sink_counts), device)
        return Packed(
            pages=self.pages,
            page_counts=counts[0],
            sink_key=self.sink_key,
            sink_value=self.sink_value,
            sink_counts=counts[1],
            recent_key=key,
            recent_value=value,
            recent_visible=self.waiting[:, None, :] if visible is None else visible & self.waiting[:, None, :],
            moved_visible=None if allowed is None else self._moved_visible(allowed),
            layout=self.layout,
            key_tables=self.key_tables,
            value_tables=self.value_tables,
            rope=self.rope,
        )

    def _moved_visible(self, allowed: torch.Tensor) -> torch.Tensor:
        """What the mask says of every sink slot and page slot: bool [B, T, S + 32 * pages]."""
        slots = self.sink_key.shape[2] + PAGE * max(self.page_counts)
        visible = allowed.new_zeros(self.batch, allowed.shape[1], slots)
        for row in range(self.batch):
            taken, columns = self._moved_slots(row)
            visible[row][:, taken] = allowed[row][:, columns]
        return visible

    def _moved_slots(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that a row uses in sink and pages, and the columns that their tokens came from."""
        device = self.positions.device
        columns = self.real_columns(row)
        sink = torch.arange(self.sink_counts[row], device=device)
        tokens = self.layout.read(self.pages[row, : self.page_counts[row]], "tokens")
        used = (torch.arange(PAGE, device=device) < tokens).flatten().nonzero()[:, 0]
        first = self.sink_counts[row] + self.forgotten[row]
        taken = torch.cat([sink, self.sink_key.shape[2] + used])
        return taken, torch.cat([columns[: len(sink)], columns[first : first + len(used)]])

    # --- going back, and rows ----------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forgets the last `count` columns; see rollback.py."""
        rollback.crop(self, min(count, self.length))

    def real_columns(self, row: int) -> torch.Tensor:
        """Columns that hold a token of the row, ascending."""
        if self.real is None:
            return torch.arange(self.length, device=self.positions.device)
        return self.real[row].nonzero()[:, 0]

    def decode(self, pages: torch.Tensor):
        """uint8 [n, nbytes] -> key (post-RoPE, model channel order), value fp32 [T, H, D], positions [T]."""
        coded_key, coded_value, first = read_page(pages, self.layout)
        positions = (first[:, None].long() + torch.arange(PAGE, device=pages.device)).flatten()
        key = dequantise(coded_key, self.spec.key, self.key_tables).flatten(0, 1)
        if self.spec.key.rope == "pre":
            key = to_post_rope(key, positions, self.rope)
        value = dequantise(coded_value, self.spec.value, self.value_tables).flatten(0, 1)
        return key[..., self.rope.order.argsort()], value, positions

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row index[i]; repeats and omissions are allowed."""
        if self.layout is None:
            return
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(0, index.to(tensor.device)))
        for name in ("page_counts", "sink_counts", "forgotten"):
            setattr(self, name, [getattr(self, name)[row] for row in index.tolist()])

    def reset(self) -> None:
        for name in self.tensors():
            setattr(self, name, None)
        self.layout, self.length = None, 0


@lru_cache(maxsize=64)
def _count_tensors(*counts_and_device) -> tuple[torch.Tensor, ...]:
    """Counts that change once in 32 tokens, the same in every layer, as tensors that nobody writes to."""
    *counts, device = counts_and_device
    return tuple(torch.tensor(count, device=device) for count in counts)


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


def _with_capacity(tensor: torch.Tensor, capacity: int, dim: int, used: int) -> torch.Tensor:
    """Copy of `tensor` with room for `capacity` along dim; only the first `used` entries are defined."""
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_empty(shape)
    grown.narrow(dim, 0, used).copy_(tensor.narrow(dim, 0, used))
    return grown
