"""Decide what has to be done for each stage, before anything is done.

    fingerprint(stage) = sha256(settings it reads, fingerprints of its inputs, its version)

For each selected stage, and for every prerequisite that is missing:

    same fingerprint in this run                 keep
    none here, same fingerprint in another run   reuse (stages marked `shared`)
    none                                         run
    different fingerprint                        refused with a sentence, unless stage.force=true,
                                                 or it is the one stage that the user named
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcalib import records
from kvcalib.errors import ConfigError
from kvcalib.records import Found
from kvcalib.settings import Settings


class Task(NamedTuple):
    """What a stage is given: where to write, where its inputs lie, how to show progress."""

    out: Path
    inputs: dict[str, Path]
    progress: Callable[..., Iterable]


class Stage(NamedTuple):
    """One row of the stage table.

    needs    names of the stages whose outputs it reads
    reads    the settings that decide its result, as a nested dict of JSON types
    run      does the work with (session, task), writes into task.out, returns a small summary
    version  raised when the code changes so that old results no longer count
    shared   its result may be taken from another run
    derived  made from finished results only, so a stale one is redone without asking
    """

    name: str
    needs: tuple[str, ...]
    reads: Callable[[Settings], dict]
    run: Callable[[Any, Task], dict]
    version: int = 1
    shared: bool = False
    derived: bool = False


class Decision(NamedTuple):
    """What will be done about a stage. action: "run", "reuse" or "keep"; why: for the log."""

    action: str
    why: str
    found: Found | None = None


class Planner:
    """Fingerprints of all stages, and the decision about each."""

    def __init__(self, settings: Settings, table: tuple[Stage, ...]):
        self.stages = {stage.name: stage for stage in table}
        self.run_dir, self.runs_root = Path(settings.run_dir), Path(settings.runs_root)
        self.selected, self.force = tuple(settings.stage.run), settings.stage.force
        self.reads: dict[str, dict] = {}
        self.prints: dict[str, str] = {}
        self.made: dict[str, Decision] = {}
        for stage in table:
            self.reads[stage.name] = stage.reads(settings)
            inputs = {need: self.prints[need] for need in stage.needs}
            content = [stage.name, stage.version, self.reads[stage.name], inputs]
            self.prints[stage.name] = records.fingerprint(content)

    def decisions(self) -> dict[str, Decision]:
        for name in self.stages:
            if name in self.selected:
                self._visit(name, "selected")
        return self.made

    def found(self, name: str) -> Found | None:
        return records.finished(self.run_dir, name)

    def _visit(self, name: str, why: str) -> None:
        if name in self.made:
            return
        for need in self.stages[name].needs:  # first in order, so the cause is refused first
            if need in self.selected:
                self._visit(need, "selected")
        self.made[name] = self._decide(self.stages[name], why)
        if self.made[name].action == "run":
            for need in self.stages[name].needs:
                self._visit(need, f"needed by {name}")

    def _decide(self, stage: Stage, why: str) -> Decision:
        name, found = stage.name, self.found(stage.name)
        if self.force and name in self.selected:
            return Decision("run", "forced")
        if found:
            if self._current(stage, found):
                return Decision("keep", "up to date", found)
            if not stage.derived and self.selected != (name,):
                raise ConfigError(self._refusal(*self._cause(stage, found)))
            why = f"again, {self._changes(stage, found)}"
        other = self._elsewhere(stage)
        return Decision("reuse", why, other) if other else Decision("run", why)

    def _elsewhere(self, stage: Stage) -> Found | None:
        if not stage.shared:
            return None
        wanted = self.prints[stage.name]
        return records.sibling(self.runs_root, self.run_dir, stage.name, wanted)

    def _current(self, stage: Stage, found: Found) -> bool:
        if found.record["fingerprint"] != self.prints[stage.name]:
            return False
        return not stage.derived or self._not_older(stage, found.record["inputs"])

    def _not_older(self, stage: Stage, inputs: dict) -> bool:
        """Whether no input was made anew, with the same settings, since the stage ran."""
        now = {need: self.found(need) for need in stage.needs}
        return all(
            self.made.get(need, Decision("keep", "")).action != "run"
            and now[need] is not None
            and now[need].record["finished"] == inputs[need]["finished"]
            for need in stage.needs
        )

    def _cause(self, stage: Stage, found: Found) -> tuple[Stage, Found]:
        """The earliest stage whose change makes this one stale."""
        for need in stage.needs:
            other = self.found(need)
            if other and not self._current(self.stages[need], other):
                return self._cause(self.stages[need], other)
        return stage, found

    def _refusal(self, stage: Stage, found: Found) -> str:
        selected = stage.name in self.selected
        replace = "stage.force=true" if selected else "stage=all stage.force=true"
        ready = all(need in self.made and self.made[need].action != "run" for need in stage.needs)
        alone = f", or stage={stage.name} to redo that stage alone" if selected and ready else ""
        return (
            f"stage {stage.name} of {self.run_dir} is there with other settings "
            f"({self._changes(stage, found)}): give name=... for a new run, "
            f"or {replace} to replace it{alone}"
        )

    def _changes(self, stage: Stage, found: Found) -> str:
        """What differs from the record, old -> new."""
        old, new = _flat(found.record["settings"]), _flat(self.reads[stage.name])
        keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        parts = [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys[:8]]
        parts += [f"and {len(keys) - 8} more"] if len(keys) > 8 else []
        before = {need: item["fingerprint"] for need, item in found.record["inputs"].items()}
        stale = [need for need in stage.needs if before.get(need) != self.prints[need]]
        if not parts and stale:
            parts = [f"other result of {', '.join(stale)}"]
        return ", ".join(parts) or "made anew by another version, or from inputs made anew"


def _flat(tree: dict, prefix: str = "") -> dict:
    """Nested dicts as one dict of dotted keys."""
    flat = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat.update(inner if inner is not None else {f"{prefix}{key}": value})
    return flat
