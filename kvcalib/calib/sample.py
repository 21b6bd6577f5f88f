"""What stage `fisher` sampled, as `codebooks` reads it: layer by layer, over all windows."""

from pathlib import Path

import torch

from kvcalib.calib import files
from kvcalib.errors import ConfigError, MissingInput
from kvcalib.quant.rope import to_post_rope
from kvcalib.quant.spec import TensorSpec


class Sample:
    """folder: of `fisher`; frames: the header of the file of `outliers` that goes with it.

    Raises MissingInput where there is no sample, ConfigError where it comes from other text.
    """

    def __init__(self, folder: Path, frames: dict):
        paths = sorted(folder.glob("window_*.safetensors"))
        if not paths:
            raise MissingInput(f"no window_*.safetensors in {folder}; run `python -m kvcalib stage=fisher`")
        self._windows = [files.Reader(path, "fisher") for path in paths]
        for field in ("windows", "sink"):
            if any(window.header[field] != frames[field] for window in self._windows):
                raise ConfigError(
                    f"collect and fisher differ in their {field}: values and sensitivities must come "
                    "from the same text; run `python -m kvcalib stage=fisher stage.force=true`"
                )
        self.tokens = len(self._all("positions"))

    def __call__(self, layer: int, name: str, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements and gradients [n, H, D] fp32 of one layer's keys or values; keys after rotary if asked."""
        x, grad = (self._all(f"layers.{layer}.{name}{suffix}").float() for suffix in ("", "_grad"))
        if name == "value" or spec.rope != "post":
            return x, grad
        positions, rope = self._all("positions"), files.read_rope(self._windows[0], layer)
        gain = torch.cat([rope.gain, rope.gain])
        return to_post_rope(x, positions, rope), to_post_rope(grad, positions, rope) / gain**2

    def _all(self, name: str) -> torch.Tensor:
        return torch.cat([window[name] for window in self._windows])
