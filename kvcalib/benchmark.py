"""Stage bench, put together from what the run has: model, artifact, text, and the records of its stages.

Lives beside the stage table because it alone may hand calibration, which is timed, to the measurements in `eval`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcalib import reads, records
from kvcalib.planner import Task
from kvcalib.session import Session
from kvcalib.settings import plain


def benchmark(session: Session, task: Task, stages: list[str]) -> dict:
    """Writes bench.json. stages: names whose recorded times are listed."""
    from kvcalib.artifact.io import load_artifact
    from kvcalib.eval.speed import bench

    chosen = plain(session.settings.bench)
    windows = chosen.pop("calibration")
    found = bench(
        session.model,
        load_artifact(task.inputs["export"] / "kvcalib.safetensors"),
        session.evaluation.ids.flatten(),
        **chosen,
        longest=session.settings.model.context,
        calibration=_calibrating(session, windows) if windows else None,
        stages=_recorded(Path(session.settings.run_dir), stages),
        seed=session.settings.seed,
        progress=task.progress,
    )
    records.write_json(task.out / "bench.json", found)
    return {key: found["conditions"][key] for key in ("seconds", "others_during", "kernel")}


def check_benchmark(session: Session) -> None:
    """Raises ConfigError for what cannot be timed with this model and text."""
    from kvcalib.eval.speed import capped, check_speed

    chosen, longest = session.settings.bench, session.settings.model.context
    contexts, prefill = (capped(counts, longest) for counts in (chosen.contexts, chosen.prefill))
    check_speed(session.model, contexts, prefill, steps=chosen.steps, rounds=chosen.rounds)
    _ = session.evaluation
    if chosen.calibration:
        _ = session.calibration


def _calibrating(session: Session, count: int) -> tuple:
    """(token windows, what measures them as the stages do)"""
    from kvcalib.calib.collect import collect
    from kvcalib.calib.fisher import fisher

    settings, windows = session.settings, session.calibration
    windows = replace(windows, ids=windows.ids[:count])
    tokens = settings.data.sample * len(windows.ids) // settings.data.windows
    options = reads.gradients(settings) | {"seed": settings.seed}

    def measure() -> None:
        with TemporaryDirectory() as folder:
            to = {"sink": settings.quant.sink, "out": Path(folder), "progress": lambda items, *_: items}
            collect(session.model, session.rotary, windows, **to)
            fisher(session.model, session.rotary, windows, tokens=tokens, **to, **options)

    return windows.ids, measure


def _recorded(run_dir: Path, stages: list[str]) -> dict[str, dict]:
    """{stage: {seconds, peak_memory_bytes, reused}} of what is finished in a run."""
    found = {name: records.finished(run_dir, name) for name in stages if name != "bench"}
    return {
        name: {key: there.record[key] for key in ("seconds", "peak_memory_bytes")}
        | {"reused": "reused_from" in there.record}
        for name, there in found.items()
        if there
    }
