"""How well the calibrated outlier budget fits text that calibration has not seen.

stored   share of the elements of a page that are kept sparse: fixed by the format
hits     share of the held-out elements that lie beyond the calibrated frame, for a static range.
         Above `stored`, the outliers of a page do not all fit and the rest is clipped
"""

from functools import lru_cache

import torch
from transformers.cache_utils import Cache

from kvcalib.artifact.schema import Artifact
from kvcalib.models.rotary import rotary
from kvcalib.quant.rope import make_rope, to_pre_rope
from kvcalib.quant.spec import FP8_MAX, PAGE, Tables


def stored_rate(artifact: Artifact, name: str) -> float:
    """name: "key" or "value"; mean over the layers."""
    spec = getattr(artifact.spec, name)
    shapes = [getattr(layer, name).zero.shape for layer in artifact.layers.values()]
    stored = sum(spec.outliers_per_page(heads, dim) for heads, dim in shapes)
    return stored / sum(PAGE * heads * dim for heads, dim in shapes)


class FrameHits:
    """Counts over windows; does nothing for a tensor whose range is measured at run time."""

    def __init__(self, artifact: Artifact, model):
        self._artifact, self._rotary = artifact, lru_cache(lambda tokens: rotary(model, length=tokens))
        specs = {name: getattr(artifact.spec, name) for name in ("key", "value")}
        self._names = [n for n, s in specs.items() if s.quantised and s.range == "static"]
        self._beyond, self._seen = dict.fromkeys(self._names, 0), dict.fromkeys(self._names, 0)

    def observe(self, cache: Cache, tokens: int) -> None:
        """cache: exact keys and values of `tokens` tokens from position 0 on, computed in one pass."""
        for index, layer in self._artifact.layers.items():
            for name in self._names:
                u = self._in_frame(cache.layers[index], index, name, getattr(layer, name), tokens)
                limit = (
                    FP8_MAX if getattr(self._artifact.spec, name).levels == "fp8" else 1
                )  # levels may lie farther out
                self._beyond[name] += int((u.abs() > limit).sum())
                self._seen[name] += u.numel()

    def result(self) -> dict[str, float]:
        return {f"outlier_hit_rate_{name}": self._beyond[name] / max(self._seen[name], 1) for name in self._names}

    def _in_frame(self, stored, index: int, name: str, tables: Tables, tokens: int):
        """u [T, H, D] of the tokens past the sink that the layer still holds."""
        x = (stored.keys if name == "key" else stored.values)[0].transpose(0, 1)
        positions = torch.arange(tokens - len(x), tokens, device=x.device)
        x, positions = (
            x[positions >= self._artifact.spec.sink],
            positions[positions >= self._artifact.spec.sink],
        )
        if name == "key":
            info = self._rotary(tokens)[index]  # in one pass, a long text is rotated by its own frequencies
            rope = make_rope(x.shape[-1], info.kind, info.inv_freq, info.scaling).to(x.device)
            pre = self._artifact.spec.key.rope == "pre"
            x = to_pre_rope(x, positions, rope) if pre else x[..., rope.order]
        return (x.float() - tables.zero.to(x.device)) / tables.scale.to(x.device)
