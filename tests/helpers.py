"""An artifact without calibration, frames from one forward pass, levels that need no data; and caches of it."""

import torch
from transformers import DynamicCache

from kvcalib.artifact.schema import Artifact, LayerTables
from kvcalib.fit import grids
from kvcalib.fit.feedback import fit_feedback
from kvcalib.models.identity import identity
from kvcalib.models.rotary import rotary
from kvcalib.quant import trellis
from kvcalib.quant.codebook import middles
from kvcalib.quant.rope import make_rope, to_pre_rope
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec
from kvcalib.runtime.cache import CalibratedCache

IDENTITY = TensorSpec(16, "none", "static")
KEYS = {
    "static": TensorSpec(4, "nuq", "static", rope="pre", outliers=0.02),
    "static, per head": TensorSpec(3, "uniform", "static", rope="post", outliers=0.01, books="head"),
    "group": TensorSpec(3, "uniform", "group", group=16, rope="post"),
    "token": TensorSpec(4, "uniform", "token", scope="head", rope="post"),
    "fp8": TensorSpec(8, "fp8", "static", rope="post"),
    "identity": IDENTITY,
    "mixed": TensorSpec(5, "mixed", "static", rope="pre", outliers=0.01, rank="error"),
    "feedback": TensorSpec(3, "nuq", "static", rope="pre", outliers=0.01, rounding="feedback"),
    "trellis": TensorSpec(5, "mixed", "static", rope="pre", outliers=0.01, rounding="trellis"),
    "q-norm": TensorSpec(3, "nuq", "static", rope="pre", outliers=0.02, books="head", q_norm=True),
    "unbiased": TensorSpec(5, "mixed", "static", rope="pre", outliers=0.01, rounding="trellis", unbiased=True),
}
VALUES = {
    "token": TensorSpec(4, "nuq", "token", scope="layer", outliers=0.02),
    "channels": TensorSpec(3, "uniform", "token", scope="channels", group=8),
    "fp8": TensorSpec(8, "fp8", "static"),
    "identity": IDENTITY,
    "norm": TensorSpec(4, "nuq", "norm", rotation="hadamard"),
    "trellis": TensorSpec(5, "mixed", "norm", rotation="hadamard", rounding="trellis"),
    "q-norm": TensorSpec(3, "nuq", "token", q_norm=True),
    "unbiased": TensorSpec(4, "nuq", "norm", rotation="hadamard", unbiased=True),
}


def cache_spec(key: str = "static", value: str = "token", *, window: int = 0, sink: int = 0):
    """A CacheSpec from names in KEYS and VALUES."""
    return CacheSpec(KEYS[key], VALUES[value], window, sink)


def make_artifact(model, spec: CacheSpec, ids: torch.Tensor) -> Artifact:
    """ids [1, T]: the text that the frames are made for."""
    cache, infos = DynamicCache(config=model.config), rotary(model)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    layers = {}
    for index, info in infos.items():
        key = cache.layers[index].keys[0].transpose(0, 1)
        value = cache.layers[index].values[0].transpose(0, 1)
        rope = make_rope(key.shape[-1], info.kind, info.inv_freq, info.scaling)
        pre = to_pre_rope(key, torch.arange(len(key)), rope)
        key = pre if spec.key.rope == "pre" else key[..., rope.order]
        layers[index] = LayerTables(_tables(key, spec.key), _tables(value, spec.value))
    return Artifact(spec, layers, identity(model))


def filled(artifact, model, ids, mask=None) -> CalibratedCache:
    """A cache after one pass over ids [B, T]."""
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    return cache


def left_padded(ids):
    """The mask that hides 13 columns of row 1, 26 of row 2, and so on."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, : 13 * row] = 0
    return mask


def _tables(x: torch.Tensor, spec: TensorSpec) -> Tables:
    """x [T, H, D]; a static frame with outliers is narrower than the data."""
    largest = x.float().abs().amax(0).clamp_min(1e-6)  # a dead channel has a frame too
    if spec.levels == "fp8":
        largest = largest / 448
    if spec.range == "static" and spec.outliers:
        largest = largest * 0.7
    if not spec.quantised:
        largest = torch.ones_like(largest)
    books = x.shape[1] if spec.books == "head" else 1
    tables = Tables(torch.zeros_like(largest), largest, _levels(spec).expand(books, -1).clone())
    if spec.ranks_by_error:
        tables = tables._replace(weight=largest.square())
    if spec.q_norm:
        moved = (1.1 * tables.levels + 0.05).bfloat16().float()
        tables = tables._replace(levels=moved, edges=middles(tables.levels))
    if spec.unbiased:
        tables = tables._replace(read_zero=0.01 * largest, read_scale=1.05 * largest)
    if spec.rounding == "trellis":
        draw = torch.Generator().manual_seed(0)
        entries = trellis.table_offset(spec.bits + 1)
        tables = tables._replace(trellis=(0.4 * torch.randn(entries, generator=draw)).bfloat16().float())
    if spec.feeds_back:
        matrix, order, _ = fit_feedback(x.float() * torch.linspace(-1, 1, x.shape[-1]))
        tables = tables._replace(feedback=matrix, order=order)
    return tables._replace(widths=_widths(largest, tiles=spec.rope == "none")) if spec.levels == "mixed" else tables


def _widths(largest: torch.Tensor, *, tiles: bool) -> torch.Tensor:
    """uint8 [H, D]: 2 to 5 bits, equal in rotary pairs of keys and in tiles of 16 channels of values."""
    heads, dim = largest.shape
    if tiles or dim > 16:
        return (2 + torch.arange(heads) % 4)[:, None].expand(-1, dim).to(torch.uint8).contiguous()
    return (2 + torch.arange(dim // 2) % 4).repeat(2).expand(heads, -1).to(torch.uint8).contiguous()


def _levels(spec: TensorSpec) -> torch.Tensor:
    tables = {
        "uniform": lambda: grids.uniform(spec.bits, static=spec.range == "static"),
        "nuq": lambda: grids.normal_float(spec.bits),
        "fp8": grids.fp8_e4m3,
        "mixed": lambda: torch.cat([torch.linspace(-1, 1, 2**w) for w in range(1, spec.bits + 1)]).bfloat16(),
        "none": lambda: [0.0, 1.0],
    }
    return torch.as_tensor(tables[spec.levels]()).float()[None]
