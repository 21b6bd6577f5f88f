"""Every key of the configuration, as plain dataclasses, and the checks that cross fields.

Values live in `conf/*.yaml`; this file says which keys exist and which types they have. The
command line merges the YAML into this schema, so a misspelt key or a wrong type is refused before
anything runs. Choices are enums, because the merge then lists the allowed names. The classes are
not frozen, because the merge fills them; everything below the pipeline treats them as read-only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvcalib.errors import ConfigError

STAGES = ("collect", "fisher", "outliers", "codebooks", "export", "reference", "measure", "evaluate", "bench", "report")
PAGE = 32
MAX_OUTLIERS = 0.025
SHORTEST_NEEDLE = 16
TIMED_EXACT = 132
"""Sink and window of the formats that `bench.formats` names."""
NEEDLE_TASKS = ("passkey", "several", "tracking")


def _choice(name: str, *allowed: str) -> type[Enum]:
    """An enum whose members are called like their values."""
    return Enum(name, {value: value for value in allowed}, type=str, module=__name__)


Device = _choice("Device", "auto", "cpu", "cuda")
Source = _choice("Source", "hub", "gguf", "random")
Dtype = _choice("Dtype", "auto", "float32", "bfloat16", "float16")
Text = _choice("Text", "pydoc", "pycode", "wikitext2", "c4", "textfile")
Order = _choice("Order", "spread", "start", "random")
Levels = _choice("Levels", "uniform", "nuq", "nf", "mixed", "fp8", "none")
Range = _choice("Range", "static", "group", "token", "norm")
Scope = _choice("Scope", "layer", "head", "channels")
Rope = _choice("Rope", "pre", "post", "none")
Books = _choice("Books", "layer", "head", "channel")
Rank = _choice("Rank", "error", "range", "threshold", "tails")
Rotation = _choice("Rotation", "none", "hadamard")
Rounding = _choice("Rounding", "nearest", "feedback")
Library = _choice("Library", "quanto", "hqq")
Solver = _choice("Solver", "kmeans", "exact")
Timed = _choice("Timed", "quant", "group4", "group2", "post4")
Peer = _choice("Peer", "full", "bfloat16", "quanto4", "quanto2", "hqq4", "hqq2")


@dataclass
class ModelSettings:
    """Which weights. `path` (folder, .gguf file or hub id) overrides `source` for every option."""

    name: str
    source: Source
    path: str | None
    gguf_file: str | None
    packages: list[str]
    install: str | None
    sha256: str | None
    revision: str | None
    dtype: Dtype
    config: dict[str, Any]
    window: int
    context: int


@dataclass
class DataSettings:
    """Which text, and how it is cut. `sample`: tokens per layer that the fit sees."""

    name: str
    path: str | None
    eval_path: str | None
    windows: int
    length: int
    order: Order
    sample: int


@dataclass
class TensorSettings:
    """Format of keys or values (the first eleven) and how its levels are fitted (the rest)."""

    bits: int
    levels: Levels
    range: Range
    scope: Scope
    group: int
    rope: Rope
    outliers: float
    rank: Rank
    rotation: Rotation
    rounding: Rounding
    books: Books
    fisher: bool
    range_weight: bool
    solver: Solver


@dataclass
class QuantSettings:
    """Format of the cache; `window` recent and `sink` first tokens stay exact; `budget` is for levels=mixed."""

    name: str
    key: TensorSettings
    value: TensorSettings
    window: int
    sink: int
    budget: float | None


@dataclass
class StageSettings:
    """Which stages run. Selects work, nothing else."""

    run: list[str]
    force: bool


@dataclass
class EvalSettings:
    """What is measured on held-out text: `text` names another than calibration's, `text_path` is its `data.path`."""

    text: Text | None
    text_path: str | None
    order: Order | None
    windows: int
    length: int
    chunk: int
    needle_tasks: list[str]
    needle_lengths: list[int]
    needle_depths: list[float]
    needle_trials: int
    sample_tokens: int
    prompt: str | None


@dataclass
class BenchSettings:
    """What is timed: attention alone (first four), whole steps of generate, prompts, calibration."""

    shapes: list[str]
    formats: list[Timed]
    lengths: list[int]
    batches: list[int]
    contexts: list[int]
    peers: list[Peer]
    prefill: list[int]
    steps: int
    rounds: int
    calibration: int


@dataclass
class PeerSettings:
    """A quantised cache of another library, in place of `quant`; axes as that library counts them."""

    name: str
    library: Library
    bits: int
    group: int
    axis_key: int
    axis_value: int


