"""Which rotary frequencies a text has: models with dynamic scaling and longrope change theirs with the length.

longrope has one set for texts of up to `valid_to` tokens and another for longer ones, and a text whose first call goes
beyond keeps the second to its end. Dynamic scaling changes with every token beyond; keys that are packed by then
cannot follow, nor those of a text that grows over the edge.
"""

from __future__ import annotations

import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.quant.rope import Rope


class Frequencies:
    """rope holds for positions below valid_to (None: all); long: what holds for a text that begins beyond, if any."""

    def __init__(self, rope: Rope, valid_to: int | None = None, long: Rope | None = None):
        self._short, self._valid_to, self._long = rope, valid_to, long
        self.is_long = False

    @property
    def rope(self) -> Rope:
        return self._long if self.is_long else self._short

    def to(self, device) -> None:
        self._short = self._short.to(device)
        self._long = None if self._long is None else self._long.to(device)

    def begin(self, positions: torch.Tensor) -> None:
        """positions int64 [B, T] of the first call."""
        self.is_long = self._long is not None and int(positions.max()) >= self._valid_to

    def check(self, positions: torch.Tensor) -> None:
        """Raises UnsupportedModel where the model no longer rotates by `rope`."""
        if self._valid_to is not None and not self.is_long and int(positions.max()) >= self._valid_to:
            raise UnsupportedModel(
                f"this model changes its rotary frequencies beyond {self._valid_to} tokens, and keys that are already "
                "packed cannot follow; stay below, or calibrate with quant.key.rope=post"
            )

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for rope in (self._short, self._long) if rope is not None for tensor in rope]
