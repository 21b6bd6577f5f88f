"""Every key of the configuration, as plain dataclasses; `checks.py` says which values go together.

Values live in `conf/*.yaml`; this file says which keys exist and which types they have. The
command line merges the YAML into this schema, so a misspelt key or a wrong type is refused before
anything runs. Choices are enums, because the merge then lists the allowed names. The classes are
not frozen, because the merge fills them; everything below the pipeline treats them as read-only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

STAGES = ("collect", "fisher", "outliers", "codebooks", "export", "reference", "measure", "evaluate", "bench", "report")
PAGE = 32


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
Rounding = _choice("Rounding", "nearest", "feedback", "trellis")
Labels = _choice("Labels", "text", "model")
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
    """Format of keys or values (the first thirteen) and how its levels are fitted (the rest)."""

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
    q_norm: bool
    unbiased: bool
    fisher: bool
    range_weight: bool
    solver: Solver


@dataclass
class QuantSettings:
    """Format of the cache; `window` recent and `sink` first tokens stay exact; `budget` is for levels=mixed.

    labels: whose next tokens gradients are taken for; repeat: share of windows whose second half repeats the first.
    """

    name: str
    key: TensorSettings
    value: TensorSettings
    window: int
    sink: int
    budget: float | None
    labels: Labels
    repeat: float


@dataclass
class StageSettings:
    """Which stages run. Selects work, nothing else."""

    run: list[str]
    force: bool


@dataclass
class EvalSettings:
    """What is measured on held-out text. `text` names another than calibration's.

    `text_path` and `text_eval_path` are its `data.path` and `data.eval_path`.
    """

    text: Text | None
    text_path: str | None
    text_eval_path: str | None
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
    settings.eval.text_eval_path = _absolute(settings.eval.text_eval_path, launch)
    if settings.model.path and _is_local(settings.model.path, launch):
        settings.model.path = _absolute(settings.model.path, launch)
    return settings


def _absolute(path: str | None, launch: Path) -> str | None:
    return str((launch / Path(path).expanduser()).resolve()) if path else None


def _is_local(path: str, launch: Path) -> bool:
    """A folder or file rather than a hub id such as `meta-llama/Llama-2-7b-hf`."""
    spelled_local = path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
    return spelled_local or (launch / path).exists()
