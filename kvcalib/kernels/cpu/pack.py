"""Quantising and packing of whole pages by the compiled kernel: the same signature as `kernels.reference.pack`.

The bytes are those of the reference, with one exception: torch adds up means, norms, Hadamard transforms and error
feedback in another order, so where a range, a rank or a code hangs on the last bit of such a sum it may fall on the
other side.
"""

import ctypes
import weakref
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch

from kvcalib.kernels.cpu.attend import FLOAT_TYPES, ISAS, fastest, native
from kvcalib.kernels.cpu.attend import plan_for as layer_plan
from kvcalib.quant.codebook import middles, table_of
from kvcalib.quant.page import PageLayout
from kvcalib.quant.rope import Rope, cos_sin
from kvcalib.quant.rotation import largest_power_of_two
from kvcalib.quant.spec import PAGE, Tables

_RANGES = {"static": 0, "group": 1, "token": 2, "norm": 3}
_SCOPES = {"layer": 0, "head": 1, "channels": 2}
plans: "weakref.WeakKeyDictionary[PageLayout, PackPlan]" = weakref.WeakKeyDictionary()


class CPackSide(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("range", "scope", "group", "outliers")),
        *((name, c_int32) for name in ("by_error", "steps", "hadamard", "span", "bits", "unused")),
        *((name, c_void_p) for name in ("zero", "scale", "stretch", "shift", "weight", "levels", "edges")),
        *((name, c_void_p) for name in ("table", "entries", "feedback", "order", "trellis", "widths")),
    ]


class CPack(Structure):
    _fields_ = [("key", CPackSide), ("value", CPackSide)]


class CPackCall(Structure):
    _fields_ = [
        ("pages", c_int64),
        *((name, c_void_p) for name in ("key", "value")),
        *((name, c_int64) for name in ("key_head", "key_token", "value_head", "value_token")),
        *((name, c_void_p) for name in ("columns", "first", "tokens", "cosine", "sine", "out")),
        *((name, c_int32) for name in ("type", "threads")),
    ]


class PackPlan:
    """The constants of one layer; `struct` points into `buffers`."""

    def __init__(self, layout: PageLayout, key_tables: Tables, value_tables: Tables):
        self.made_from = (key_tables, value_tables)
        self.buffers: list[torch.Tensor] = []
        self.struct = CPack()
        self._side(self.struct.key, "key", layout, key_tables)
        self._side(self.struct.value, "value", layout, value_tables)

    def tensors(self) -> list[torch.Tensor]:
        return self.buffers

    def _side(self, side: CPackSide, name: str, layout: PageLayout, tables: Tables) -> None:
        spec = layout.tensor_spec(name)
        heads, dim = tables.zero.shape
        self._point(side, "zero", tables.zero.float())
        self._point(side, "scale", tables.scale.float())
        if not spec.quantised:
            return
        side.range, side.scope, side.group = _RANGES[spec.range], _SCOPES[spec.scope], spec.group
        side.outliers, side.by_error = spec.outliers_per_page(heads, dim), spec.ranks_by_error
        side.steps = tables.levels.shape[-1] - 1 if spec.levels == "uniform" else 0
        side.hadamard = largest_power_of_two(dim) if spec.rotation == "hadamard" else 0
        if spec.unbiased and spec.outliers > 0:
            self._point(side, "stretch", (tables.scale / tables.read_scale).float())
            self._point(side, "shift", ((tables.zero - tables.read_zero) / tables.read_scale).float())
        if spec.ranks_by_error:
            self._point(side, "weight", tables.weight.float())
        if spec.feeds_back:
            self._point(side, "feedback", tables.feedback.bfloat16())
            self._point(side, "order", tables.order.to(torch.int16))
        if spec.span is not None:
            side.span, side.bits = spec.span, spec.bits
            self._point(side, "trellis", tables.trellis.float())
            self._point(side, "widths", tables.widths.to(torch.uint8))
        self._levels(side, tables)

    def _levels(self, side: CPackSide, tables: Tables) -> None:
        """Tables and the edges between their levels, end to end, and where each channel's own begins."""
        heads, dim = tables.zero.shape
        widths = [0] if tables.widths is None else sorted(set(tables.widths.flatten().tolist()))
        levels, edges, starts, end = [], [], {}, 0
        for width in widths:
            rows = (table_of(tables.levels, width) if width else tables.levels).float().cpu()
            levels.append(rows.flatten())
            between = middles(rows) if tables.edges is None else tables.edges.float().cpu()
            edges.append(torch.nn.functional.pad(between, (0, 1)).flatten())
            starts[width] = (end, rows.shape[1])
            end += rows.numel()
        book = torch.arange(heads * dim) * len(tables.levels) // (heads * dim)
        own = [0] * (heads * dim) if tables.widths is None else tables.widths.flatten().tolist()
        first, entries = torch.tensor([starts[width] for width in own], dtype=torch.int32).unbind(1)
        self._point(side, "levels", torch.cat(levels))
        self._point(side, "edges", torch.cat(edges))
        self._point(side, "table", (first + book * entries).int())
        self._point(side, "entries", entries)

    def _point(self, side: CPackSide, field: str, tensor: torch.Tensor) -> None:
        self.buffers.append(tensor.cpu().contiguous())
        setattr(side, field, self.buffers[-1].data_ptr())


