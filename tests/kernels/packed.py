"""Packed layers made to order, and attention over them in float64."""

from dataclasses import dataclass

import torch

from kvcalib.fit import grids
from kvcalib.fit.feedback import fit_feedback
from kvcalib.kernels.packed import Packed
from kvcalib.quant import ranges, rope, sparse, trellis
from kvcalib.quant.codebook import decode, middles
from kvcalib.quant.codec import Coded, quantise
from kvcalib.quant.page import TILE, PageLayout, read_page, write_page
from kvcalib.quant.rotation import hadamard, largest_power_of_two
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec


@dataclass(frozen=True)
class Shape:
    """group: query heads per kv head; counts: pages of every row; short: tokens of the last page of row 0."""

    heads: int = 2
    group: int = 2
    dim: int = 32
    value_dim: int = 32
    queries: int = 1
    counts: tuple[int, ...] = (3,)
    sink: int = 2
    recent: int = 5
    short: int = PAGE
    rotary: int | None = None
    gain: float = 1.0
    first: int = 0
    dtype: torch.dtype = torch.float32


def make_packed(key: TensorSpec, value: TensorSpec, shape: Shape, seed: int = 0) -> Packed:
    """Random contents; whatever a kernel must not read is NaN."""
    g = torch.Generator().manual_seed(seed)
    spec = CacheSpec(key, value, shape.recent, shape.sink)
    key_tables, value_tables = (
        make_tables(key, shape.heads, shape.dim, g),
        make_tables(value, shape.heads, shape.value_dim, g),
    )
    layout = PageLayout(spec, key_tables, value_tables)
    batch, capacity = len(shape.counts), max(shape.counts) + 1
    pages = torch.full((batch, capacity, layout.nbytes), 0xFF, dtype=torch.uint8)  # NaN wherever it is fp16
    for row, count in enumerate(shape.counts):
        if count == 0:
            continue
        x = torch.randn(count, PAGE, shape.heads, shape.dim, generator=g)
        y = torch.randn(count, PAGE, shape.heads, shape.value_dim, generator=g)
        tokens = torch.full((count,), PAGE, dtype=torch.int32)
        if row == 0:
            tokens[-1] = shape.short
        first = shape.first + shape.sink + PAGE * torch.arange(count) + 7 * (torch.arange(count) > 1)  # with a gap
        coded = quantise(x, key, key_tables), quantise(y, value, value_tables)
        pages[row, :count] = write_page(*coded, first, layout, tokens)
    visible = torch.rand(batch, shape.queries, shape.recent, generator=g) < 0.7
    visible[:, :, :1] = True
    sinks = torch.full((batch,), shape.sink)
    sinks[1:2] = 0  # a row that has moved nothing yet
    return Packed(
        pages, torch.tensor(shape.counts),
        *(_exact(shape, batch, shape.sink, dim, sinks, g) for dim in (shape.dim, shape.value_dim)), sinks,
        *(_exact(shape, batch, shape.recent, dim, None, g) for dim in (shape.dim, shape.value_dim)), visible, None,
        layout, key_tables, value_tables, make_rope(shape),
    )  # fmt: skip


