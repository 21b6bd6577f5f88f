"""What the cache has to know of each layer's rotation and reach, from the loaded model."""

from typing import NamedTuple

from kvcalib.artifact.schema import LayerTables
from kvcalib.models.rotary import RotaryInfo, rotary, valid_length
from kvcalib.quant.rope import Rope, make_rope


class LayerRopes(NamedTuple):
    """rope, valid_to and long as in frequencies.py; sliding_window: how far a query looks back, None without end."""

    rope: Rope
    sliding_window: int | None
    valid_to: int | None
    long: Rope | None


def layer_ropes(model, tables: dict[int, LayerTables]) -> dict[int, LayerRopes]:
    """One for each layer of an artifact, by index."""
    short = rotary(model)
    valid_to = valid_length(short)
    long = rotary(model, length=valid_to + 1) if valid_to is not None else short
    return {i: _ropes(layer.key.zero.shape[1], short[i], long[i]) for i, layer in tables.items()}


def _ropes(dim: int, short: RotaryInfo, long: RotaryInfo) -> LayerRopes:
    rope, beyond = (make_rope(dim, info.kind, info.inv_freq, info.scaling) for info in (short, long))
    changes_once = short.valid_to is not None and long.valid_to is None  # longrope; dynamic scaling goes on changing
    return LayerRopes(rope, short.sliding_window, short.valid_to, beyond if changes_once else None)
