"""Storage of one layer: sink | pages | recent columns.

Tokens arrive as columns, all rows at once, padding included. They wait in the recent buffer exactly as the model
gave them. When a row has a full page of real tokens beyond its window, its sink tokens (once) and then whole pages
move out of the buffer: the page is quantised, written, and never touched again.

    row r:  [pad pad][sink ... S][page 0][page 1] ... [window >= R tokens + less than one page]
                      exact        packed              exact

Page boundaries count real tokens from the end of the sink, so they do not depend on padding, on the other rows, or
on how many tokens came at once. Padding is dropped as soon as every row has moved past it.

Nothing here knows transformers.
"""

import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.kernels.packed import Packed
from kvcalib.quant.codec import dequantise, quantise
from kvcalib.quant.page import PageLayout, read_page, write_page
from kvcalib.quant.rope import Rope, to_post_rope, to_pre_rope
from kvcalib.quant.spec import PAGE, CacheSpec, Tables


class LayerStore:
    """Keys and values of one layer for B rows. All tensors are on one device, in the model's dtype where exact."""

    def __init__(self, spec: CacheSpec, key_tables: Tables, value_tables: Tables, rope: Rope):
        self.spec, self.key_tables, self.value_tables, self.rope = spec, key_tables, value_tables, rope
        self.layout: PageLayout | None = None
        self.length = 0

    @property
    def has_pages(self) -> bool:
        return self.layout is not None and max(self.page_counts, default=0) > 0

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
        names = (
            "pages",
            "sink_key",
            "sink_value",
            "sink_positions",
            "recent_key",
            "recent_value",
            "waiting",
            "positions",
        )
        return {name: getattr(self, name) for name in names}

    # --- arrival -----------------------------------------------------------------------------------------------

    def append(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> None:
        """key [B, H, T, D] post-RoPE, value [B, H, T, Dv], positions int64 [B, T]; all columns taken as real."""
        if self.layout is None:
            self._allocate(key, value)
        start, tokens = self.recent_length, key.shape[2]
        self._reserve(start + tokens)
        self.recent_key[:, :, start : start + tokens] = key
        self.recent_value[:, :, start : start + tokens] = value
        self.waiting = torch.cat([self.waiting, torch.ones_like(positions, dtype=torch.bool)], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.length += tokens

    def drop_padding(self, real: torch.Tensor) -> None:
        """real bool [B, T]: which of the last T columns hold a token of the row."""
        self.waiting[:, -real.shape[1] :] &= real

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        batch, heads, _, key_dim = key.shape
        value_dim = value.shape[-1]
        self.layout = PageLayout(self.spec, self.key_tables, self.value_tables)
        assert (heads, key_dim, value_dim) == (self.layout.heads, self.layout.key_dim, self.layout.value_dim)
        self._move_tables(key.device)
        self.pages = torch.empty(batch, 0, self.layout.nbytes, dtype=torch.uint8, device=key.device)
        self.page_counts, self.sink_counts = [0] * batch, [0] * batch
        self.recent_key, self.recent_value = key[:, :, :0].clone(), value[:, :, :0].clone()
        self.sink_key, self.sink_value = self.recent_key, self.recent_value
        self.waiting = torch.empty(batch, 0, dtype=torch.bool, device=key.device)
        self.positions = torch.empty(batch, 0, dtype=torch.int64, device=key.device)
        self.sink_positions = self.positions

    def _move_tables(self, device: torch.device) -> None:
        self.key_tables, self.value_tables = self.key_tables.to(device), self.value_tables.to(device)
        self.rope = self.rope.to(device)

    def _reserve(self, columns: int) -> None:
        """Grows the recent buffer in steps that keep appending amortised O(1)."""
        if columns > self.recent_key.shape[2]:
            capacity = columns if self.recent_length == 0 else columns + max(PAGE, columns // 4)
            self.recent_key = _with_capacity(self.recent_key, capacity, 2, self.recent_length)
            self.recent_value = _with_capacity(self.recent_value, capacity, 2, self.recent_length)

    # --- departure to pages ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Moves every complete page that lies before the window out of the recent buffer."""
        if not self.spec.quantised or self.recent_length < PAGE + self.spec.window:
            return
        moved = False
        for row in range(self.batch):
            columns = self.waiting[row].nonzero()[:, 0]
            pages = self._pages_ready(row, columns.numel())
            if pages > 0:
                self._move_row(row, columns, pages)
                moved = True
        if moved:
            self._compact()

    def _pages_ready(self, row: int, waiting: int) -> int:
        return (waiting - (self.spec.sink - self.sink_counts[row]) - self.spec.window) // PAGE

    def _move_row(self, row: int, columns: torch.Tensor, pages: int) -> None:
        sink = self.spec.sink - self.sink_counts[row]
        if sink:
            self._move_sink(row, columns[:sink])
        taken = columns[sink : sink + pages * PAGE]
        self._write_pages(row, self._encode(row, taken))
        self.waiting[row, columns[: sink + pages * PAGE]] = False

    def _move_sink(self, row: int, columns: torch.Tensor) -> None:
        if self.sink_key.shape[2] == 0:
            self.sink_key = self.recent_key.new_zeros(*self.recent_key.shape[:2], self.spec.sink, self.layout.key_dim)
            self.sink_value = self.recent_value.new_zeros(
                *self.recent_value.shape[:2], self.spec.sink, self.layout.value_dim
            )
            self.sink_positions = self.positions.new_zeros(self.batch, self.spec.sink)
        self.sink_key[row] = self.recent_key[row][:, columns]
        self.sink_value[row] = self.recent_value[row][:, columns]
        self.sink_positions[row] = self.positions[row, columns]
        self.sink_counts[row] = self.spec.sink

    def _encode(self, row: int, columns: torch.Tensor) -> torch.Tensor:
        """Columns of one row, a multiple of a page -> uint8 [pages, nbytes]."""
        positions = self.positions[row, columns].view(-1, PAGE)
        if not (positions.diff(dim=1) == 1).all():
            raise UnsupportedModel(
                "the position ids of 32 neighbouring tokens do not count up by one, which a page of a quantised cache "
                "needs; pass ordinary position_ids, or use quant=identity"
            )
        key = self.recent_key[row].index_select(1, columns).transpose(0, 1)  # [T, H, D]
        value = self.recent_value[row].index_select(1, columns).transpose(0, 1)
        if self.spec.key.rope == "pre":
            key = to_pre_rope(key, positions.flatten(), self.rope)
        else:
            key = key[..., self.rope.order].float()
        coded_key = quantise(key.unflatten(0, (-1, PAGE)), self.spec.key, self.key_tables)
        coded_value = quantise(value.unflatten(0, (-1, PAGE)), self.spec.value, self.value_tables)
        return write_page(coded_key, coded_value, positions[:, 0], self.layout)

    def _write_pages(self, row: int, data: torch.Tensor) -> None:
        start, count = self.page_counts[row], data.shape[0]
        if start + count > self.pages.shape[1]:
            capacity = max(start + count, self.pages.shape[1] + self.pages.shape[1] // 8)
            self.pages = _with_capacity(self.pages, capacity, 1, max(self.page_counts))
        self.pages[row, start : start + count] = data
        self.page_counts[row] = start + count

    def _compact(self) -> None:
        """Forgets the leading columns that no row waits for, and the memory that a long prompt needed."""
        needed = self.waiting.any(0).nonzero()
        first = int(needed[0]) if needed.numel() else self.recent_length
        kept = self.recent_length - first
        capacity = max(kept, self.spec.window + PAGE)  # steady state of decoding: full again at the next flush
        self.recent_key = _with_capacity(self.recent_key[:, :, first:], capacity, 2, kept)
        self.recent_value = _with_capacity(self.recent_value[:, :, first:], capacity, 2, kept)
        self.waiting = self.waiting[:, first:].clone()
        self.positions = self.positions[:, first:].clone()

    # --- reading -----------------------------------------------------------------------------------------------

    def recent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, H, R, D] of the recent keys and values."""
        return self.recent_key[:, :, : self.recent_length], self.recent_value[:, :, : self.recent_length]

    def packed(self, recent_visible: torch.Tensor) -> Packed:
        """recent_visible bool [B, T, R] without regard to what has moved; T = number of query tokens."""
        key, value = self.recent()
        device = key.device
        return Packed(
            pages=self.pages,
            page_counts=torch.tensor(self.page_counts, device=device),
            sink_key=self.sink_key,
            sink_value=self.sink_value,
            sink_counts=torch.tensor(self.sink_counts, device=device),
            sink_positions=self.sink_positions,
            recent_key=key,
            recent_value=value,
            recent_visible=recent_visible & self.waiting[:, None, :],
            query_positions=self.positions[:, -recent_visible.shape[1] :],
            layout=self.layout,
            key_tables=self.key_tables,
            value_tables=self.value_tables,
            rope=self.rope,
        )

    # --- going back, and rows ----------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forgets the last `count` columns. What is cut out of the middle of a page waits again, dequantised."""
        count = min(count, self.length)
        self.length -= count
        if count <= self.recent_length:
            self._keep_recent(self.recent_length - count)
            return
        beyond = count - self.recent_length
        self._keep_recent(0)
        self._crop_pages(beyond)

    def _keep_recent(self, columns: int) -> None:
        self.waiting = self.waiting[:, :columns].clone()
        self.positions = self.positions[:, :columns].clone()

    def _crop_pages(self, tokens: int) -> None:
        """Drops `tokens` tokens from the end of what left the buffer, row by row."""
        rows = [self._restore(row, tokens) for row in range(self.batch)]
        columns = max(key.shape[1] for key, _, _ in rows)
        self._reserve(columns)
        self.waiting = self.waiting.new_zeros(self.batch, columns)
        self.positions = self.positions.new_zeros(self.batch, columns)
        for row, (key, value, positions) in enumerate(rows):
            self.recent_key[row, :, columns - key.shape[1] : columns] = key.to(self.recent_key.dtype)
            self.recent_value[row, :, columns - key.shape[1] : columns] = value.to(self.recent_value.dtype)
            self.waiting[row, columns - key.shape[1] :] = True
            self.positions[row, columns - key.shape[1] :] = positions

    def _restore(self, row: int, tokens: int):
        """Takes back what a row keeps of its last, cut page or of its sink: key, value [H, n, D], positions [n]."""
        kept = max(self.page_counts[row] * PAGE - tokens, 0)
        whole, part = divmod(kept, PAGE)
        missing = tokens - self.page_counts[row] * PAGE
        last = self.pages[row, whole : whole + 1]
        self.page_counts[row] = whole
        if missing > 0:
            left = max(self.sink_counts[row] - missing, 0)
            self.sink_counts[row] = 0
            return self.sink_key[row, :, :left], self.sink_value[row, :, :left], self.sink_positions[row, :left]
        if part == 0:
            return self.recent_key[row, :, :0], self.recent_value[row, :, :0], self.positions[row, :0]
        key, value, positions = self._decode(last)
        return key[:part].transpose(0, 1), value[:part].transpose(0, 1), positions[:part]

    def _decode(self, pages: torch.Tensor):
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
        rows = index.tolist()
        self.page_counts = [self.page_counts[row] for row in rows]
        self.sink_counts = [self.sink_counts[row] for row in rows]

    def reset(self) -> None:
        self.layout, self.length = None, 0


def _with_capacity(tensor: torch.Tensor, capacity: int, dim: int, used: int) -> torch.Tensor:
    """Copy of `tensor` with room for `capacity` along dim; only the first `used` entries are defined."""
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_empty(shape)
    grown.narrow(dim, 0, used).copy_(tensor.narrow(dim, 0, used))
    return grown