def covers(layout: PageLayout) -> bool:
    """Whether the kernel knows how this format chooses its outliers: not KVQuant's thresholds and tails."""
    specs = (layout.spec.key, layout.spec.value)
    return all(not spec.quantised or spec.rank in ("error", "range") for spec in specs)


def pack(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    layout: PageLayout,
    key_tables: Tables,
    value_tables: Tables,
    rope: Rope,
    isa: str | None = None,
) -> torch.Tensor:
    """See `kernels.reference.pack`."""
    assert covers(layout), "outliers chosen by threshold or tails are packed by the reference"
    pages = torch.empty(len(counts), layout.nbytes, dtype=torch.uint8)
    call, _alive = call_struct(key, value, columns, positions, counts, layout, rope, pages)
    # held until the call returns: another thread may put plans of its own in their place
    layer, own = layer_plan(layout, key_tables, value_tables, rope), plan_for(layout, key_tables, value_tables)
    if native().kv_pack(*map(ctypes.byref, (layer.struct, own.struct, call)), ISAS[isa or fastest()]):
        raise MemoryError("the packing kernel could not allocate its scratch memory")
    return pages


def call_struct(key, value, columns, positions, counts, layout: PageLayout, rope: Rope, pages: torch.Tensor):
    """The call as the kernel reads it, and the tensors that it points to."""
    if key.dtype not in FLOAT_TYPES or key.dtype != value.dtype:
        key, value = key.float(), value.float()
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    cosine, sine = cos_sin(positions, rope) if layout.spec.key.rope == "pre" else (None, None)
    first, counts = positions[::PAGE].int().contiguous(), counts.int().contiguous()
    call = CPackCall(
        *(len(counts), key.data_ptr(), value.data_ptr(), *key.stride()[:2], *value.stride()[:2]),
        *(columns.data_ptr(), first.data_ptr(), counts.data_ptr()),
        *((None, None) if cosine is None else (cosine.data_ptr(), sine.data_ptr())),
        *(pages.data_ptr(), FLOAT_TYPES[key.dtype], torch.get_num_threads()),
    )
    return call, (key, value, columns, cosine, sine, first, counts)


def plan_for(layout: PageLayout, key_tables: Tables, value_tables: Tables) -> PackPlan:
    plan = plans.get(layout)
    if plan is None or plan.made_from[0] is not key_tables or plan.made_from[1] is not value_tables:
        plan = plans[layout] = PackPlan(layout, key_tables, value_tables)
    return plan
