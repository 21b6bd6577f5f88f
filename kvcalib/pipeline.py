"""Run the stages that were asked for, each at most once for the same settings and inputs.

The whole plan (`planner.py`) is made, and refused if need be, before the first stage runs. This
module knows nothing of what the stages do: `stages.py` has the table, tests bring their own.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvcalib import __version__, records
from kvcalib.planner import Decision, Planner, Stage, Task
from kvcalib.records import Found
from kvcalib.settings import Settings

log = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "scikit-learn", "numpy")


class Result(NamedTuple):
    """What became of a stage. action: "ran", "reused" or "up to date"; path: its outputs."""

    action: str
    path: Path
    record: dict

    def describe(self) -> str:
        return f"{self.record['seconds']:.1f} s" if self.action == "ran" else self.action


def run(
    settings: Settings, table: tuple[Stage, ...], session: Any, *, progress: Callable, prepare: Callable | None = None
) -> dict[str, Result]:
    """Plan, then do; returns what became of each stage, in the order of the table.

    prepare(session, names of the stages that will run): may raise, before anything has run.
    """
    run_dir = Path(settings.run_dir)
    with records.exclusive(run_dir):
        plan = Planner(settings, table)
        decisions = plan.decisions()
        if prepare:
            prepare(session, [name for name, decision in decisions.items() if decision.action == "run"])
        done: dict[str, Result] = {}
        for stage in table:
            if stage.name in decisions:
                done[stage.name] = _carry_out(stage, decisions[stage.name], plan, session, progress)
        _log_outdated(plan, done)
    return done


def _carry_out(stage: Stage, decision: Decision, plan: Planner, session: Any, progress) -> Result:
    if decision.action == "keep":
        log.info("%s: up to date", stage.name)
        return Result("up to date", decision.found.path, decision.found.record)
    if decision.action == "reuse":
        log.info("%s: re-used from %s", stage.name, decision.found.path)
        return Result("reused", decision.found.path, _reuse(stage, decision.found, plan))
    log.info("%s: %s", stage.name, decision.why)
    record = _execute(stage, plan, session, progress)
    log.info("%s: done in %.1f s", stage.name, record["seconds"])
    return Result("ran", plan.run_dir / stage.name, record)


def _reuse(stage: Stage, found: Found, plan: Planner) -> dict:
    origin = os.path.relpath(found.path, plan.run_dir)
    record = {**found.record, "reused_from": origin}
    with records.replacing(plan.run_dir / stage.name) as out:
        records.write_json(out / "stage.json", record)
    return record


def _execute(stage: Stage, plan: Planner, session: Any, progress) -> dict:
    inputs = {need: plan.found(need) for need in stage.needs}
    started, clock = _now(), time.monotonic()
    _reset_peak_memory()
    with records.replacing(plan.run_dir / stage.name) as out:
        paths = {need: found.path for need, found in inputs.items()}
        summary = stage.run(session, Task(out, paths, progress))
        record = {
            "stage": stage.name,
            "fingerprint": plan.prints[stage.name],
            "settings": plan.reads[stage.name],
            "inputs": {need: _as_input(found, plan) for need, found in inputs.items()},
            "started": started,
            "finished": _now(),
            "seconds": round(time.monotonic() - clock, 3),
            "peak_memory_bytes": _peak_memory(),
            "versions": _versions(),
            "summary": summary,
            "outputs": records.outputs_of(out),
        }
        records.write_json(out / "stage.json", record)
    return record


def _as_input(found: Found, plan: Planner) -> dict:
    return {
        "fingerprint": found.record["fingerprint"],
        "path": os.path.relpath(found.path, plan.run_dir),
        "finished": found.record["finished"],
    }


def _log_outdated(plan: Planner, done: dict[str, Result]) -> None:
    """Name the later stages of this run that no longer belong to what is there now."""
    stale = [
        name
        for name in plan.stages
        if name not in done and (found := plan.found(name)) and found.record["fingerprint"] != plan.prints[name]
    ]
    if stale and any(result.action == "ran" for result in done.values()):
        log.info("now out of date: %s", ", ".join(stale))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _versions() -> dict[str, str]:
    found = {"kvcalib": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _reset_peak_memory() -> None:
    """Let the kernel count the peak of this stage alone (Linux); elsewhere it is the process's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        log.debug("peak memory counts from the start of the process")


def _peak_memory() -> int:
    """Peak resident bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        scale = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
