"""What the kernel needs to know of a layer, prepared once: the structs of native/layer.h and what they point to.

Tables are laid out for look-ups in registers: 16 entries where a width has up to 16 levels (repeated to fill them),
2**width beyond. Keys with a static range and up to 5 bits get a table per channel with the frame folded in
(level * scale + zero), which saves the kernel all arithmetic between look-up and rotation.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

import torch

from kvcalib.quant.codebook import table_of
from kvcalib.quant.page import TILE, PageLayout, Run
from kvcalib.quant.rope import Rope
from kvcalib.quant.rotation import largest_power_of_two
from kvcalib.quant.spec import PAGE, Tables

_RANGES = {"static": 0, "group": 1, "token": 2, "norm": 2}
_FOLDED_BITS = 5
_DIGITS, _BASE = 4, 64
"""Positions are written with four digits to base 64, each with its table of cos and sin."""


class CRun(Structure):
    _fields_ = [("width", c_int32), ("units", c_int32)]


class CSide(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dim", "padded", "coded", "range", "group", "cells", "folded", "channel_books")),
        *((f"{name}_at", c_int64) for name in ("step", "base", "corrections", "positions", "rows", "codes")),
        *((name, POINTER(c_float)) for name in ("zero", "scale", "tables")),
        ("table_at", POINTER(c_int64)),
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
        self.buffers: dict[str, torch.Tensor] = {}
        self.struct = CLayer(heads=layout.heads, page_bytes=layout.nbytes)
        self._side("key", layout, key_tables)
        self._side("value", layout, value_tables)
        self._rope(layout, rope)
        if layout.spec.value.rotation == "hadamard":
            self.struct.hadamard = largest_power_of_two(layout.value_dim)

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
        for frame in ("zero", "scale"):
            padded = torch.nn.functional.pad(getattr(tables, frame).float(), (0, side.padded - dim))
            self._point(side, frame, padded, f"{name}_{frame}")
        runs = _all_runs(name, layout)
        if spec.quantised:
            side.folded = name == "key" and side.range == 0 and max(run.width for run in runs) <= _FOLDED_BITS
            side.channel_books = name == "value" and spec.books == "channel"
            self._tables(name, spec, tables, runs, side)
        self._runs(name, layout, runs, side)

    def _tables(self, name: str, spec, tables: Tables, runs: list[Run], side: CSide) -> None:
        """Tables of every unit, shared where equal, and where each begins."""
        heads, dim = tables.zero.shape
        width_unit = dim // 2 if name == "key" else TILE
        parts, starts, known, end = [], [], {}, 0
        for run in runs:
            for unit in run.units:
                groups = [[unit], [unit + width_unit]] if name == "key" else [range(unit * TILE, (unit + 1) * TILE)]
                for channels in groups:
                    own = tuple(min(c, dim - 1) for c in channels)
                    key = _identity(own, run, spec, side)
                    if key not in known:
                        known[key] = end
                        parts.append(_entries(own if side.channel_books else own[:1], run, tables, spec, side.folded))
                        end += parts[-1].numel()
                    starts.append(known[key])
        self._point(side, "tables", torch.cat(parts), f"{name}_tables")
        self._point(side, "table_at", torch.tensor(starts), f"{name}_table_at")

    def _runs(self, name: str, layout: PageLayout, runs: list[Run], side: CSide) -> None:
        heads, records = layout.heads, 2 if name == "key" else PAGE // 2
        counts = [sum(run.head < head for run in runs) for head in range(heads + 1)]
        sizes = [sum(4 * r.width * len(r.units) * records for r in runs if r.head == h) for h in range(heads)]
        ends = torch.tensor([0, *sizes]).cumsum(0)
        self._point(
            side, "runs", torch.tensor([[r.width, len(r.units)] for r in runs], dtype=torch.int32), f"{name}_runs"
        )
        self._point(side, "run_at", torch.tensor(counts, dtype=torch.int32), f"{name}_run_at")
        units = [unit for run in runs for unit in run.units]
        self._point(side, "units", torch.tensor(units, dtype=torch.int32), f"{name}_units")
        self._point(side, "head_at", ends, f"{name}_head_at")

    def _rope(self, layout: PageLayout, rope: Rope) -> None:
        self._point(self.struct, "order", rope.order.cpu().long(), "order")
        if layout.spec.key.rope != "pre":
            return
        turning = ((rope.inv_freq != 0) | (rope.gain != 1)).nonzero()
        pairs = int(turning.max()) + 1 if turning.numel() else 0
        self.struct.rotating = pairs
        frequency, gain = rope.inv_freq[:pairs].double().cpu(), rope.gain[:pairs].double().cpu()
        angle = torch.arange(PAGE) * frequency[:, None]
        relative = torch.stack([angle.cos(), angle.sin()], dim=1) * gain[:, None, None]
        self._point(self.struct, "relative", relative.float(), "relative")
        places = torch.arange(_BASE) * _BASE ** torch.arange(_DIGITS)[:, None]
        turns = places[..., None] * frequency
        self._point(self.struct, "turns", torch.stack([turns.cos(), turns.sin()], dim=2), "turns")


def _all_runs(name: str, layout: PageLayout) -> list[Run]:
    """The runs of every head, also where one width is used everywhere."""
    runs = layout.key_runs if name == "key" else layout.value_runs
    if runs:
        return list(runs)
    units = layout.key_dim // 2 if name == "key" else -(-layout.value_dim // TILE)
    bits = layout.tensor_spec(name).bits
    return [Run(head, bits, tuple(range(units))) for head in range(layout.heads)]


def _identity(channels: tuple[int, ...], run: Run, spec, side: CSide) -> tuple:
    """Equal for units that can share a table."""
    if side.folded or spec.books == "channel":
        return (run.head, channels)
    return (run.width, run.head if spec.books == "head" else 0)


def _entries(channels: tuple[int, ...], run: Run, tables: Tables, spec, folded: bool) -> torch.Tensor:
    """The tables of some channels of one head, end to end, padded to the entries that a look-up expects."""
    heads, dim = tables.zero.shape
    levels = tables.levels if tables.widths is None else table_of(tables.levels, run.width)
    row = torch.tensor([(run.head * dim + c) * levels.shape[0] // (heads * dim) for c in channels])
    own = levels[row.to(levels.device)].float()
    missing = 2**run.width - own.shape[1]
    own = torch.cat([own, own[:, -1:].expand(-1, missing)], dim=1)
    if folded:
        channel = torch.tensor(channels, device=own.device)
        own = own * tables.scale[run.head, channel, None] + tables.zero[run.head, channel, None]
    return own.repeat(1, max(1, 16 // own.shape[1])).flatten().cpu()
