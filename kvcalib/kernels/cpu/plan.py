"""What the kernel needs to know of a layer, prepared once: the structs of native/layer.h and what they point to.

Tables are laid out for look-ups in registers: 16 entries where a width has up to 16 levels (repeated to fill them),
2**width beyond. Keys with a static range and up to 6 bits get a table per channel with the frame folded in
(level * scale + zero), which saves the kernel all arithmetic between look-up and rotation.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache

import torch

from kvcalib.quant import trellis
from kvcalib.quant.codebook import table_of
from kvcalib.quant.page import TILE, PageLayout, Run
from kvcalib.quant.rope import Rope
from kvcalib.quant.rotation import largest_power_of_two
from kvcalib.quant.spec import PAGE, Tables

_RANGES = {"static": 0, "group": 1, "token": 2, "norm": 2}
_NARROW_BITS, _WIDE_BITS = 6, 5
_DIGITS, _BASE = 4, 64
"""Positions are written with four digits to base 64, each with its table of cos and sin."""


class CRun(Structure):
    _fields_ = [
        ("width", c_int32),
        ("units", c_int32),
        ("table", c_int64),
        ("table_step", c_int32),
        ("rotates", c_int32),
    ]


class CSide(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dim", "padded", "coded", "range", "group", "cells")),
        *((name, c_int32) for name in ("folded", "channel_books", "narrow", "trellis")),
        ("center", c_float),
        *((f"{name}_at", c_int64) for name in ("step", "base", "corrections", "positions", "rows", "codes")),
        *((name, POINTER(c_float)) for name in ("zero", "scale", "tables")),
        ("runs", POINTER(CRun)),
        ("run_at", POINTER(c_int32)),
        ("units", POINTER(c_int32)),
        ("head_at", POINTER(c_int64)),
    ]


class CLayer(Structure):
    _fields_ = [
        ("heads", c_int32),
        ("rotating", c_int32),
        ("page_bytes", c_int64),
        ("key", CSide),
        ("value", CSide),
        ("order", POINTER(c_int64)),
        ("relative", POINTER(c_float)),
        ("turns", POINTER(c_double)),
        ("hadamard", c_int32),
        ("unused", c_int32),
    ]


class CExact(Structure):
    _fields_ = [
        ("key", c_void_p),
        ("value", c_void_p),
        *((f"{name}_{of}", c_int64) for name in ("key", "value") for of in ("row", "head", "token")),
    ]


class CCall(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "query_heads", "queries")),
        ("query", c_void_p),
        *((f"query_{of}", c_int64) for of in ("row", "head", "token")),
        ("output", c_void_p),
        ("pages", c_void_p),
        ("pages_row", c_int64),
        ("page_counts", c_void_p),
        ("sink_counts", c_void_p),
        ("sink", CExact),
        ("recent", CExact),
        *((name, c_int64) for name in ("sink_slots", "recent_count")),
        *((name, c_int32) for name in ("exact_type", "threads")),
        ("recent_visible", c_void_p),
        *((f"recent_visible_{of}", c_int64) for of in ("row", "token")),
        ("moved_visible", c_void_p),
        *((f"moved_visible_{of}", c_int64) for of in ("row", "token")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


class Plan:
    """The constants of one layer. `struct` points into `buffers`, which live as long as the plan."""

    def __init__(self, layout: PageLayout, key_tables: Tables, value_tables: Tables, rope: Rope):
        self.made_from = (key_tables, value_tables, rope)
        self.buffers: dict[str, object] = {}
        self.struct = CLayer(heads=layout.heads, page_bytes=layout.nbytes)
        self._rope(layout, rope)
        self._side("key", layout, key_tables)
        self._side("value", layout, value_tables)
        if layout.spec.value.rotation == "hadamard":
            self.struct.hadamard = largest_power_of_two(layout.value_dim)

    def tensors(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.buffers.values() if isinstance(buffer, torch.Tensor)]

    def _point(self, owner: Structure, field: str, tensor: torch.Tensor, name: str) -> None:
        self.buffers[name] = tensor.contiguous()
        kind = dict(type(owner)._fields_)[field]
        setattr(owner, field, ctypes.cast(self.buffers[name].data_ptr(), kind))

    def _side(self, name: str, layout: PageLayout, tables: Tables) -> None:
        spec, side = layout.tensor_spec(name), getattr(self.struct, name)
        heads, dim = tables.zero.shape
        side.dim, side.padded, side.coded = dim, dim + -dim % TILE, spec.quantised
        side.range = _RANGES[spec.range] if spec.quantised else 0
        by_channels = side.range == 2 and spec.scope == "channels"
        side.group = spec.group if side.range == 1 or by_channels else 0
        side.cells = {"layer": 1, "head": heads, "channels": heads * dim // spec.group}[spec.scope]
        for section in ("step", "base", "corrections", "positions", "rows", "codes"):
            found = layout.sections.get(f"{name}_{section}")
            setattr(side, f"{section}_at", -1 if found is None else found.offset)
        for frame, numbers in zip(("zero", "scale"), tables.read_frame, strict=True):
            self._point(
                side, frame, torch.nn.functional.pad(numbers.float(), (0, side.padded - dim)), f"{name}_{frame}"
            )
        runs = _all_runs(name, layout, self.struct.rotating)
        if spec.quantised:
            side.trellis = spec.rounding == "trellis"
            side.narrow = max(run.width for run in runs) <= _NARROW_BITS
            side.folded = name == "key" and side.range == 0 and side.narrow
            side.channel_books = name == "value" and spec.books == "channel"
            if name == "value" and spec.levels == "uniform" and side.base_at >= 0:
                side.center = float(tables.levels.mean())
        self._runs(name, layout, runs, tables, side)

    def _runs(self, name: str, layout: PageLayout, runs: list[Run], tables: Tables, side: CSide) -> None:
        records = 2 if name == "key" else PAGE // 2
        shared, parts, structs, end = {}, [], (CRun * len(runs))(), 0
        for struct, run in zip(structs, runs, strict=True):
            struct.width, struct.units = run.width, len(run.units)
            struct.rotates = name == "key" and run.units[0] < self.struct.rotating
            if not side.coded:
                continue
            bits = run.width + (trellis.history(run.width) if side.trellis else 0)
            wide = side.trellis and bits >= _WIDE_BITS
            key = _shared_table(run, layout.tensor_spec(name), folded=side.folded and not wide)
            entries = max(16, 2**bits)
            struct.table, struct.table_step = shared.get(key, end), 0 if key else entries
            if key not in shared:
                parts.append(_entries(name, run, tables, None if key else side.folded, entries) - side.center)
                if wide and entries == 64:
                    parts[-1] = torch.cat([parts[-1], _bytes_of_bf16(parts[-1])])
                end += parts[-1].numel()
            if key:
                shared[key] = struct.table
        self.buffers[f"{name}_runs"], side.runs = structs, structs
        self._point(side, "tables", torch.cat(parts or [torch.zeros(16, dtype=torch.float32)]), f"{name}_tables")
        counts = [sum(run.head < head for run in runs) for head in range(layout.heads + 1)]
        sizes = [sum(4 * r.width * len(r.units) * records for r in runs if r.head == h) for h in range(layout.heads)]
        self._point(side, "run_at", torch.tensor(counts, dtype=torch.int32), f"{name}_run_at")
        units = [unit for run in runs for unit in run.units]
        self._point(side, "units", torch.tensor(units, dtype=torch.int32), f"{name}_units")
        self._point(side, "head_at", torch.tensor([0, *sizes]).cumsum(0), f"{name}_head_at")

    def _rope(self, layout: PageLayout, rope: Rope) -> None:
        self._point(self.struct, "order", rope.order.cpu().long(), "order")
        frequency, gain = rope.inv_freq.double().cpu(), rope.gain.double().cpu()
        if layout.spec.key.rope != "pre":
            frequency, gain = torch.zeros_like(frequency), torch.ones_like(gain)
        turning = ((frequency != 0) | (gain != 1)).nonzero()
        self.struct.rotating = int(turning.max()) + 1 if turning.numel() else 0
        relative, turns = _angles(tuple(frequency.tolist()), tuple(gain.tolist()), self.struct.rotating)
        self._point(self.struct, "relative", relative, "relative")
        self._point(self.struct, "turns", turns, "turns")


@lru_cache(maxsize=16)
def _angles(frequency: tuple[float, ...], gain: tuple[float, ...], rotating: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`relative` and `turns` of native/layer.h; layers with the same frequencies share them."""
    frequencies = torch.tensor(frequency, dtype=torch.float64)
    angle = torch.arange(PAGE) * frequencies[:, None]
    relative = torch.stack([angle.cos(), angle.sin()], dim=1) * torch.tensor(gain, dtype=torch.float64)[:, None, None]
    places = torch.arange(_BASE) * _BASE ** torch.arange(_DIGITS)[:, None]
    turns = places[..., None] * frequencies[:rotating]
    return relative.float(), torch.stack([turns.cos(), turns.sin()], dim=2)


