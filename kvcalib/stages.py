"""The stage table: what each stage reads, and its call with plain arguments.

    collect --> outliers --> codebooks --> export --> evaluate --> report
    fisher  ----------------^                 | '--> bench
                             reference -----> measure

A configuration object goes no further down than this file. The modules that do the work are
imported inside the functions that call them, so that composing a configuration loads no torch.
"""

from __future__ import annotations

import glob
import hashlib
from functools import cache
from pathlib import Path

from kvcalib import records
from kvcalib.planner import Stage, Task
from kvcalib.session import MODEL_KEYS, Session
from kvcalib.settings import Settings, TensorSettings, plain

# ---- what a stage reads: nested dicts of JSON types, compared by the planner


WEIGHT_FILES = {".safetensors", ".gguf", ".json", ".model"}
TEXT_KEYS = ("text", "text_path", "order", "windows", "length")
FIT_KEYS = ("fisher", "range_weight", "solver")


def _model_reads(settings: Settings) -> dict:
    """The weights: where they come from, and for local files their sizes and times."""
    model = plain(settings.model)
    kept = {key: model[key] for key in MODEL_KEYS}
    if kept["path"]:  # overrides every other source
        kept.update(packages=[], sha256=None)
        files = [file for file in _files_of(kept["path"]) if file.suffix in WEIGHT_FILES]
        kept["files"] = {file.name: _stamp(file) for file in files}
    return kept


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} bytes, {stat.st_mtime_ns}"


def _data_reads(settings: Settings, *keys: str) -> dict:
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
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _files_of(path: str | None) -> list[Path]:
    """The files that a path (file, folder or glob) stands for, sorted; [] if none exists."""
    if not path:
        return []
    root = Path(path)
    if root.is_dir():
        return sorted(p for p in root.rglob("*") if p.is_file())
    return [root] if root.is_file() else sorted(Path(p) for p in glob.glob(path))


def _collect_reads(settings: Settings) -> dict:
    return {
        "model": _model_reads(settings),
        "data": _data_reads(settings, "windows", "length", "order"),
        "quant": {"sink": settings.quant.sink},
        "seed": settings.seed,
    }


def _fisher_reads(settings: Settings) -> dict:
    reads = _collect_reads(settings)
    reads["data"]["sample"] = settings.data.sample
    return reads


def _outliers_reads(settings: Settings) -> dict:
    """The whole format, though bits do not enter: the frames say which format they are for."""
    return {"quant": {"key": _format(settings.quant.key), "value": _format(settings.quant.value)}}


def _format(tensor: TensorSettings) -> dict:
    return {name: item for name, item in plain(tensor).items() if name not in FIT_KEYS}


def _codebooks_reads(settings: Settings) -> dict:
    quant = plain(settings.quant)
    return {"quant": {name: quant[name] for name in ("key", "value", "budget")}, "seed": settings.seed}


def _export_reads(settings: Settings) -> dict:
    quant = plain(settings.quant)
    return {"quant": {key: item for key, item in quant.items() if key != "name"}}


def _evaluate_reads(settings: Settings) -> dict:
    measure = plain(settings.eval)
    measure["text_path"] = _content(measure["text_path"])
    measure["order"] = measure["order"] or settings.data.order.value
    data = {} if measure["text"] else _data_reads(settings)
    return {"eval": measure, "data": data, "seed": settings.seed}


def _reference_reads(settings: Settings) -> dict:
    reads = _evaluate_reads(settings)
    dropped = ("chunk", "sample_tokens", "prompt")
    reads["eval"] = {key: item for key, item in reads["eval"].items() if key not in dropped}
    return {"model": _model_reads(settings), **reads}


def _peer_reads(settings: Settings) -> dict:
    return {"peer": plain(settings.peer), "quant": {"sink": settings.quant.sink}}


def _bench_reads(settings: Settings) -> dict:
    return {"bench": plain(settings.bench), "threads": settings.threads}


def _report_reads(settings: Settings) -> dict:
    bench = records.finished(Path(settings.run_dir), "bench")
    return {"name": settings.name, "bench": bench.record["fingerprint"] if bench else None}


# ---- what a stage does: plain arguments to the function that has its name


def _collect(session: Session, task: Task) -> dict:
    from kvcalib.calib.collect import collect

    return collect(
        session.model,
        session.rotary,
        session.calibration,
        sink=session.settings.quant.sink,
        out=task.out,
        progress=task.progress,
    )


def _fisher(session: Session, task: Task) -> dict:
    from kvcalib.calib.fisher import fisher

    return fisher(
        session.model,
        session.rotary,
        session.calibration,
        sink=session.settings.quant.sink,
        tokens=session.settings.data.sample,
        out=task.out,
        progress=task.progress,
    )


def _outliers(session: Session, task: Task) -> dict:
    from kvcalib.calib.outliers import outliers

    return outliers(task.inputs["collect"], _spec(session.settings), out=task.out)


def _codebooks(session: Session, task: Task) -> dict:
    from kvcalib.calib.codebooks import Fit, codebooks

    quant = session.settings.quant
    return codebooks(
        task.inputs["outliers"],
        task.inputs["fisher"],
        _spec(session.settings),
        key=Fit(quant.key.solver.value, quant.key.fisher, quant.key.range_weight),
        value=Fit(quant.value.solver.value, quant.value.fisher, quant.value.range_weight),
        budget=quant.budget,
        seed=session.settings.seed,
        out=task.out,
        progress=task.progress,
    )


def _export(session: Session, task: Task) -> dict:
    from kvcalib.calib.export import export

    return export(
        session.model,
        task.inputs["outliers"],
        task.inputs["codebooks"],
        _spec(session.settings),
        settings=_shipped(session.settings),
        out=task.out,
    )