def make_rope(shape: Shape) -> rope.Rope:
    rotary = shape.dim if shape.rotary is None else shape.rotary
    if rotary == 0:
        return rope.make_rope(shape.dim, "none", torch.empty(0))
    frequencies = 1.0 / 10000 ** (torch.arange(rotary // 2) / (rotary // 2))
    return rope.make_rope(shape.dim, "interleaved" if shape.rotary else "half", frequencies, shape.gain)


def make_tables(spec: TensorSpec, heads: int, dim: int, g: torch.Generator) -> Tables:
    zero, scale = torch.randn(heads, dim, generator=g) * 0.1, torch.rand(heads, dim, generator=g) + 0.5
    tables = Tables(zero, scale, _levels(spec, spec.book_count(heads, dim), g))
    if spec.ranks_by_error:
        tables = tables._replace(weight=torch.rand(heads, dim, generator=g))
    if spec.levels == "mixed":
        tables = tables._replace(widths=_widths(spec, heads, dim, g))
    if spec.rounding == "trellis":
        entries = trellis.table_offset(spec.bits + 1)
        levels = (torch.randperm(entries, generator=g) - entries // 2) / 64  # no two alike: equal ones would be ties
        tables = tables._replace(trellis=levels)
    if spec.q_norm:
        moved = (1.25 * tables.levels + 0.125).bfloat16().float()
        tables = tables._replace(levels=moved, edges=middles(tables.levels))
    if spec.unbiased:
        stretch = 1 + 0.2 * torch.rand(heads, dim, generator=g)
        tables = tables._replace(read_zero=tables.zero + 0.05, read_scale=tables.scale * stretch)
    return _with_feedback(tables, g) if spec.feeds_back else tables


def _with_feedback(tables: Tables, g: torch.Generator) -> Tables:
    common = 2 * torch.randn(500, tables.zero.shape[0], 1, generator=g)
    matrix, order, weight = fit_feedback(torch.randn(500, *tables.zero.shape, generator=g) + common)
    return tables._replace(feedback=matrix, order=order, weight=None if tables.weight is None else weight)


def _levels(spec: TensorSpec, books: int, g: torch.Generator) -> torch.Tensor:
    if spec.levels == "mixed":
        rows = [torch.cat([_nuq(w, g) for w in range(1, spec.bits + 1)]) for _ in range(books)]
    elif spec.levels == "nuq":
        rows = [_nuq(spec.bits, g) for _ in range(books)]
    elif spec.levels == "nf":
        rows = [torch.as_tensor(grids.normal_float(spec.bits))] * books
    elif spec.levels == "fp8":
        rows = [torch.as_tensor(grids.fp8_e4m3()) / 100] * books
    elif spec.levels == "uniform":
        rows = [torch.as_tensor(grids.uniform(spec.bits, static=spec.range == "static"))] * books
    else:
        rows = [torch.tensor([0.0, 1.0])]
    return torch.stack([row.bfloat16().float() for row in rows])


def _nuq(bits: int, g: torch.Generator) -> torch.Tensor:
    steps = torch.rand(2**bits, generator=g) + 0.5
    return (2 * steps.cumsum(0) / steps.sum() - 1).bfloat16().float()


def _widths(spec: TensorSpec, heads: int, dim: int, g: torch.Generator) -> torch.Tensor:
    """Random per rotary pair of keys, per tile of values."""
    if spec.rope == "none":
        tiles = torch.randint(1, spec.bits + 1, (heads, -(-dim // TILE)), generator=g)
        return tiles.repeat_interleave(TILE, dim=1)[:, :dim].to(torch.uint8).contiguous()
    pairs = torch.randint(1, spec.bits + 1, (heads, dim // 2), generator=g)
    return pairs.repeat(1, 2).to(torch.uint8)


def _exact(shape: Shape, batch: int, count: int, dim: int, used, g: torch.Generator) -> torch.Tensor:
    """[B, H, count, dim]: a view of a larger buffer of NaN, NaN also from used[row] on."""
    buffer = torch.full((batch, shape.heads, count + 3, dim), torch.nan, dtype=shape.dtype)
    for row in range(batch):
        n = count if used is None else int(used[row])
        buffer[row, :, :n] = torch.randn(shape.heads, n, dim, generator=g).to(shape.dtype)
    return buffer[:, :, :count]


def attend_exactly(query: torch.Tensor, packed: Packed, *, scale: float, softcap: float | None = None) -> torch.Tensor:
    """`reference.attend` in float64, row by row: [B, T, Hq, Dv]."""
    rows = [_row(query[r], packed, r, scale, softcap) for r in range(query.shape[0])]
    return torch.stack(rows)


def _row(query, packed, row, scale, softcap):
    sinks, count = int(packed.sink_counts[row]), int(packed.page_counts[row])
    pages, order, layout = packed.pages[row, :count], packed.rope.order, packed.layout
    coded_key, coded_value, first = read_page(pages, layout)
    key = _dequantise(coded_key, layout.spec.key, packed.key_tables)
    if layout.spec.key.rope == "pre":
        angle = (first[:, None].double() + torch.arange(PAGE))[..., None] * packed.rope.inv_freq.double()
        key = rope.rotate(key, *((f(angle) * packed.rope.gain.double())[:, :, None] for f in (torch.cos, torch.sin)))
    value = _dequantise(coded_value, layout.spec.value, packed.value_tables)
    stored = (torch.arange(PAGE) < layout.read(pages, "tokens")).flatten()
    keys = [
        packed.sink_key[row][:, :sinks][..., order],
        key.flatten(0, 1).transpose(0, 1),
        packed.recent_key[row][..., order],
    ]
    values = [packed.sink_value[row][:, :sinks], value.flatten(0, 1).transpose(0, 1), packed.recent_value[row]]
    keys, values = (torch.cat([part.double() for part in parts], dim=1) for parts in (keys, values))
    moved = torch.cat([torch.ones(sinks, dtype=torch.bool), stored]).expand(query.shape[1], -1)
    if packed.moved_visible is not None:
        slots, start = packed.moved_visible[row], packed.sink_key.shape[2]
        moved = moved & torch.cat([slots[:, :sinks], slots[:, start : start + count * PAGE]], dim=1)
    visible = torch.cat([moved, packed.recent_visible[row]], dim=1)
    grouped = query[..., order].double().unflatten(0, (keys.shape[0], -1))  # [H, G, T, D]
    scores = grouped @ keys.transpose(-1, -2)[:, None] * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    return (weights @ values[:, None]).flatten(0, 1).transpose(0, 1)


def _dequantise(coded: Coded, spec: TensorSpec, tables: Tables) -> torch.Tensor:
    dim = tables.zero.shape[1]
    if not spec.quantised:
        u = coded.codes.double()
    else:
        levels = decode(coded.codes, tables) if spec.span is None else trellis.decode(coded.codes, tables, spec.span)
        u = levels.double()
        u = u if coded.step is None else u * ranges.expand(coded.step, spec, dim).double()
        u = u if coded.base is None else u + ranges.expand(coded.base, spec, dim).double()
    if coded.positions is not None:
        zeros = torch.zeros(u.shape)
        u = u + sparse.merge(zeros, coded.positions, coded.corrections).double()
    x = u * tables.scale.double() + tables.zero.double()
    if spec.rotation == "none":
        return x
    block = hadamard(largest_power_of_two(dim)).double()
    block = block.sign() / block.shape[0] ** 0.5
    return (x.unflatten(-1, (-1, block.shape[0])) @ block).flatten(-2)