def _all_runs(name: str, layout: PageLayout, rotating: int) -> list[Run]:
    """The runs of every head, also for one width everywhere; pairs that rotate apart from those that do not."""
    runs = layout.key_runs if name == "key" else layout.value_runs
    if not runs:
        units = layout.key_dim // 2 if name == "key" else -(-layout.value_dim // TILE)
        bits = layout.tensor_spec(name).bits
        runs = [Run(head, bits, tuple(range(units))) for head in range(layout.heads)]
    if name == "value":
        return list(runs)
    parts = [(run, [u for u in run.units if (u < rotating) == turning]) for run in runs for turning in (True, False)]
    return [Run(run.head, run.width, tuple(units)) for run, units in parts if units]


def _shared_table(run: Run, spec, *, folded: bool) -> tuple | None:
    """What runs that share one table have in common; None where every channel has its own."""
    if folded or spec.books == "channel":
        return None
    return run.width, run.head if spec.books == "head" else 0


def _entries(name: str, run: Run, tables: Tables, folded: bool | None, entries: int) -> torch.Tensor:
    """Tables of a run, end to end. folded None: one for all; else one per channel, with or without the frame."""
    heads, dim = tables.zero.shape
    if folded is None:
        channels = torch.tensor([run.units[0]])
    elif name == "key":
        channels = (torch.tensor(run.units)[:, None] + torch.tensor([0, dim // 2])).flatten()
    else:
        channels = (torch.tensor(run.units)[:, None] * TILE + torch.arange(TILE)).flatten().clamp_max(dim - 1)
    levels = _levels(tables, run.width).float().cpu()
    own = levels[(run.head * dim + channels) * levels.shape[0] // (heads * dim)]
    own = torch.cat([own, own[:, -1:].expand(-1, 2 ** (own.shape[1] - 1).bit_length() - own.shape[1])], dim=1)
    if folded:
        zero, scale = (frame.cpu()[run.head, channels, None] for frame in tables.read_frame)
        own = own * scale + zero
    return own.repeat(1, entries // own.shape[1]).flatten()


def _bytes_of_bf16(levels: torch.Tensor) -> torch.Tensor:
    """The low bytes of all levels, then the high ones, as floats of the same bits: [n / 2]."""
    return levels.bfloat16().view(torch.uint8).view(-1, 2).T.contiguous().flatten().view(torch.float32)


def _levels(tables: Tables, width: int) -> torch.Tensor:
    """[books, entries]: all levels that codes of one width can mean."""
    if tables.trellis is not None:
        return trellis.table_of(tables.trellis, width)[None]
    return tables.levels if tables.widths is None else table_of(tables.levels, width)
