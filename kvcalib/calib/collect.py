"""Stage collect: what the keys and values of every layer look like, channel by channel.

One forward pass per window, one window in memory. Per layer and channel, for keys before and after
rotary embedding and for values: the k smallest and k largest values (exact percentiles later,
`fit.thresholds`), mean and standard deviation. The first `sink` tokens of each window stay exact at
run time and enter nothing here.

statistics.safetensors, channels in the order of `quant.rope.Rope`:

    layers.{i}.{key|key_post|value}.low    fp32 [k, H, D] ascending     .high  descending
    layers.{i}.{key|key_post|value}.mean   fp32 [H, D]                  .std
    layers.{i}.rope.{order|inv_freq|gain}
    header  {layers, count (values per channel), tail_share, sink, windows (hash), source}
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from kvcalib.calib import files, taps
from kvcalib.errors import ConfigError
from kvcalib.fit.thresholds import Tails, tail_size
from kvcalib.quant.rope import to_pre_rope

if TYPE_CHECKING:
    from kvcalib.data.windows import Windows

FILE = "statistics.safetensors"
TAIL_SHARE = 0.0125
"""Share kept per side: thresholds are exact up to 2.5% outliers."""


class Channels:
    """Tails and moments per channel of a stream of [N, H, D]."""

    def __init__(self, k: int):
        self._tails = Tails(k)
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def observe(self, x: torch.Tensor) -> None:
        self._shape = x.shape[1:]
        self._tails.observe(x.flatten(1))
        variance, mean = torch.var_mean(x.float(), 0, correction=0)
        variance, mean, count = variance.double(), mean.double(), len(x)
        total = self._count + count  # Chan et al.: moments of two parts joined without cancellation
        shift = mean - self._mean
        self._squares += variance * count + shift**2 * (self._count * count / total)
        self._mean += shift * (count / total)
        self._count = total

    def result(self) -> dict[str, torch.Tensor]:
        low, high, _ = self._tails.result()
        std = (self._squares / self._count).sqrt()
        return {
            "low": low.unflatten(1, self._shape),
            "high": high.unflatten(1, self._shape),
            "mean": self._mean.float(),
            "std": std.float(),
        }


def collect(
    model: PreTrainedModel,
    rotary: taps.Rotary,
    windows: Windows,
    *,
    sink: int,
    out: Path,
    tail_share: float = TAIL_SHARE,
    progress: taps.Progress = taps.progress_bar,
) -> dict:
    """Writes statistics.safetensors into `out`, returns the summary.

    Raises UnsupportedModel for a layer that never used its cache, ConfigError for NaN or infinity.
    """
    number, length = windows.ids.shape
    assert length > sink, f"windows of {length} tokens with {sink} sink tokens"
    taps.check_length(rotary, length)
    count = number * (length - sink)
    k = tail_size(tail_share, count)
    channels: dict[str, Channels] = {}
    ropes = {}

    def on_kv(layer: int, key: torch.Tensor, value: torch.Tensor):
        ropes[layer] = rope = taps.rope_of(rotary[layer], key.shape[-1]).to(key.device)
        tokens = taps.by_token(key)
        positions = torch.arange(len(tokens), device=key.device)
        seen = {
            "key": to_pre_rope(tokens, positions, rope),
            "key_post": tokens[..., rope.order],
            "value": taps.by_token(value),
        }
        for name, x in seen.items():
            _observe(channels.setdefault(f"layers.{layer}.{name}", Channels(k)), x[sink:], layer, name)
        return key, value

    with taps.frozen(model), torch.no_grad():
        for window in progress(windows.ids, number, "collect"):
            taps.run(model, window, on_kv, rotary, head=False)
    tensors = {f"{n}.{f}": t for n, c in channels.items() for f, t in c.result().items()}
    for layer, rope in ropes.items():
        tensors |= files.rope_tensors(layer, rope)
    header = {"layers": sorted(ropes), "count": count, "tail_share": tail_share, "sink": sink}
    header |= {"windows": windows.hash, "source": windows.source}
    files.save(Path(out) / FILE, tensors, header)
    return {"tokens": count, "layers": _summary(tensors, sorted(ropes))}


def _observe(channels: Channels, x: torch.Tensor, layer: int, name: str) -> None:
    try:
        channels.observe(x)
    except ValueError as error:
        raise ConfigError(
            f"layer {layer}: {name} holds NaN or infinity; try model.dtype=float32 or bfloat16"
        ) from error


def _summary(tensors: dict[str, torch.Tensor], layers: list[int]) -> dict:
    """Per layer and tensor: largest magnitude, and largest mean over spread (offset channels)."""
    summary = {}
    for layer in layers:
        summary[layer] = {}
        for name in ("key", "key_post", "value"):
            low, high, mean, std = (
                tensors[f"layers.{layer}.{name}.{field}"] for field in ("low", "high", "mean", "std")
            )
            summary[layer][name] = {
                "absmax": float(torch.maximum(low[0].abs(), high[0].abs()).max()),
                "std": float(std.square().mean().sqrt()),
                "offset": float((mean.abs() / std.clamp_min(1e-12)).median()),
            }
    return summary
