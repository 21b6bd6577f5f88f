"""One attention layer of any shape with numbers like a model's: for timing, where no model of that shape is at hand.

Frames, levels and widths are those of the artifact's middle layer, repeated or cut to the shape asked for. Tokens are
drawn inside the frames, a few far out, so that outliers are found where they would be.
"""

from typing import NamedTuple

import torch

from kvcalib.artifact.schema import Artifact
from kvcalib.quant.rope import Rope, make_rope, to_post_rope
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec

THETA = 10000.0
SPREAD = 0.35
"""Standard deviation of a token in units of its channel's range."""


class Shape(NamedTuple):
    """Heads of queries, heads of keys and values, channels of each."""

    query_heads: int
    heads: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.query_heads}/{self.heads}/{self.dim}"


class SyntheticLayer(NamedTuple):
    key_tables: Tables
    value_tables: Tables
    rope: Rope

    def tokens(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """key [1, H, count, D] after rotary embedding, value, positions [1, count]."""
        positions = torch.arange(count)
        key = to_post_rope(_draw(self.key_tables, count, generator), positions, self.rope)
        key = key[..., self.rope.order.argsort()]
        value = _draw(self.value_tables, count, generator)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None], positions[None]


def synthetic_layer(artifact: Artifact, spec: CacheSpec, shape: Shape, generator: torch.Generator) -> SyntheticLayer:
    """spec: the artifact's own, or another one whose levels need no fit."""
    layers = list(artifact.layers.values())
    middle = layers[len(layers) // 2]
    own = spec == artifact.spec
    key, value = (
        _tables(getattr(middle, name), getattr(spec, name), shape, own=own, unit=unit)
        for name, unit in (("key", 1), ("value", 16))
    )
    frequencies = THETA ** -(torch.arange(shape.dim // 2) * 2 / shape.dim)
    return SyntheticLayer(key, value, make_rope(shape.dim, "half", frequencies))


def _tables(model: Tables, spec: TensorSpec, shape: Shape, *, own: bool, unit: int) -> Tables:
    """unit: channels that share a width side by side (1: the halves of a rotary pair lie half a head apart)."""
    size = (shape.heads, shape.dim)
    zero, scale = _resized(model.zero, size), _resized(model.scale, size)
    if not own:
        return Tables(zero, scale, _uniform(spec))
    levels, edges = model.levels, model.edges
    if levels.shape[0] > 1:
        book = torch.arange(spec.book_count(*size)) % levels.shape[0]
        levels, edges = levels[book], None if edges is None else edges[book]
    weight = None if model.weight is None else _resized(model.weight, size)
    widths = None if model.widths is None else _widths(model.widths, size, unit)
    read = {field: _resized(getattr(model, field), size) for field in ("read_zero", "read_scale") if spec.unbiased}
    tables = Tables(zero, scale, levels, weight, widths, trellis=model.trellis, edges=edges, **read)
    return _with_feedback(tables, spec)


def _with_feedback(tables: Tables, spec: TensorSpec) -> Tables:
    """A matrix of zeros: feedback decides which codes are written, not how long they take to write or to read."""
    if not spec.feeds_back:
        return tables
    heads, dim = tables.zero.shape
    order = torch.arange(dim, dtype=torch.int16).expand(heads, -1).contiguous()
    return tables._replace(feedback=torch.zeros(heads, dim, dim), order=order)


def _widths(widths: torch.Tensor, size: tuple[int, int], unit: int) -> torch.Tensor:
    heads, dim = size
    if unit == 1:
        half = _resized(widths[:, : widths.shape[1] // 2], (heads, dim // 2))
        return half.repeat(1, 2)
    tiles = _resized(widths[:, ::unit], (heads, -(-dim // unit)))
    return tiles.repeat_interleave(unit, dim=1)[:, :dim].contiguous()


def _resized(table: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[H, D] repeated and cut to another size."""
    rows, columns = (torch.arange(wanted) % there for wanted, there in zip(size, table.shape, strict=True))
    return table[rows][:, columns].contiguous()


def _uniform(spec: TensorSpec) -> torch.Tensor:
    if spec.range == "static":
        return torch.linspace(-1, 1, 2**spec.bits).bfloat16().float()[None]
    return torch.arange(2.0**spec.bits)[None]


def _draw(tables: Tables, count: int, generator: torch.Generator) -> torch.Tensor:
    """fp32 [count, H, D]: normal inside the frame, one in a hundred four times as far out."""
    normal = torch.randn(count, *tables.zero.shape, generator=generator) * SPREAD
    far = torch.rand(normal.shape, generator=generator) < 0.01
    return tables.zero + tables.scale * torch.where(far, 4 * normal, normal)
