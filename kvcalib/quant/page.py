"""A page: 32 tokens of one layer, keys and values of all heads, as one run of bytes.

    int32   first_position      true position of the first token (the others follow without gaps)
    int32   tokens              tokens in use: fewer than 32 only where position ids have a gap; the rest is filler
    fp16    key_step, key_base, value_step, value_base       only for run-time ranges, see `ranges.range_shape`
    fp16    key_corrections, value_corrections               n outliers each, see `sparse`
    uint16  key_positions, value_positions                   position inside the head: channel * 32 + token
    uint16  key_rows, value_rows                             2H + 1 pointers: outliers of each half head
    bits    key_codes           head | half of 16 tokens | pair (c, c + D/2) | 16 codes of c, 16 codes of c + D/2
    bits    value_codes         head | tile of 16 channels | token pair (t, t + 1) | 16 codes of t, 16 codes of t + 1

With `Tables.widths` the pairs of a head are in order of width (stable), so a kernel meets runs of equal width.

A record is 32 codes = 4 * bits bytes, read strictly in sequence by a decode kernel whose lanes are tokens for keys
(scores come out side by side for the softmax) and channels for values (outputs accumulate without horizontal sums).
Value dims that are no multiple of 16 are filled up to the next tile. A tensor that is not quantised keeps fp16 in
its codes section, token by token. The page is padded to a multiple of 4 bytes and to nothing else.
"""

from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from kvcalib.quant import packing
from kvcalib.quant.codec import Coded
from kvcalib.quant.ranges import range_shape
from kvcalib.quant.sparse import row_pointers
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec

TILE = 16
"""Codes of one token (values) or one channel (keys) that stand side by side in a record."""