def _shipped(settings: Settings) -> dict:
    """The settings that travel with the artifact: no path of this machine among them."""
    data = plain(settings.data)
    kept = {key: data[key] for key in ("name", "windows", "length", "order", "sample")}
    quant = plain(settings.quant)
    return {"model": settings.model.name, "data": kept, "quant": quant, "seed": settings.seed}


def _spec(settings: Settings):
    """The format of the cache; how its levels are fitted stays behind."""
    from kvcalib.quant.spec import CacheSpec, TensorSpec

    quant = settings.quant
    key, value = (TensorSpec(**_format(tensor)) for tensor in (quant.key, quant.value))
    return CacheSpec(key, value, quant.window, quant.sink)


def _evaluate(session: Session, task: Task) -> dict:
    from kvcalib.artifact.io import load_artifact
    from kvcalib.eval.run import evaluate

    measure = plain(session.settings.eval)
    metrics = evaluate(
        session.model,
        session.tokenizer,
        load_artifact(task.inputs["export"] / "kvcalib.safetensors"),
        session.evaluation.ids,
        **{key: item for key, item in measure.items() if key not in TEXT_KEYS},
        seed=session.settings.seed,
        progress=task.progress,
    )
    records.write_json(task.out / "metrics.json", metrics)
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _bench(session: Session, task: Task) -> dict:
    from kvcalib.benchmark import benchmark

    return benchmark(session, task, [stage.name for stage in TABLE])


def _reference(session: Session, task: Task) -> dict:
    from kvcalib.eval.reference import reference

    measure = session.settings.eval
    return reference(
        session.model,
        session.tokenizer,
        session.evaluation.ids,
        tasks=measure.needle_tasks,
        lengths=measure.needle_lengths,
        depths=measure.needle_depths,
        trials=measure.needle_trials,
        seed=session.settings.seed,
        out=task.out,
        progress=task.progress,
    )


def _measure(session: Session, task: Task) -> dict:
    from kvcalib.artifact.io import load_artifact
    from kvcalib.eval.measure import Calibrated

    return _measured(
        session, task, Calibrated(load_artifact(task.inputs["export"] / "kvcalib.safetensors"), session.model)
    )


def _measure_peer(session: Session, task: Task) -> dict:
    from kvcalib.eval.measure import Foreign

    return _measured(session, task, Foreign(_peer(session.settings), session.model, session.settings.quant.sink))


def _peer(settings: Settings):
    from kvcalib.eval.peers import Peer

    return Peer(**{key: item for key, item in plain(settings.peer).items() if key != "name"})


def _measured(session: Session, task: Task, member) -> dict:
    from kvcalib.eval.measure import measure

    inputs = session.model, session.tokenizer, member, session.evaluation.ids, task.inputs["reference"]
    metrics = measure(*inputs, seed=session.settings.seed, progress=task.progress)
    records.write_json(task.out / "metrics.json", metrics)
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _report(session: Session, task: Task) -> dict:
    from kvcalib.report.build import build

    return build(Path(session.settings.run_dir), out=task.out)


def _check_evaluate(session: Session) -> None:
    from kvcalib.eval.run import check_pages
    from kvcalib.eval.sample import check_prompt

    measure = session.settings.eval
    check_pages(_spec(session.settings), measure.length, measure.chunk)
    check_prompt(session.model, session.tokenizer, measure.prompt)


def _check_text(session: Session) -> None:
    from kvcalib.eval.prompts import check_needles

    measure = session.settings.eval
    if measure.needle_trials > 0:
        lengths, depths = measure.needle_lengths, measure.needle_depths
        check_needles(session.tokenizer, lengths, depths, tasks=measure.needle_tasks)
    _ = session.evaluation


def prepare(session: Session, names: list[str]) -> None:
    """Load what the stages `names` will need, and refuse what cannot work, before the first of them runs."""
    wanted = set(names)
    if wanted & {"collect", "fisher", "export", "evaluate", "bench"}:
        session.check_format()
    if "measure" in wanted and session.settings.peer:
        _check_peer(session)
    if wanted & {"collect", "fisher"}:
        _ = session.calibration
    if "evaluate" in wanted:
        _check_evaluate(session)
    if "bench" in wanted:
        from kvcalib.benchmark import check_benchmark

        check_benchmark(session)
    if wanted & {"evaluate", "reference", "measure"}:
        _check_text(session)


def _check_peer(session: Session) -> None:
    from kvcalib.eval.peers import real_peer

    real_peer(_peer(session.settings), session.model)


def table_of(settings: Settings) -> tuple[Stage, ...]:
    """The stages of a run: those of our formats, or the two that another library's cache needs."""
    return PEER_TABLE if settings.peer else TABLE


TABLE = (
    Stage("collect", (), _collect_reads, _collect, shared=True),
    Stage("fisher", (), _fisher_reads, _fisher, shared=True),
    Stage("outliers", ("collect",), _outliers_reads, _outliers, shared=True),
    Stage("codebooks", ("fisher", "outliers"), _codebooks_reads, _codebooks, shared=True),
    Stage("export", ("codebooks", "outliers"), _export_reads, _export),
    Stage("reference", (), _reference_reads, _reference, shared=True, derived=True),
    Stage("measure", ("export", "reference"), lambda settings: {}, _measure, derived=True),
    Stage("evaluate", ("export",), _evaluate_reads, _evaluate, derived=True),
    Stage("bench", ("export",), _bench_reads, _bench, derived=True),
    Stage("report", ("evaluate",), _report_reads, _report, derived=True),
)
"""In the order in which the stages run."""
PEER_TABLE = (
    Stage("reference", (), _reference_reads, _reference, shared=True, derived=True),
    Stage("measure", ("reference",), _peer_reads, _measure_peer, derived=True),
)
