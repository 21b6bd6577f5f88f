"""Levels "mixed": how many bits each rotary pair of keys and each tile of value channels gets.

    D[unit, w] = sum over the sample of gradient^2 * (x - x')^2 of its channels at width w, per token

is, to second order, what the unit adds to the loss. One multiplier over the units of all layers, keys and values
together, spends the budget where a bit buys most (`fit.allocate`). Tables of levels belong to a layer and a width;
they are fitted to all channels first, then to those that have the width, and the bits are allocated again.

The budget is in true bits per element of a page: ranges, outliers, pointers and the position come off first.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvcalib.calib import taps
from kvcalib.errors import ConfigError
from kvcalib.fit import kmeans, trellis
from kvcalib.fit.allocate import allocate
from kvcalib.fit.channels import refine
from kvcalib.fit.levels import reassign, to_bf16_distinct
from kvcalib.fit.moments import Moments, distortion, measure, pooled
from kvcalib.quant import codebook
from kvcalib.quant.page import TILE, PageLayout
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec

_BINS = 384
_STEPS = 100
_ROUNDS = 2
_THIN = 2
"""Bits are allocated on every second page; levels are fitted to all."""


class Points(NamedTuple):
    """A sample as the levels see it: v and weight [n, H, D] float32, kept: the inliers."""

    v: torch.Tensor
    weight: torch.Tensor
    kept: torch.Tensor


Read = Callable[[int, str, Tables, int], Points]
"""(layer, "key" or "value", tables, n) -> Points of every n-th page of the sample under those tables."""


def fit_mixed(
    read: Read, frames: dict[int, dict[str, Tables]], spec: CacheSpec, budget: float, progress: taps.Progress
) -> tuple[dict, dict]:
    """frames: {layer: {"key": Tables, "value": Tables}} -> (the same with levels and widths, summary).

    Raises ConfigError if the budget is below one bit per element and the rest of a page.
    """
    check_budget(spec, [(*t["key"].zero.shape, t["value"].zero.shape[1]) for t in frames.values()], budget)
    names = [name for name in ("key", "value") if getattr(spec, name).levels == "mixed"]
    units = [(layer, name) for layer in frames for name in names]
    fitted = {layer: dict(tables) for layer, tables in frames.items()}
    for layer, name in progress(units, len(units), "levels"):
        widest = torch.full_like(fitted[layer][name].zero, getattr(spec, name).bits, dtype=torch.uint8)
        tables = fitted[layer][name]._replace(levels=_evenly(getattr(spec, name).bits), widths=widest)
        fitted[layer][name] = tables._replace(levels=_fit_all(_measure(read(layer, name, tables, _THIN)), tables))
    for round_ in range(_ROUNDS):
        damage = {}
        for layer, name in progress(units, len(units), f"bits, round {round_ + 1} of {_ROUNDS}"):
            tables = fitted[layer][name]
            moments = _measure(read(layer, name, tables, _THIN))
            if round_ > 0:
                fitted[layer][name] = tables = tables._replace(levels=_fit_own(moments, tables))
            gain = trellis.GAIN if getattr(spec, name).rounding == "trellis" else None
            damage[layer, name] = _unit_distortion(moments, tables, name, gain)
        _set_widths(fitted, damage, spec, budget)
    for layer, name in progress(units, len(units), "levels of every width"):
        fitted[layer][name] = _finish(
            read(layer, name, fitted[layer][name], 1), fitted[layer][name], getattr(spec, name)
        )
    return fitted, _summary(fitted, names)


def _finish(points: Points, tables: Tables, spec: TensorSpec) -> Tables:
    """Tables with the levels that go with the final widths."""
    moments = _measure(points)
    tables = tables._replace(levels=_fit_own(moments, tables))
    if spec.rounding == "trellis":
        return tables._replace(trellis=_fit_trellis(points, moments, tables, spec.span))
    if spec.books == "channel":
        return tables._replace(levels=refine(points.v, points.weight, points.kept, tables))
    return tables


def _fit_trellis(points: Points, moments: Moments, tables: Tables, span: int) -> torch.Tensor:
    """Tables of width 1, 2, ... end to end; those of a width that no channel has stand alone."""
    v, weight, kept = (_spans(t.float(), span) for t in points)
    widths, rows = tables.widths.flatten(), []
    for width in range(1, _widest(tables) + 1):
        own, separate = widths == width, codebook.table_of(tables.levels, width)[0]
        sample = trellis.Sample(*(t[own].flatten(0, 1) for t in (v, weight, kept)))
        rows.append(trellis.fit_table(*pooled(moments, own.numpy()), separate, sample, width))
    return torch.cat(rows)


def _spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """[n, H, D] -> [H * D, n / span, span]."""
    return x.flatten(1).T.unflatten(1, (-1, span)).contiguous()


def check_budget(spec: CacheSpec, shapes: list[tuple[int, int, int]], budget: float) -> None:
    """shapes: heads, key and value channels of every layer. Raises ConfigError where they cannot have a bit each."""
    narrowest, price = {}, 0
    for layer, (heads, *dims) in enumerate(shapes):
        narrowest[layer] = {}
        for name, dim in zip(("key", "value"), dims, strict=True):
            is_mixed = getattr(spec, name).levels == "mixed"
            ones = torch.ones(heads, dim)
            tables = Tables(ones, ones, ones, widths=ones.to(torch.uint8) if is_mixed else None)
            narrowest[layer][name] = tables
            price += is_mixed * heads * -(-dim // _channels(name)) * _channels(name)
    if _code_bits(narrowest, spec, budget) < price:
        raise ConfigError(
            f"quant.budget={budget:g} bits per element of keys and values leaves less than one bit per code after "
            f"ranges, outliers and what is not mixed; raise it or lower quant.key.outliers and quant.value.outliers"
        )


def _set_widths(fitted: dict, damage: dict, spec: CacheSpec, budget: float) -> None:
    heads_units = {unit: table.shape[:2] for unit, table in damage.items()}
    price = np.concatenate([np.full(h * u, _channels(name)) for (_, name), (h, u) in heads_units.items()])
    widest = max(t.shape[-1] for t in damage.values())
    table = np.concatenate([_to_width(t.reshape(-1, t.shape[-1]), widest) for t in damage.values()])
    widths, start = allocate(table, price, _code_bits(fitted, spec, budget)), 0
    for (layer, name), (heads, units) in heads_units.items():
        chosen = torch.from_numpy(widths[start : start + heads * units].reshape(heads, units).astype(np.uint8))
        start += heads * units
        tables = fitted[layer][name]
        per_channel = chosen.repeat(1, 2) if name == "key" else chosen.repeat_interleave(TILE, 1)
        fitted[layer][name] = tables._replace(widths=per_channel[:, : tables.zero.shape[1]].contiguous())


def _to_width(table: np.ndarray, widest: int) -> np.ndarray:
    """[units, W] -> [units, widest]: more bits than the format has gain nothing, so they are never bought."""
    return np.pad(table, ((0, 0), (0, widest - table.shape[1])), mode="edge")


def _channels(name: str) -> int:
    return 2 if name == "key" else TILE


def _code_bits(fitted: dict, spec: CacheSpec, budget: float) -> float:
    """Bits per token, all layers, that the budget leaves for codes of mixed width."""
    left = 0.0
    for tables in fitted.values():
        layout = PageLayout(spec, tables["key"], tables["value"])
        codes = sum(layout.sections[f"{name}_codes"].nbytes for name in tables if getattr(spec, name).levels == "mixed")
        left += budget * layout.heads * (layout.key_dim + layout.value_dim) - 8 * (layout.nbytes - codes) / PAGE
    return left


def _measure(points: Points) -> Moments:
    """By channel, heads one after the other."""
    return measure(points.v.flatten(1).numpy(), (points.weight * points.kept).flatten(1).numpy(), _BINS)


def _widest(tables: Tables) -> int:
    return (tables.levels.shape[1] + 2).bit_length() - 2


def _unit_distortion(moments: Moments, tables: Tables, name: str, gain: tuple | None) -> np.ndarray:
    """float64 [H, units, widest], at each width in turn. gain: dB that come off at each width."""
    rows = (codebook.table_of(tables.levels, width)[0].double().numpy() for width in range(1, _widest(tables) + 1))
    channels = (torch.from_numpy(distortion(moments, row)).view(tables.zero.shape) for row in rows)
    damage = torch.stack([_per_unit(channel, name) for channel in channels], dim=-1).numpy()
    return damage if gain is None else damage * 10 ** (-np.array(gain[1 : damage.shape[-1] + 1]) / 10)


def _per_unit(channel: torch.Tensor, name: str) -> torch.Tensor:
    """Sums [H, D] over rotary pairs or tiles -> [H, units]."""
    if name == "key":
        return channel.unflatten(-1, (2, -1)).sum(1)
    return torch.nn.functional.pad(channel, (0, -channel.shape[-1] % TILE)).unflatten(-1, (-1, TILE)).sum(-1)


def _fit_all(moments: Moments, tables: Tables) -> torch.Tensor:
    """Levels [1, tables of 1 to widest bits], each for all channels."""
    everything = pooled(moments, np.ones(len(moments.mass), bool))
    rows = (to_bf16_distinct(kmeans.exact_kmeans(*everything, 2**w)) for w in range(1, _widest(tables) + 1))
    return torch.cat([_settled(*everything, row) for row in rows])[None]


def _fit_own(moments: Moments, tables: Tables) -> torch.Tensor:
    """The same, each for the channels that have the width; a width that no channel has keeps its table."""
    widths, rows = tables.widths.flatten().numpy(), []
    for width in range(1, _widest(tables) + 1):
        own = widths == width
        row = codebook.table_of(tables.levels, width)[0]
        rows.append(_settled(*pooled(moments, own), row.double().numpy()) if own.any() else row)
    return torch.cat(rows)[None]


def _settled(centres: np.ndarray, mass: np.ndarray, levels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(reassign(centres, mass, levels, steps=_STEPS)).float()


def _evenly(widest: int) -> torch.Tensor:
    rows = [torch.linspace(-1, 1, 2**width) for width in range(1, widest + 1)]
    return torch.cat(rows).bfloat16().float()[None]


def _summary(fitted: dict, names: list[str]) -> dict:
    """Mean width of keys and values per layer."""
    return {
        layer: {name: {"mean_width": float(tables[name].widths.float().mean())} for name in names}
        for layer, tables in fitted.items()
    }
