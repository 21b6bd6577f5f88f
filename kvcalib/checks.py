"""Which settings cannot work, alone or together: one sentence for each, all of them at once.

Types and the names of choices are the schema's business (`settings.py`); what depends on the model or the text is
refused when these are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcalib.errors import ConfigError
from kvcalib.settings import (
    PAGE,
    STAGES,
    Books,
    Levels,
    QuantSettings,
    Range,
    Rank,
    Rope,
    Rotation,
    Rounding,
    Scope,
    Settings,
    TensorSettings,
    Text,
)

MAX_OUTLIERS = 0.025
TRELLIS_BITS = 6
SHORTEST_NEEDLE = 16
TIMED_EXACT = 132
"""Sink and window of the formats that `bench.formats` names."""
NEEDLE_TASKS = ("passkey", "several", "tracking")


def check(settings: Settings) -> None:
    """Raise one ConfigError that lists everything wrong with the combination of settings."""
    found = list(problems(settings))
    if found:
        raise ConfigError("; ".join(found))


def problems(settings: Settings) -> Iterator[str]:
    """One sentence for each setting, or pair of settings, that cannot work."""
    yield from _run_problems(settings)
    yield from _text_problems(settings)
    yield from _tensor_problems("quant.key", settings.quant.key)
    yield from _tensor_problems("quant.value", settings.quant.value)
    yield from _at_least("quant.window", settings.quant.window, 0)
    yield from _at_least("quant.sink", settings.quant.sink, 0)
    yield from _budget_problems(settings.quant)
    if not 0 <= settings.quant.repeat <= 1:
        yield f"quant.repeat={settings.quant.repeat:g} must be a share of the windows between 0 and 1"
    yield from _eval_problems(settings)
    yield from _bench_problems(settings)


def _run_problems(settings: Settings) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]*", settings.name):
        yield f"name={settings.name!r} becomes a folder: use letters, digits and _ . - only"
    unknown = [stage for stage in settings.stage.run if stage not in STAGES]
    if unknown or not settings.stage.run:
        yield f"stage.run={settings.stage.run} must list some of {', '.join(STAGES)}"
    yield from _at_least("threads", settings.threads, 1)
    if settings.peer and {*settings.stage.run} - {"reference", "measure"}:
        yield f"peer={settings.peer.name} is another library's cache: it is for stage=measure and experiment=frontier"
    if not 0 <= settings.seed < 2**32:
        yield f"seed={settings.seed} must be 0 to {2**32 - 1}"


def _text_problems(settings: Settings) -> Iterator[str]:
    data, context = settings.data, settings.model.context
    yield from _at_least("data.windows", data.windows, 1)
    yield from _at_least("data.sample", data.sample, PAGE)
    shortest = settings.quant.sink + PAGE
    if data.length < shortest:
        yield f"data.length={data.length} must be at least quant.sink + {PAGE} = {shortest}"
    yield from _within_context("data.length", data.length, context)
    yield from _within_context("eval.length", settings.eval.length, context)
    if data.name == "textfile" and not data.path:
        yield "data=textfile needs data.path=<file, folder or glob>"


def _tensor_problems(key: str, tensor: TensorSettings) -> Iterator[str]:
    is_key = key.endswith("key")
    allowed = (Rope.pre, Rope.post) if is_key else (Rope.none,)
    if tensor.rope not in allowed:
        names = ", ".join(rope.value for rope in allowed)
        yield f"{key}.rope={tensor.rope.value} must be one of: {names}"
    yield from _bits_problems(key, tensor)
    if tensor.group < 1 or PAGE % tensor.group:
        yield f"{key}.group={tensor.group} must divide {PAGE}"
    if not 0 <= tensor.outliers <= MAX_OUTLIERS:
        yield f"{key}.outliers={tensor.outliers} must be a share between 0 and {MAX_OUTLIERS}"
    if tensor.rotation is not Rotation.none and is_key:
        yield f"{key}.rotation={tensor.rotation.value} must be none (rotary embedding does not commute with it)"
    if tensor.rotation is not Rotation.none and (tensor.levels is Levels.none or tensor.range is Range.static):
        yield f"{key}.rotation={tensor.rotation.value} needs quantised values with {key}.range=token or norm"
    if tensor.range is Range.norm and tensor.levels not in (Levels.nuq, Levels.nf, Levels.mixed):
        yield f"{key}.range=norm needs {key}.levels=nuq, nf or mixed"
    rounding = tensor.rounding
    if rounding is Rounding.feedback and tensor.levels is Levels.none:
        yield f"{key}.rounding=feedback needs quantised levels, not {key}.levels=none"
    if rounding is Rounding.trellis and (tensor.levels is not Levels.mixed or tensor.books is not Books.layer):
        yield f"{key}.rounding=trellis needs {key}.levels=mixed and {key}.books=layer"
    if rounding is Rounding.trellis and tensor.bits > TRELLIS_BITS:
        yield f"{key}.rounding=trellis needs {key}.bits of at most {TRELLIS_BITS}, not {tensor.bits}"
    if rounding is not Rounding.nearest and not tensor.fisher:
        yield f"{key}.rounding={rounding.value} needs {key}.fisher=true (it is made of gradients)"
    if tensor.rank is Rank.threshold and tensor.range is not Range.static:
        yield f"{key}.rank=threshold needs {key}.range=static (the thresholds are the calibrated range)"
    if tensor.rank is Rank.threshold and tensor.levels is Levels.fp8:
        yield f"{key}.rank=threshold needs other levels than {key}.levels=fp8 (nothing lies beyond its range)"
    if tensor.rank is Rank.threshold and rounding is not Rounding.nearest:
        yield f"{key}.rank=threshold needs {key}.rounding=nearest (feedback takes every stored outlier for exact)"
    if tensor.rank is Rank.tails and (tensor.range is not Range.token or tensor.scope is not Scope.layer):
        yield f"{key}.rank=tails needs {key}.range=token and {key}.scope=layer"
    fitted = {Books.head: (Levels.nuq,), Books.channel: (Levels.nuq, Levels.mixed)}
    if tensor.books in fitted and tensor.levels not in fitted[tensor.books]:
        names = " or ".join(levels.value for levels in fitted[tensor.books])
        yield f"{key}.books={tensor.books.value} needs {key}.levels={names} (other levels are not fitted that way)"
    if tensor.q_norm and (
        tensor.levels is not Levels.nuq or rounding is not Rounding.nearest or tensor.books is Books.channel
    ):
        yield f"{key}.q_norm=true needs {key}.levels=nuq, {key}.rounding=nearest and {key}.books=layer or head"
    if tensor.unbiased and (
        tensor.levels not in (Levels.nuq, Levels.mixed)
        or tensor.range not in (Range.static, Range.norm)
        or tensor.rank not in (Rank.error, Rank.range)
        or tensor.q_norm
    ):
        yield (
            f"{key}.unbiased=true needs {key}.levels=nuq or mixed, {key}.range=static or norm, {key}.rank=error or "
            f"range and {key}.q_norm=false"
        )


def _budget_problems(quant: QuantSettings) -> Iterator[str]:
    mixed = [name for name in ("key", "value") if getattr(quant, name).levels is Levels.mixed]
    if mixed and quant.budget is None:
        yield f"quant.{mixed[0]}.levels=mixed needs quant.budget, true bits per element (try quant.budget=3)"
    if quant.budget is not None and not mixed:
        yield f"quant.budget={quant.budget:g} is for levels=mixed; leave it null or use quant=mixed3"
    if quant.budget is not None and not 1 < quant.budget <= 8:
        yield f"quant.budget={quant.budget:g} must be above 1 and at most 8 bits per element"


def _bits_problems(key: str, tensor: TensorSettings) -> Iterator[str]:
    bits, levels = tensor.bits, tensor.levels
    if levels is Levels.none:
        if bits != 16:
            yield f"{key}.bits={bits} must be 16 with {key}.levels=none (not quantised)"
    elif levels is Levels.fp8:
        if bits != 8 or tensor.range is not Range.static:
            yield f"{key}.levels=fp8 needs {key}.bits=8 and {key}.range=static"
    elif not 1 <= bits <= 8:
        yield f"{key}.bits={bits} must be 1 to 8 with {key}.levels={levels.value}"


def _eval_problems(settings: Settings) -> Iterator[str]:
    ev = settings.eval
    yield from _at_least("eval.windows", ev.windows, 1)
    yield from _at_least("eval.length", ev.length, 2)
    for key in ("text_path", "text_eval_path"):
        if getattr(ev, key) and not ev.text:
            yield f"eval.{key} is for eval.text=...: give that too, or data.eval_path for held-out text"
    if ev.text is Text.textfile and not (ev.text_path or ev.text_eval_path):
        yield "eval.text=textfile needs eval.text_eval_path=<file, folder or glob>, or eval.text_path (the last tenth)"
    yield from _at_least("eval.chunk", ev.chunk, 1)
    yield from _at_least("eval.needle_trials", ev.needle_trials, 0)
    yield from _at_least("eval.sample_tokens", ev.sample_tokens, 0)
    if ev.prompt is not None and not ev.prompt.strip():
        yield f"eval.prompt={ev.prompt!r} is blank: give some text, or eval.prompt=null for held-out text"
    yield from _nothing_quantised(settings)
    if unknown := [task for task in ev.needle_tasks if task not in NEEDLE_TASKS]:
        yield f"eval.needle_tasks={unknown} must be some of {', '.join(NEEDLE_TASKS)}"
    for length in ev.needle_lengths:
        yield from _at_least("eval.needle_lengths", length, SHORTEST_NEEDLE)
        yield from _within_context("eval.needle_lengths", length, settings.model.context)
    if any(not 0 <= depth <= 1 for depth in ev.needle_depths):
        yield f"eval.needle_depths={ev.needle_depths} must lie between 0 and 1"


def _bench_problems(settings: Settings) -> Iterator[str]:
    bench, quant = settings.bench, settings.quant
    for key, least in {"lengths": TIMED_EXACT + PAGE, "batches": 1, "contexts": 1, "prefill": 1}.items():
        for value in getattr(bench, key):
            yield from _at_least(f"bench.{key}", value, least)
    shortest = quant.sink + quant.window + PAGE
    if "bench" in settings.stage.run and any(TIMED_EXACT + PAGE <= length < shortest for length in bench.lengths):
        yield (
            f"quant.window={quant.window} leaves nothing of bench.lengths={min(bench.lengths)} to quantise: each must "
            f"be at least quant.sink + quant.window + {PAGE} = {shortest}"
        )
    for key, least in {"steps": 1, "rounds": 1, "calibration": 0}.items():
        yield from _at_least(f"bench.{key}", getattr(bench, key), least)
    for shape in bench.shapes:
        if shape != "model" and not _is_shape(shape):
            yield (
                f"bench.shapes={shape!r} must be model, or query heads / kv heads / channels such as 32/8/128, "
                "where the second divides the first and the last is even"
            )
    if bench.contexts and not bench.batches:
        yield "bench.batches=[] leaves nothing to time: give some, such as [1]"


def _is_shape(text: str) -> bool:
    numbers = [int(part) for part in text.split("/") if re.fullmatch("[1-9][0-9]{0,3}", part)]
    return len(numbers) == 3 == len(text.split("/")) and numbers[0] % numbers[1] == 0 and numbers[2] % 2 == 0


def _nothing_quantised(settings: Settings) -> Iterator[str]:
    """A window that ends before two pages are full measures the exact tokens alone."""
    quant, length = settings.quant, settings.eval.length
    quantised = any(tensor.levels is not Levels.none for tensor in (quant.key, quant.value))
    shortest, longest = quant.sink + quant.window + 2 * PAGE, length - quant.sink - 2 * PAGE
    if "evaluate" in settings.stage.run and quantised and 2 <= length < shortest:
        yield (
            f"quant.window={quant.window} leaves next to nothing of eval.length={length} to quantise: "
            + (f"use quant.window={longest} or less, or " if longest >= 0 else "use ")
            + f"eval.length={shortest} or more (quant.sink + quant.window + {2 * PAGE})"
        )


def _at_least(key: str, value: int | None, least: int) -> Iterator[str]:
    if value is not None and value < least:
        yield f"{key}={value} must be at least {least}"


def _within_context(key: str, length: int, context: int) -> Iterator[str]:
    if length > context:
        yield f"{key}={length} is longer than model.context={context}"
