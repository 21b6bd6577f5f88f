"""What each stage reads: the settings that decide its result, as nested dicts of JSON types.

The planner compares them. A function has the name of its stage (`peer`: `measure` for another library's cache;
`gradients`: the part that stage fisher is called with). Text counts by its content and weights by size and time, so
that a moved file is the same text.
"""

from __future__ import annotations

import glob
import hashlib
import os
from functools import cache
from pathlib import Path

from kvcalib import records
from kvcalib.errors import MissingInput
from kvcalib.session import MODEL_KEYS
from kvcalib.settings import Settings, TensorSettings, plain

WEIGHT_FILES = {".safetensors", ".gguf", ".json", ".model"}
FIT_KEYS = ("fisher", "range_weight", "solver")


def _model(settings: Settings) -> dict:
    """The weights: where they come from, and for local files their sizes and times."""
    model = plain(settings.model)
    kept = {key: model[key] for key in MODEL_KEYS}
    if kept["path"]:  # overrides every other source
        kept.update(packages=[], sha256=None)
        files = [file for file in _files_of(kept["path"]) if file.suffix in WEIGHT_FILES]
        kept["files"] = {_below(file, Path(kept["path"])): _stamp(file) for file in files}
    return kept


def _below(file: Path, root: Path) -> str:
    """`step-10/model.safetensors`: the name alone may be there twice."""
    return file.relative_to(root).as_posix() if root.is_dir() else file.name


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} bytes, {stat.st_mtime_ns}"


def _data(settings: Settings, *keys: str) -> dict:
    """The text: local files by content, so that a moved file is the same text."""
    data = plain(settings.data)
    contents = {key: _content(data[key]) for key in ("path", "eval_path")}
    return {"name": data["name"], **contents, **{key: data[key] for key in keys}}


def _content(path: str | None) -> str | None:
    files = _files_of(path)
    if not files:
        return path
    return records.fingerprint([_digest(file, _stamp(file)) for file in files])


@cache
def _digest(path: Path, stamp: str) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise MissingInput(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _files_of(path: str | None) -> list[Path]:
    """The files that a path (file, folder or glob) stands for, sorted; [] if none exists."""
    if not path:
        return []
    root = Path(path)
    if root.is_dir():
        return sorted(p for p in root.rglob("*") if p.is_file())
    return [root] if root.is_file() else sorted(p for p in map(Path, glob.glob(path)) if p.is_file())


def collect(settings: Settings) -> dict:
    return {
        "model": _model(settings),
        "data": _data(settings, "windows", "length", "order"),
        "quant": {"sink": settings.quant.sink},
        "seed": settings.seed,
    }


def fisher(settings: Settings) -> dict:
    kept = collect(settings)
    kept["data"]["sample"] = settings.data.sample
    kept["quant"] |= gradients(settings)
    return kept


def gradients(settings: Settings) -> dict:
    """Whose labels stage fisher takes, and of which text: arguments of its own."""
    return {"labels": settings.quant.labels.value, "repeat": settings.quant.repeat}


def outliers(settings: Settings) -> dict:
    """The whole format, though bits do not enter: the frames say which format they are for."""
    return {"quant": {"key": tensor_format(settings.quant.key), "value": tensor_format(settings.quant.value)}}


def tensor_format(tensor: TensorSettings) -> dict:
    return {name: item for name, item in plain(tensor).items() if name not in FIT_KEYS}


def codebooks(settings: Settings) -> dict:
    quant = plain(settings.quant)
    return {"quant": {name: quant[name] for name in ("key", "value", "budget")}, "seed": settings.seed}


def export(settings: Settings) -> dict:
    quant = plain(settings.quant)
    return {"quant": {key: item for key, item in quant.items() if key != "name"}}


def evaluate(settings: Settings) -> dict:
    measure = plain(settings.eval)
    measure |= {key: _content(measure[key]) for key in ("text_path", "text_eval_path")}
    measure["order"] = measure["order"] or settings.data.order.value
    data = {} if measure["text"] else _data(settings)
    return {"eval": measure, "data": data, "seed": settings.seed}


def reference(settings: Settings) -> dict:
    kept = evaluate(settings)
    dropped = ("chunk", "sample_tokens", "prompt")
    kept["eval"] = {key: item for key, item in kept["eval"].items() if key not in dropped}
    return {"model": _model(settings), **kept}


def peer(settings: Settings) -> dict:
    return {"peer": plain(settings.peer), "quant": {"sink": settings.quant.sink}}


def bench(settings: Settings) -> dict:
    """Which text is timed makes no difference that could be told from noise."""
    return {
        "bench": plain(settings.bench),
        "threads": settings.threads,
        "device": settings.device.value,
        "kernel": os.environ.get("KVCALIB_KERNEL") or "auto",
        "model": {"context": settings.model.context},
    }


def report(settings: Settings) -> dict:
    timed = records.finished(Path(settings.run_dir), "bench")
    return {"name": settings.name, "bench": timed.record["finished"] if timed else None}
