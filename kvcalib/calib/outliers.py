"""Stage outliers: thresholds of the sparse share, and with them the static frame of every channel.

    range    frame [lo, hi] -> [-1, 1]
    static   per channel, the two percentiles that leave `outliers` outside (min and max without)
    static   fp8: the layer's largest magnitude becomes 448, one scale for all channels
    group    per channel, min and max; keys after rotary and values: symmetric. Only conditions the
             fp16 ranges that run time measures, which follow the data wherever they are
    token    symmetric, the layer's largest magnitude: channels must keep their proportions
    norm     the same about the mean of every channel: a norm measures spread, and a mean costs no bits

A tensor that is not quantised has zero 0 and scale 1, or the power of two that keeps it in fp16.

frames.safetensors:  layers.{i}.{key|value}.{zero|scale}  fp32 [H, D],
                     header of `collect` and {spec}
"""

from pathlib import Path

import numpy as np
import torch

from kvcalib.calib import collect, files
from kvcalib.errors import ConfigError
from kvcalib.fit.frame import frame_from_bounds, symmetric_frame
from kvcalib.fit.thresholds import tail_quantile, two_sided
from kvcalib.quant.rotation import rotate
from kvcalib.quant.spec import FP8_MAX, CacheSpec, TensorSpec

FILE = "frames.safetensors"
_FP16_MAX = 65504.0
_FP16_FINE = 2.0**-4
"""A largest magnitude below this would leave the rest of the tensor among the subnormal numbers of fp16."""
_FP16_MIDDLE = 256.0
"""Where run-time ranges put the largest magnitude seen: fp16 has 256 times more above, and below it tokens or groups
smaller by 10^-6 keep their precision."""


def outliers(statistics: Path, spec: CacheSpec, *, out: Path) -> dict:
    """`statistics`: folder written by `collect`. Writes frames.safetensors into `out`.

    Raises ConfigError if more outliers are asked for than `collect` kept values for.
    """
    reader = files.Reader(Path(statistics) / collect.FILE, "collect")
    layers, tensors, summary = files.layers(reader), {}, {}
    for layer in layers:
        summary[layer] = {}
        for name in ("key", "value"):
            tensor_spec = getattr(spec, name)
            low, high = _tails(reader, layer, name, tensor_spec)
            zero, scale = _frame(low, high, name, tensor_spec, reader.header)
            if tensor_spec.range == "norm":
                zero = rotate(reader[f"layers.{layer}.{_source(name, tensor_spec)}.mean"], tensor_spec.rotation)
            tensors[f"layers.{layer}.{name}.zero"] = zero
            tensors[f"layers.{layer}.{name}.scale"] = scale
            summary[layer][name] = _summary(low, high, scale, tensor_spec)
    header = {**reader.header, "spec": spec.to_dict()}
    files.save(Path(out) / FILE, tensors, header)
    return {
        "outliers_key": spec.key.outliers if spec.key.quantised else 0.0,
        "outliers_value": spec.value.outliers if spec.value.quantised else 0.0,
        "layers": summary,
    }


def _tails(reader, layer: int, name: str, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(reader[f"layers.{layer}.{_source(name, spec)}.{end}"] for end in ("low", "high"))


def _source(name: str, spec: TensorSpec) -> str:
    return "key_post" if name == "key" and spec.rope == "post" else name


def _frame(low, high, name: str, spec: TensorSpec, header: dict):
    """(zero, scale) [H, D] from tails [k, H, D]."""
    lo, hi = low[0].double().numpy(), high[0].double().numpy()
    absmax = np.maximum(np.abs(lo), np.abs(hi))
    layer_max = np.full_like(absmax, absmax.max())
    if not spec.quantised:
        return torch.zeros(lo.shape), torch.full(lo.shape, _power_of_two(absmax.max()))
    if spec.levels == "fp8":
        return symmetric_frame(layer_max / FP8_MAX)
    if spec.range in ("token", "norm"):
        return symmetric_frame(layer_max / _FP16_MIDDLE)
    if spec.range == "group":
        zero, scale = frame_from_bounds(lo, hi) if spec.rope == "pre" else symmetric_frame(absmax)
        return zero, scale / _FP16_MIDDLE
    return frame_from_bounds(*_thresholds(low, high, name, spec.outliers, header))


def _power_of_two(largest: float) -> float:
    """1 where fp16 has precision for what is up to `largest`, else what brings it there."""
    if _FP16_FINE <= largest <= _FP16_MAX or largest == 0:
        return 1.0
    middle = _FP16_MAX if largest > _FP16_MAX else _FP16_MIDDLE
    return 2.0 ** int(np.ceil(np.log2(largest / middle)))


def _thresholds(low, high, name: str, share: float, header: dict):
    q_lo, q_hi = two_sided(share)
    try:
        return tail_quantile(low, high, count=header["count"], q_lo=q_lo, q_hi=q_hi)
    except ValueError as error:
        largest = 2 * header["tail_share"]
        raise ConfigError(
            f"quant.{name}.outliers={share} is beyond what the collected statistics resolve; use at most {largest:g}"
        ) from error


def _summary(low: torch.Tensor, high: torch.Tensor, scale: torch.Tensor, spec: TensorSpec) -> dict:
    """The widest frame and, for static ranges, how much narrower than min..max (median over channels)."""
    found = {"scale_max": float(scale.max())}
    if spec.quantised and spec.range == "static":
        found["narrowing"] = float((scale / ((high[0] - low[0]) / 2).clamp_min(1e-30)).median())
    return found
