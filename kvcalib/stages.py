"""The stage table, and the call of each stage with plain arguments; what it reads is in `reads.py`.

    collect --> outliers --> codebooks --> export --> evaluate --> report
    fisher  ----------------^                 | '--> bench
                             reference -----> measure

A configuration object goes no further down than this file. The modules that do the work are
imported inside the functions that call them, so that composing a configuration loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvcalib import reads, records
from kvcalib.planner import Stage, Task
from kvcalib.session import Session
from kvcalib.settings import Settings, plain

TEXT_KEYS = ("text", "text_path", "text_eval_path", "order", "windows", "length")
CALIBRATING = {"collect", "fisher"}
JUDGING = {"reference", "measure", "evaluate"}
"""Stages that read the calibration text, and those that read the held-out one."""


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
        **reads.gradients(session.settings),
        seed=session.settings.seed,
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
        summary=records.read_json(task.inputs["codebooks"] / "stage.json")["summary"],
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
    key, value = (TensorSpec(**reads.tensor_format(tensor)) for tensor in (quant.key, quant.value))
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


def check_texts(session: Session, names: Iterable[str]) -> None:
    """Refuse, before anything is loaded, texts of the stages `names` that are not there."""
    wanted = set(names)
    reading = {"calibration": wanted & CALIBRATING, "evaluation": wanted & JUDGING}
    session.check_texts(split for split, found in reading.items() if found)


def prepare(session: Session, names: list[str]) -> None:
    """Load what the stages `names` will need, and refuse what cannot work, before the first of them runs."""
    wanted = set(names)
    check_texts(session, wanted)
    if wanted:
        session.use_threads()
    if wanted & {"collect", "fisher", "export", "evaluate", "bench"}:
        session.check_format()
    if "codebooks" in wanted and session.settings.quant.budget is not None:
        _check_budget(session)
    if "measure" in wanted and session.settings.peer:
        _check_peer(session)
    if wanted & CALIBRATING:
        _ = session.calibration
    if "evaluate" in wanted:
        _check_evaluate(session)
    if "bench" in wanted:
        from kvcalib.benchmark import check_benchmark

        check_benchmark(session)
    if wanted & JUDGING:
        _check_text(session)


def _check_budget(session: Session) -> None:
    from kvcalib.calib.mixed import check_budget
    from kvcalib.models.families import layer_shapes

    shapes = [(shape.heads, shape.key_dim, shape.value_dim) for shape in layer_shapes(session.model).values()]
    check_budget(_spec(session.settings), shapes, session.settings.quant.budget)


def _check_peer(session: Session) -> None:
    from kvcalib.eval.peers import check_peer

    check_peer(_peer(session.settings), session.model)


def table_of(settings: Settings) -> tuple[Stage, ...]:
    """The stages of a run: those of our formats, or the two that another library's cache needs."""
    return PEER_TABLE if settings.peer else TABLE


TABLE = (
    Stage("collect", (), reads.collect, _collect, shared=True),
    Stage("fisher", (), reads.fisher, _fisher, shared=True),
    Stage("outliers", ("collect",), reads.outliers, _outliers, shared=True),
    Stage("codebooks", ("fisher", "outliers"), reads.codebooks, _codebooks, shared=True),
    Stage("export", ("codebooks", "outliers"), reads.export, _export),
    Stage("reference", (), reads.reference, _reference, shared=True, derived=True),
    Stage("measure", ("export", "reference"), lambda settings: {}, _measure, derived=True, version=2),
    Stage("evaluate", ("export",), reads.evaluate, _evaluate, derived=True, version=2),
    Stage("bench", ("export",), reads.bench, _bench, derived=True),
    Stage("report", ("evaluate",), reads.report, _report, derived=True),
)
"""In the order in which the stages run."""
PEER_TABLE = (
    Stage("reference", (), reads.reference, _reference, shared=True, derived=True),
    Stage("measure", ("reference",), reads.peer, _measure_peer, derived=True),
)
