"""What a quantised tensor of the cache looks like: the description (spec) and its calibrated numbers (tables).

A cached element x goes through three steps, each named by one field of `TensorSpec`:

    rotation      an orthonormal transform of the head's channels, or nothing
    frame    u  = (x - zero) / scale          zero, scale: calibrated, fp32, [H, D]
    range    v  = (u - base) / step           nothing ("static"), or measured at run time and kept in fp16
    levels   c  = index of the level nearest to v (tie: the lower one)

and comes back as x' = (level[c] * step + base + correction) * scale + zero, turned back, where `correction` is
non-zero for the sparse outliers only. With `unbiased` it comes back in a frame of its own, read_scale and read_zero.
H kv heads, D head dimension, P = 32 tokens per page.
"""

from dataclasses import asdict, dataclass
from math import ceil
from typing import NamedTuple

import torch

PAGE = 32
"""Tokens per page: the unit in which tokens leave the full-precision window."""
LARGEST = 1e18
"""Of a key or value: beyond, their squares are no numbers of float32."""
FP8_MAX = 448.0
"""The largest magnitude of float8 e4m3."""
ROOM = 4
"""Slots of a page, for each outlier that it has on average, where their number is left to thresholds."""


@dataclass(frozen=True)
class TensorSpec:
    """Format of the keys, or of the values, of every layer.

    bits      1..8, or 16 for "not quantised" (levels="none"); the widest width of levels="mixed"
    levels    "uniform", "nuq" (fitted to the calibration text), "nf" (NormalFloat), "fp8" (e4m3), "none", or
              "mixed": fitted, each rotary pair of keys and each tile of 16 value channels with its own width
    range     "static": the calibrated frame alone; "group": per channel and `group` tokens, at run time;
              "token": min and max per token, at run time, over `scope`; "norm": root mean square per token alike
    scope     span of a per-token range: "layer" (all heads), "head", or "channels" (`group` channels of a head)
    rotation  "none", or "hadamard" (see rotation.py)
    rounding  "nearest"; "feedback": later channels of a head make up for errors of earlier ones (see feedback.py);
              "trellis": the same, and the codes of a channel choose their levels together (see trellis.py)
    rope      keys: quantised before ("pre") or after ("post") rotary embedding; values: "none"
    outliers  share of the elements kept sparse in fp16
    rank      which ones, per page: "error" (largest squared error of the dense code times the sensitivity of its
              channel; where the range is static or a norm, else as "range"), "range" (farthest outside the others),
              or as KVQuant chooses them: "threshold" (static: every element beyond the frame, in a page with room for
              ROOM times the share), "tails" (token: as many of the largest and smallest of every token)
    books     one table of levels per "layer", "head" or "channel"; tables cost nothing per token
    q_norm    KVQuant's Q-Norm: codes mean the fitted levels moved so that mean and spread of the inliers survive
    unbiased  codes come back stretched about the mean of their channel (see fit/unbiased.py)
    """

    bits: int
    levels: str
    range: str
    scope: str = "layer"
    group: int = 32
    rope: str = "none"
    outliers: float = 0.0
    books: str = "layer"
    rank: str = "range"
    rotation: str = "none"
    rounding: str = "nearest"
    q_norm: bool = False
    unbiased: bool = False

    @property
    def quantised(self) -> bool:
        return self.levels != "none"

    def book_count(self, heads: int, dim: int) -> int:
        return {"layer": 1, "head": heads, "channel": heads * dim}[self.books]

    @property
    def feeds_back(self) -> bool:
        return self.rounding in ("feedback", "trellis")

    @property
    def span(self) -> int | None:
        """Tokens that a trellis connects: for keys those of a record, see page.py."""
        if self.rounding != "trellis":
            return None
        return PAGE if self.rope == "none" else PAGE // 2

    @property
    def ranks_by_error(self) -> bool:
        return self.quantised and self.outliers > 0 and self.range in ("static", "norm") and self.rank == "error"

    def outliers_per_page(self, heads: int, dim: int) -> int:
        if not self.quantised:
            return 0
        if self.rank == "tails":
            return 2 * PAGE * ceil(self.outliers / 2 * (heads * dim - 1))  # what lies beyond two interpolated quantiles
        return round(self.outliers * (ROOM if self.rank == "threshold" else 1) * PAGE * heads * dim)


@dataclass(frozen=True)
class CacheSpec:
    """Format of a whole cache. window: recent tokens kept exact; sink: first tokens kept exact."""

    key: TensorSpec
    value: TensorSpec
    window: int
    sink: int

    @property
    def quantised(self) -> bool:
        return self.key.quantised or self.value.quantised

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> "CacheSpec":
        key, value = TensorSpec(**data["key"]), TensorSpec(**data["value"])
        return cls(key, value, data["window"], data["sink"])


class Tables(NamedTuple):
    """Calibrated numbers of one tensor of one layer.

    zero, scale  fp32 [H, D], channels in the order of `rope.Rope`; scale > 0
    levels       fp32 [1, H or H * D books, 2**bits at most], rows strictly increasing, every entry exact in bf16;
                 with widths, a row holds the tables of width 1, 2, ... end to end, that of width w from 2**w - 2 on
    weight       fp32 [H, D] >= 0, only where outliers rank by error: what a squared error of u costs in each channel
    widths       uint8 [H, D], only for levels="mixed": bits of every channel
    feedback     bf16, or fp32 and exact in bf16, [H, D, D], only where rounding feeds back: row j weighs the errors of
                 the channels that were coded before the j-th; zero on and above the diagonal
    order        int16 [H, D], with feedback: the channel that is coded first, second, ...
    trellis      fp32, exact in bf16, only for rounding="trellis": the tables of width 1, 2, ... end to end, each by
                 window; `levels` then only say which elements are outliers
    edges        fp32 [books, levels - 1], only with q_norm: between which numbers a code is chosen, rows strictly
                 increasing; without, the middles between the levels
    read_zero, read_scale    fp32 [H, D], read_scale > 0, only with unbiased: the frame that codes come back in
    """

    zero: torch.Tensor
    scale: torch.Tensor
    levels: torch.Tensor
    weight: torch.Tensor | None = None
    widths: torch.Tensor | None = None
    feedback: torch.Tensor | None = None
    order: torch.Tensor | None = None
    trellis: torch.Tensor | None = None
    edges: torch.Tensor | None = None
    read_zero: torch.Tensor | None = None
    read_scale: torch.Tensor | None = None

    @property
    def read_frame(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(zero, scale) that codes come back in."""
        return (self.zero, self.scale) if self.read_scale is None else (self.read_zero, self.read_scale)

    def to(self, device) -> "Tables":
        return Tables(*(None if t is None else t.to(device) for t in self))