class Section(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Run(NamedTuple):
    """Consecutive records of one head with one width: pairs of a key or tiles of a value, in stored order."""

    head: int
    width: int
    units: tuple[int, ...]


class PageLayout:
    """Where everything is inside a page of one layer."""

    def __init__(self, spec: CacheSpec, key_tables: Tables, value_tables: Tables):
        self.spec = spec
        (self.heads, self.key_dim), self.value_dim = key_tables.zero.shape, value_tables.zero.shape[1]
        heads, key_dim, value_dim = self.heads, self.key_dim, self.value_dim
        self.key_runs = _runs(key_tables.widths, lambda row: row[: key_dim // 2])
        self.value_runs = _runs(value_tables.widths, lambda row: row[::TILE], sort=False)
        self.sections: dict[str, Section] = {}
        self.nbytes = 0
        self._add("first_position", (1,), torch.int32)
        self._add("tokens", (1,), torch.int32)
        dims = {"key": key_dim, "value": value_dim}
        for name, dim in dims.items():
            shape = range_shape(self.tensor_spec(name), heads, dim)
            if shape:
                self._add(f"{name}_step", shape, torch.float16)
            if shape and self.tensor_spec(name).range != "norm":
                self._add(f"{name}_base", shape, torch.float16)
        for name, dim in dims.items():
            count = self.tensor_spec(name).outliers_per_page(heads, dim)
            if count:
                self._add(f"{name}_corrections", (count,), torch.float16)
                self._add(f"{name}_positions", (count,), torch.int16)
                self._add(f"{name}_rows", (2 * heads + 1,), torch.int16)
        self.nbytes += -self.nbytes % 4
        self._add("key_codes", _codes_shape(spec.key, heads, key_dim, self.key_runs, 2), torch.uint8)
        tiled = value_dim + -value_dim % TILE
        self._add("value_codes", _codes_shape(spec.value, heads, tiled, self.value_runs, TILE), torch.uint8)
        self.nbytes += -self.nbytes % 4

    def tensor_spec(self, name: str) -> TensorSpec:
        return self.spec.key if name == "key" else self.spec.value

    def tensor_bytes(self, name: str) -> int:
        """Bytes of a page that belong to the "key" or the "value"."""
        return sum(s.nbytes for key, s in self.sections.items() if key.startswith(name))

    @property
    def common_bytes(self) -> int:
        """Bytes of a page that belong to neither: position and padding."""
        return self.nbytes - self.tensor_bytes("key") - self.tensor_bytes("value")

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        section = Section(self.nbytes, shape, dtype)
        self.sections[name] = section
        self.nbytes += section.nbytes

    def read(self, pages: torch.Tensor, name: str) -> torch.Tensor | None:
        """View of one section of uint8 pages [..., nbytes] -> [..., *shape]; None if the page has no such section."""
        section = self.sections.get(name)
        if section is None:
            return None
        window = pages[..., section.offset : section.offset + section.nbytes]
        return window.view(section.dtype).unflatten(-1, section.shape)


def write_page(
    key: Coded, value: Coded, first_position: torch.Tensor, layout: PageLayout, tokens: torch.Tensor | int = PAGE
) -> torch.Tensor:
    """Coded pages [..., P, H, D], positions and token counts [...] -> uint8 [..., layout.nbytes]."""
    pages = torch.zeros(*first_position.shape, layout.nbytes, dtype=torch.uint8, device=first_position.device)
    layout.read(pages, "first_position")[..., 0] = first_position.int()
    layout.read(pages, "tokens")[..., 0] = tokens
    for name, coded, dim in (("key", key, layout.key_dim), ("value", value, layout.value_dim)):
        if coded.step is not None:
            layout.read(pages, f"{name}_step").copy_(coded.step)
        if coded.base is not None:
            layout.read(pages, f"{name}_base").copy_(coded.base)
        if coded.positions is not None:
            layout.read(pages, f"{name}_corrections").copy_(coded.corrections)
            in_head = coded.positions % (dim * PAGE)
            layout.read(pages, f"{name}_positions").copy_(in_head.to(torch.uint16).view(torch.int16))
            rows = row_pointers(coded.positions, layout.heads, dim)
            layout.read(pages, f"{name}_rows").copy_(rows.to(torch.uint16).view(torch.int16))
    layout.read(pages, "key_codes").copy_(_pack_key(key.codes, layout))
    layout.read(pages, "value_codes").copy_(_pack_value(value.codes, layout))
    return pages


def read_page(pages: torch.Tensor, layout: PageLayout) -> tuple[Coded, Coded, torch.Tensor]:
    """Inverse of `write_page`."""
    key_codes = _unpack_key(layout.read(pages, "key_codes"), layout)
    value_codes = _unpack_value(layout.read(pages, "value_codes"), layout)
    return (
        _read_coded(pages, layout, "key", key_codes),
        _read_coded(pages, layout, "value", value_codes),
        layout.read(pages, "first_position")[..., 0],
    )


def _read_coded(pages: torch.Tensor, layout: PageLayout, name: str, codes: torch.Tensor) -> Coded:
    step, base = layout.read(pages, f"{name}_step"), layout.read(pages, f"{name}_base")
    stored = layout.read(pages, f"{name}_positions")
    if stored is None:
        return Coded(codes, step, base)
    in_head = stored.long() & 0xFFFF
    rows = layout.read(pages, f"{name}_rows").long() & 0xFFFF
    rank = torch.arange(in_head.shape[-1], device=pages.device).expand_as(in_head).contiguous()
    head = torch.searchsorted(rows[..., 2::2].contiguous(), rank, right=True)
    head = head.clamp_max(layout.heads - 1)  # a page of zeros (capacity not in use) has no rows
    positions = head * (codes.shape[-1] * PAGE) + in_head
    return Coded(codes, step, base, positions, layout.read(pages, f"{name}_corrections"))


def _runs(widths: torch.Tensor | None, units_of, *, sort: bool = True) -> tuple[Run, ...]:
    """widths uint8 [H, D] -> the runs of every head in stored order; () for one width everywhere."""
    if widths is None:
        return ()
    runs = []
    for head, row in enumerate(widths.tolist()):
        units = list(enumerate(units_of(row)))
        ordered = sorted(units, key=lambda unit: unit[1]) if sort else units
        for width, group in groupby(ordered, key=lambda unit: unit[1]):
            runs.append(Run(head, width, tuple(index for index, _ in group)))
    return tuple(runs)


def _codes_shape(spec: TensorSpec, heads: int, dim: int, runs: tuple[Run, ...], unit: int) -> tuple[int, ...]:
    if not runs:
        return (heads, dim * PAGE * spec.bits // 8)
    return (sum(len(run.units) * run.width * unit * PAGE // 8 for run in runs),)


def _pack_key(codes: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """[..., P, H, D] -> uint8 [..., H, bytes], with widths [..., bytes]."""
    spec = layout.spec.key
    if not spec.quantised:
        return _pack_half(codes)
    halves = codes.unflatten(-3, (-1, TILE)).unflatten(-1, (2, -1))  # [..., half, 16, H, 2, D/2]
    records = halves.movedim(-3, -5).movedim(-3, -1).movedim(-3, -2).flatten(-2)  # [..., H, half, D/2, 32]
    if not layout.key_runs:
        return packing.pack(records, spec.bits).flatten(-3)
    parts = []
    for _, runs in groupby(layout.key_runs, key=lambda run: run.head):
        packed = [packing.pack(records[..., r.head, :, list(r.units), :], r.width).flatten(-2) for r in runs]
        parts.append(torch.cat(packed, dim=-1).flatten(-2))
    return torch.cat(parts, dim=-1)


def _unpack_key(data: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    spec, dim = layout.spec.key, layout.key_dim
    if not spec.quantised:
        return _unpack_half(data, dim)
    if layout.key_runs:
        records = _unpack_key_runs(data, layout)
    else:
        records = packing.unpack(data.unflatten(-1, (PAGE // TILE, dim // 2, -1)), spec.bits, 2 * TILE)
    codes = records.unflatten(-1, (2, TILE))  # [..., H, half, D/2, 2, 16]
    halves = codes.movedim(-2, -3).movedim(-1, -3).movedim(-5, -3)  # [..., half, 16, H, 2, D/2]
    return halves.flatten(-5, -4).flatten(-2)


def _unpack_key_runs(data: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """uint8 [..., bytes] -> records [..., H, half, D/2, 32]."""
    shape = (*data.shape[:-1], layout.heads, PAGE // TILE, layout.key_dim // 2, 2 * TILE)
    records, start = data.new_empty(shape), 0
    for head, group in groupby(layout.key_runs, key=lambda run: run.head):
        runs = list(group)
        half_bytes = [len(run.units) * run.width * 2 * TILE // 8 for run in runs]
        halves = data[..., start : start + 2 * sum(half_bytes)].unflatten(-1, (2, -1))
        for run, part in zip(runs, halves.split(half_bytes, dim=-1), strict=True):
            unpacked = packing.unpack(part.unflatten(-1, (len(run.units), -1)), run.width, 2 * TILE)
            records[..., head, :, list(run.units), :] = unpacked
        start += 2 * sum(half_bytes)
    return records


def _pack_value(codes: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """[..., P, H, D] -> uint8 [..., H, bytes], with widths [..., bytes]."""
    spec = layout.spec.value
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % TILE))
    if not spec.quantised:
        return _pack_half(padded)
    tiles = padded.unflatten(-1, (-1, TILE)).unflatten(-4, (-1, 2))
    records = tiles.movedim(-4, -2).movedim(-5, -3).flatten(-2)  # [..., H, tile, P/2, 32]
    if not layout.value_runs:
        return packing.pack(records, spec.bits).flatten(-3)
    runs = layout.value_runs
    return torch.cat([packing.pack(records[..., r.head, list(r.units), :, :], r.width).flatten(-3) for r in runs], -1)


def _unpack_value(data: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    spec, dim = layout.spec.value, layout.value_dim
    tiles = -(-dim // TILE)
    if not spec.quantised:
        return _unpack_half(data, tiles * TILE)[..., :dim]
    if layout.value_runs:
        records = _unpack_value_runs(data, layout, tiles)
    else:
        records = packing.unpack(data.unflatten(-1, (tiles, PAGE // 2, -1)), spec.bits, 2 * TILE)
    codes = records.unflatten(-1, (2, TILE))  # [..., H, tile, P/2, 2, 16]
    tokens = codes.movedim(-3, -5).movedim(-2, -4)  # [..., P/2, 2, H, tile, 16]
    return tokens.flatten(-5, -4).flatten(-2)[..., :dim]


def _unpack_value_runs(data: torch.Tensor, layout: PageLayout, tiles: int) -> torch.Tensor:
    """uint8 [..., bytes] -> records [..., H, tile, P/2, 32]."""
    records = data.new_empty(*data.shape[:-1], layout.heads, tiles, PAGE // 2, 2 * TILE)
    sizes = [len(run.units) * run.width * TILE * PAGE // 8 for run in layout.value_runs]
    for run, part in zip(layout.value_runs, data.split(sizes, dim=-1), strict=True):
        unpacked = packing.unpack(part.unflatten(-1, (len(run.units), PAGE // 2, -1)), run.width, 2 * TILE)
        records[..., run.head, list(run.units), :, :] = unpacked
    return records


def _pack_half(x: torch.Tensor) -> torch.Tensor:
    return x.half().movedim(-2, -3).contiguous().view(torch.uint8).flatten(-2)


def _unpack_half(data: torch.Tensor, dim: int) -> torch.Tensor:
    return data.contiguous().view(torch.float16).unflatten(-1, (PAGE, dim)).movedim(-3, -2)