@dataclass
class FrontierSettings:
    """Many formats in one table. sets: {set: {method: the words that one would type for it}}.

    methods: names or patterns of those to run, from all sets; null: those of `set`. contrasts: {sentence: methods}
    printed side by side. spreads: {sentence: pattern}, whose mean and extremes are printed.
    """

    set: str
    methods: list[str] | None
    sets: dict[str, dict[str, str]]
    contrasts: dict[str, list[str]]
    spreads: dict[str, str]


@dataclass
class Settings:
    """The whole configuration of one run."""

    name: str
    runs_root: str
    run_dir: str
    seed: int
    device: Device
    threads: int | None
    model: ModelSettings
    data: DataSettings
    quant: QuantSettings
    stage: StageSettings
    eval: EvalSettings
    bench: BenchSettings
    peer: PeerSettings | None = None
    frontier: FrontierSettings | None = None


def known_keys(kind: type = Settings, prefix: str = "") -> Iterator[str]:
    """The dotted name of every key, groups included."""
    for name, hint in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                yield from known_keys(inner, f"{prefix}{name}.")


def plain(value: Any) -> dict:
    """A settings dataclass as nested dicts of JSON types (enums become their names)."""
    return json.loads(json.dumps(asdict(value)))


def absolute_paths(settings: Settings, launch: Path) -> Settings:
    """Make every path absolute, relative to the directory the command was typed in."""
    settings.runs_root = _absolute(settings.runs_root, launch)
    settings.run_dir = _absolute(settings.run_dir, launch)
    settings.data.path = _absolute(settings.data.path, launch)
    settings.data.eval_path = _absolute(settings.data.eval_path, launch)
    settings.eval.text_path = _absolute(settings.eval.text_path, launch)
    if settings.model.path and _is_local(settings.model.path, launch):
        settings.model.path = _absolute(settings.model.path, launch)
    return settings


def _absolute(path: str | None, launch: Path) -> str | None:
    return str((launch / Path(path).expanduser()).resolve()) if path else None


def _is_local(path: str, launch: Path) -> bool:
    """A folder or file rather than a hub id such as `meta-llama/Llama-2-7b-hf`."""
    spelled_local = path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
    return spelled_local or (launch / path).exists()


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
    if tensor.rounding is Rounding.feedback and tensor.levels is Levels.none:
        yield f"{key}.rounding=feedback needs quantised levels, not {key}.levels=none"
    if tensor.rounding is Rounding.feedback and not tensor.fisher:
        yield f"{key}.rounding=feedback needs {key}.fisher=true (it is made of gradients)"
    if tensor.rank is Rank.threshold and tensor.range is not Range.static:
        yield f"{key}.rank=threshold needs {key}.range=static (the thresholds are the calibrated range)"
    if tensor.rank is Rank.threshold and tensor.rounding is Rounding.feedback:
        yield f"{key}.rank=threshold needs {key}.rounding=nearest (feedback takes every stored outlier for exact)"
    if tensor.rank is Rank.tails and (tensor.range is not Range.token or tensor.scope is not Scope.layer):
        yield f"{key}.rank=tails needs {key}.range=token and {key}.scope=layer"
    fitted = {Books.head: (Levels.nuq,), Books.channel: (Levels.nuq, Levels.mixed)}
    if tensor.books in fitted and tensor.levels not in fitted[tensor.books]:
        names = " or ".join(levels.value for levels in fitted[tensor.books])
        yield f"{key}.books={tensor.books.value} needs {key}.levels={names} (other levels are not fitted that way)"


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
    if ev.text_path and not ev.text:
        yield "eval.text_path is for eval.text=...: give that too, or data.eval_path for held-out text"
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
    shortest = max(quant.sink + quant.window, TIMED_EXACT) + PAGE
    for key, least in {"lengths": shortest, "batches": 1, "contexts": 1, "prefill": 1}.items():
        for value in getattr(bench, key):
            yield from _at_least(f"bench.{key}", value, least)
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
    shortest = quant.sink + quant.window + 2 * PAGE
    if "evaluate" in settings.stage.run and quantised and 2 <= length < shortest:
        yield (
            f"eval.length={length} must be at least quant.sink + quant.window + {2 * PAGE} = {shortest}, "
            "or next to nothing of a window would be quantised"
        )


def _at_least(key: str, value: int | None, least: int) -> Iterator[str]:
    if value is not None and value < least:
        yield f"{key}={value} must be at least {least}"


def _within_context(key: str, length: int, context: int) -> Iterator[str]:
    if length > context:
        yield f"{key}={length} is longer than model.context={context}"
