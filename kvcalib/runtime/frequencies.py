"""Which rotary frequencies a text has: models with dynamic scaling and longrope change theirs with the length.

longrope has one set for texts of up to `valid_to` tokens and another for longer ones, and a text whose first call goes
beyond keeps the second to its end. Dynamic scaling changes with every token beyond; keys that are packed by then
cannot follow, nor those of a text that grows over the edge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.quant.rope import Rope


@dataclass(frozen=True)
class Frequencies:
    """short holds for positions below valid_to (None: all); long: what holds for a text that begins beyond, if any."""

    short: Rope
    valid_to: int | None = None
    long: Rope | None = None
    is_long: bool = False

    @property
    def rope(self) -> Rope:
        return self.long if self.is_long else self.short

    def to(self, device) -> Frequencies:
        return replace(self, short=self.short.to(device), long=None if self.long is None else self.long.to(device))

    def of_text(self, positions: torch.Tensor) -> Frequencies:
        """positions int64 [B, T] of the first call."""
        return replace(self, is_long=self.long is not None and int(positions.max()) >= self.valid_to)

    def check(self, positions: torch.Tensor) -> None:
        """Raises UnsupportedModel where the model no longer rotates by `rope`."""
        if self.valid_to is not None and not self.is_long and int(positions.max()) >= self.valid_to:
            raise UnsupportedModel(
                f"this model changes its rotary frequencies beyond {self.valid_to} tokens, and keys that are already "
                "packed cannot follow; stay below, or calibrate with quant.key.rope=post"
            )

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for rope in (self.short, self.long) if rope is not None for tensor in rope]
