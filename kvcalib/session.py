"""What the stages of one run share: the model, its tokenizer and the token windows, loaded once.

Everything is loaded by the first stage that asks for it, so a run whose stages are up to date
loads nothing, and goes away with the run, so that a sweep holds one model at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property

from kvcalib.errors import ConfigError
from kvcalib.records import fingerprint
from kvcalib.settings import PAGE, Device, Levels, Order, Range, Scope, Settings, plain

MODEL_KEYS = (
    "source", "path", "gguf_file", "packages", "sha256", "revision", "dtype", "config",
)  # fmt: skip


class Session:
    """Model, tokenizer and text of one run: loaded by the first stage that needs them."""

    def __init__(self, settings: Settings, loaded: dict | None = None):
        """loaded: holds the model last loaded, for sessions that follow one another."""
        self.settings = settings
        self._loaded = {} if loaded is None else loaded

    @cached_property
    def loaded(self) -> tuple:
        """(model, tokenizer)"""
        import torch

        from kvcalib.models.load import load_model

        settings = self.settings
        torch.manual_seed(settings.seed)
        kept = plain(settings.model)
        arguments = {key: kept[key] for key in (*MODEL_KEYS, "install")}
        arguments |= {"device": _device(settings.device), "seed": settings.seed}
        wanted = fingerprint(arguments)
        if wanted not in self._loaded:
            self._loaded.clear()
            self._loaded[wanted] = load_model(**arguments)
        return self._loaded[wanted]

    def use_threads(self) -> None:
        """As many as the settings say; null is what torch began with, whatever a session before this one had."""
        import torch

        initially = _threads_of_torch()
        torch.set_num_threads(self.settings.threads or initially)

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
        return self._windows("calibration", data.windows, data.length, data.order)

    @cached_property
    def evaluation(self):
        """Token windows of the held-out text."""
        measure = self.settings.eval
        return self._windows("evaluation", measure.windows, measure.length, measure.order or self.settings.data.order)

    def check_texts(self, splits: Iterable[str]) -> None:
        """Raise MissingInput for files that are not there, ConfigError for held-out ones that calibrate."""
        from kvcalib.data.corpora import check_held_out

        splits = list(splits)
        for split in splits:
            self._corpora[split].files(split)
        if "evaluation" in splits:
            check_held_out(*self._corpora.values())

    @cached_property
    def _corpora(self) -> dict:
        """The texts that calibrate and that judge."""
        from kvcalib.data.corpora import Corpus

        data, measure = self.settings.data, self.settings.eval
        calibrates = judges = Corpus(data.name, data.path, data.eval_path)
        if measure.text:
            judges = Corpus(measure.text.value, measure.text_path, measure.text_eval_path, "eval.text_")
        return {"calibration": calibrates, "evaluation": judges}

    def _windows(self, split: str, count: int, length: int, order: Order):
        from kvcalib.data.corpora import load_text
        from kvcalib.data.windows import make_windows

        return make_windows(
            load_text(self._corpora[split], split),
            self.tokenizer,
            count=count,
            length=length,
            order=order.value,
            seed=self.settings.seed,
            max_length=self.settings.model.context,
        )


def _check_group(key: str, group: int, dims: set[int]) -> None:
    for dim in sorted(dims):
        if dim % group:
            fitting = ", ".join(str(n) for n in range(1, PAGE + 1) if PAGE % n == 0 and dim % n == 0)
            raise ConfigError(f"{key}={group} does not divide the {dim} channels of a head: use one of {fitting}")


@cache
def _threads_of_torch() -> int:
    import torch

    return torch.get_num_threads()


def _device(device: Device) -> str:
    import torch

    there = torch.cuda.is_available()
    if device is Device.cuda and not there:
        raise ConfigError("device=cuda but torch sees no GPU: use device=cpu or device=auto")
    return ("cuda" if there else "cpu") if device is Device.auto else device.value
