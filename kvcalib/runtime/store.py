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

A token that is stored is not written to again: what changes is made anew, or lies beyond what is in use. So `state` is
a cheap copy of what the store refers to, and `restore` goes back to it whatever has happened in between.

Nothing here knows transformers.
"""

import torch

from kvcalib.errors import ConfigError
from kvcalib.kernels.packed import Packed
from kvcalib.quant.codec import dequantise
from kvcalib.quant.page import PageLayout, read_page
from kvcalib.quant.rope import Rope, to_post_rope
from kvcalib.quant.spec import PAGE, CacheSpec, Tables
from kvcalib.runtime import departure, reading, rollback
from kvcalib.runtime.frequencies import Frequencies
from kvcalib.runtime.growth import with_capacity

COUNTS = ("page_counts", "sink_counts", "forgotten")
"""Lists of one number per row: pages, tokens in the sink, tokens that a sliding window has passed."""


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

    def state(self) -> dict:
        """What `restore` takes. Copies no tensor."""
        state = self.__dict__.copy()
        for name in COUNTS:
            if name in state:
                state[name] = state[name].copy()
        return state

    def restore(self, state: dict) -> None:
        self.__dict__ = state

    def seen(self) -> "LayerStore":
        """A store over the same memory that stays as this one is now."""
        twin = object.__new__(LayerStore)
        twin.restore(self.state())
        return twin

    def __deepcopy__(self, memo) -> "LayerStore":
        """A store of its own over the same tables."""
        twin = self.seen()
        for name, tensor in self.tensors().items():
            setattr(twin, name, tensor.clone())
        return twin

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
        """key [B, H, T, D] post-RoPE, value [B, H, T, Dv], positions int64 [B, T]; all columns taken as real.

        What is exact is kept in one dtype, the widest seen: under autocast keys come in another than values.
        """
        if self.layout is None:
            self._allocate(key, value)
        if self.length == 0:  # a new cache, or one that went back to nothing
            self.frequencies = self.frequencies.of_text(positions)
        if key.device != self.recent_key.device:  # a cache from a file
            self._move_to(key.device)
        if key.shape[0] != self.batch:
            raise ConfigError(f"the cache holds {self.batch} rows and got {key.shape[0]}; make one for the new batch")
        self._widen(torch.promote_types(key.dtype, value.dtype))
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
    def pages(self) -> torch.Tensor:
        """uint8 [B, capacity, nbytes]; the first `page_counts[r]` of row r are in use."""
        return self._pages[0]

    @pages.setter
    def pages(self, pages: torch.Tensor) -> None:
        self._pages = [pages]

    def reserve_pages(self, capacity: int) -> None:
        """Makes room, also in what a `state` refers to: it begins with the same pages, and the old memory is freed."""
        self._pages[0] = with_capacity(self.pages, capacity, 1, max(self.page_counts))

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
            self._real = with_capacity(self._real, capacity, 1, self.length)
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
        layout = PageLayout(self.spec, self.key_tables, self.value_tables)
        shape, expected = (heads, key_dim, value.shape[-1]), (layout.heads, layout.key_dim, layout.value_dim)
        assert shape == expected, f"keys and values of shape {shape}, calibrated {expected}"
        self.pages = torch.empty(batch, 0, layout.nbytes, dtype=torch.uint8, device=key.device)
        self.page_counts, self.sink_counts, self.forgotten = [0] * batch, [0] * batch, [0] * batch
        self.recent_key, self.recent_value = key[:, :, :0].clone(), value[:, :, :0].clone()
        self.sink_key, self.sink_value = self.recent_key, self.recent_value
        self.waiting = torch.empty(batch, 0, dtype=torch.bool, device=key.device)
        self.positions = torch.empty(batch, 0, dtype=torch.int64, device=key.device)
        self.sink_positions, self.real, self.layout = self.positions, None, layout
        self._move_to(key.device)

    def _move_to(self, device: torch.device) -> None:
        self.key_tables, self.value_tables = self.key_tables.to(device), self.value_tables.to(device)
        self.frequencies = self.frequencies.to(device)
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    def _widen(self, dtype: torch.dtype) -> None:
        wide = torch.promote_types(dtype, self.recent_key.dtype)
        if self.recent_key.dtype is self.recent_value.dtype is wide:
            return
        for name in ("sink_key", "sink_value", "recent_key", "recent_value"):
            setattr(self, name, getattr(self, name).to(wide))

    def _reserve(self, columns: int) -> None:
        """Grows the recent buffer in steps that keep appending amortised O(1)."""
        if columns > self.recent_key.shape[2]:
            capacity = columns if self.recent_length == 0 else columns + max(PAGE, columns // 4)
            self.recent_key = with_capacity(self.recent_key, capacity, 2, self.recent_length)
            self.recent_value = with_capacity(self.recent_value, capacity, 2, self.recent_length)

    # --- departure to pages: departure.py ----------------------------------------------------------------------

    @property
    def may_flush(self) -> bool:
        """Whether there are tokens enough for a page before the window."""
        return self.spec.quantised and self.recent_length >= PAGE + self.spec.window

    def flush(self) -> None:
        """Moves every complete page that lies before the window out of the recent buffer."""
        if self.may_flush:
            departure.flush(self)

    # --- reading -----------------------------------------------------------------------------------------------

    def recent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, H, R, D] of the recent keys and values."""
        return self.recent_key[:, :, : self.recent_length], self.recent_value[:, :, : self.recent_length]

    def packed(self, allowed: torch.Tensor | None, tokens: int) -> Packed:
        """What attention reads: see reading.py."""
        return reading.packed(self, allowed, tokens)

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
        if not len(index):
            raise ConfigError("a cache keeps one row or more; cache.reset() empties it")
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(0, index.to(tensor.device)))
        for name in COUNTS:
            setattr(self, name, [getattr(self, name)[row] for row in index.tolist()])

    def reset(self) -> None:
        held, self.layout, self.length = self.tensors(), None, 0
        for name in held:
            setattr(self, name, None)
