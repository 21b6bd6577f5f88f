"""What the stages of one run share: the model, its tokenizer and the token windows, loaded once.

Everything is loaded by the first stage that asks for it, so a run whose stages are up to date
loads nothing, and goes away with the run, so that a sweep holds one model at a time.
"""

from __future__ import annotations

from functools import cached_property

from kvcalib.errors import ConfigError
from kvcalib.settings import PAGE, Device, Levels, Range, Scope, Settings, plain

MODEL_KEYS = (
    "source", "path", "gguf_file", "packages", "sha256", "revision", "dtype", "config",
)  # fmt: skip


class Session:
    """Model, tokenizer and text of one run: loaded by the first stage that needs them."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @cached_property
    def loaded(self) -> tuple:
        """(model, tokenizer)"""
        import torch

        from kvcalib.models.load import load_model

        settings = self.settings
        torch.manual_seed(settings.seed)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        kept = plain(settings.model)
        arguments = {key: kept[key] for key in (*MODEL_KEYS, "install")}
        return load_model(**arguments, device=_device(settings.device), seed=settings.seed)

    @property
    def model(self):
        return self.loaded[0]

    @property
    def tokenizer(self):
        return self.loaded[1]

    def check_format(self) -> None:
        """Raise ConfigError where groups of channels do not divide the heads of this model."""
        from kvcalib.models.families import layer_shapes

        shapes = layer_shapes(self.model).values()
        dims = {"key": {shape.key_dim for shape in shapes}, "value": {shape.value_dim for shape in shapes}}
        for side, found in dims.items():
            tensor = getattr(self.settings.quant, side)
            grouped = tensor.scope is Scope.channels and tensor.range in (Range.token, Range.norm)
            if grouped and tensor.levels is not Levels.none:
                _check_group(f"quant.{side}.group", tensor.group, found)

    @cached_property
    def rotary(self) -> dict:
        """How each cached layer rotates its keys, proved on the loaded weights."""
        from kvcalib.models.rotary import check_rotary, rotary

        found = rotary(self.model, length=self.settings.data.length)
        check_rotary(self.model, found)
        return found

    @cached_property
    def calibration(self):
        """Token windows of the calibration text."""
        data = self.settings.data
        return self._windows("calibration", data.windows, data.length)

    @cached_property
    def evaluation(self):
        """Token windows of the held-out text."""
        measure = self.settings.eval
        return self._windows("evaluation", measure.windows, measure.length)

    def _windows(self, split: str, count: int, length: int):
        from kvcalib.data.corpora import load_text
        from kvcalib.data.windows import make_windows

        data = self.settings.data
        text = load_text(data.name, data.path, split, eval_path=data.eval_path)
        return make_windows(
            text,
            self.tokenizer,
            count=count,
            length=length,
            order=data.order.value,
            seed=self.settings.seed,
            max_length=self.settings.model.context,
        )


def _check_group(key: str, group: int, dims: set[int]) -> None:
    for dim in sorted(dims):
        if dim % group:
            fitting = ", ".join(str(n) for n in range(1, PAGE + 1) if PAGE % n == 0 and dim % n == 0)
            raise ConfigError(f"{key}={group} does not divide the {dim} channels of a head: use one of {fitting}")


def _device(device: Device) -> str:
    import torch

    there = torch.cuda.is_available()
    if device is Device.cuda and not there:
        raise ConfigError("device=cuda but torch sees no GPU: use device=cpu or device=auto")
    return ("cuda" if there else "cpu") if device is Device.auto else device.value
