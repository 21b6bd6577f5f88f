"""Decide what has to be done for each stage, before anything is done.

    fingerprint(stage) = sha256(settings it reads, fingerprints of its inputs, its version)

For each selected stage, and for every prerequisite that is missing:

    same fingerprint in this run                 keep
    none here, same fingerprint in another run   reuse (stages marked `shared`)
    none                                         run
    different fingerprint                        run again, if it is the one stage that the user named, one made
                                                 from finished results only, or a prerequisite that differs in
                                                 `quant.*` alone (another format of the same model and
                                                 text); else refused with a sentence

`stage.force=true` turns the refusal of selected stages into running again; where nothing has changed, it runs the
selected stages again. In a comparison it allows what is stale to be run again, and no more. So a change of
format costs what depends on it; the model is measured again where the new format wants other measurements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcalib import records
from kvcalib.errors import ConfigError
from kvcalib.records import Found
from kvcalib.settings import Settings

SHOWN = 4
"""Changed keys that a sentence names."""
FILES = "model.files."
ABSENT = "(absent)"
"""What a setting was before there was a key for it."""


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
    """What will be done about a stage. action: "run", "reuse" or "keep"; why: what the log says of it."""

    action: str
    why: str
    found: Found | None = None


class Planner:
    """Fingerprints of all stages, and the decision about each."""

    def __init__(self, settings: Settings, table: tuple[Stage, ...]):
        self.stages = {stage.name: stage for stage in table}
        self.run_dir, self.runs_root = Path(settings.run_dir), Path(settings.runs_root)
        self.selected, self.force = tuple(settings.stage.run), settings.stage.force
        self.compared = settings.frontier is not None
        self.forced: tuple[str, ...] = ()
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
            self._refuse_file(self.run_dir / name)
        alone = len(self.selected) == 1 or not any(map(self._stale, self.selected))
        if self.force and alone and not self.compared:
            self.forced = self.selected
        for name in self.stages:
            if name in self.selected:
                self._visit(name, "selected")
        return self.made

    def found(self, name: str) -> Found | None:
        return records.finished(self.run_dir, name)

    def _refuse_file(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file where a stage writes its folder: move it away, or give name=...")

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
        if name in self.forced:
            return Decision("run", "running (stage.force=true)")
        if found and self._current(stage, found):
            return Decision("keep", "up to date", found)
        if found and not self._may_redo(stage, found):
            raise ConfigError(self._refusal(stage, *self._cause(stage, found)))
        other = self._elsewhere(stage)
        return Decision("reuse", why, other) if other else Decision("run", self._reason(stage, found, why))

    def _reason(self, stage: Stage, found: Found | None, why: str) -> str:
        if found:
            what = "settings" if self._differing(stage, found) else "inputs or code"
            return f"{what} changed ({self._changes(stage, found)}), running again"
        if (self.run_dir / stage.name / "stage.json").exists():
            return "its record or one of its files is damaged or gone, running again"
        return f"running ({why})"

    def _may_redo(self, stage: Stage, found: Found) -> bool:
        if stage.derived or self.selected == (stage.name,):
            return True
        if stage.name in self.selected or self.compared:
            return self.force
        only_reads = all(self.stages[name].derived for name in self.selected)  # evaluate must not remake what it judges
        return not only_reads and self._differs_in_format(stage, found)

    def _differs_in_format(self, stage: Stage, found: Found) -> bool:
        """Whether nothing but `quant.*`, here or further up, makes the stage stale."""
        keys = self._differing(stage, found)
        own = all(key.startswith("quant.") for key in keys)
        return own and bool(keys or self._other_inputs(stage, found)) and all(map(self._usable, stage.needs))

    def _usable(self, name: str) -> bool:
        """Whether the stage is missing, current, or may be redone as a prerequisite."""
        stage, found = self.stages[name], self.found(name)
        return not found or self._current(stage, found) or self._differs_in_format(stage, found)

    def _stale(self, name: str) -> bool:
        found = self.found(name)
        return found is not None and not self._current(self.stages[name], found)

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

    def _refusal(self, refused: Stage, stage: Stage, found: Found) -> str:
        """refused: the stage that may not be redone; stage: the earliest one that has changed, which causes it."""
        there = f"stage {stage.name} of {self.run_dir} is there with other settings ({self._changes(stage, found)})"
        if self.compared:
            return f"{there}: give name=... for another comparison, or stage.force=true to redo what has changed"
        if refused.name not in self.selected and self._differs_in_format(refused, self.found(refused.name)):
            kept = ", which measures the model no second time" if stage.needs else ""
            return (
                f"stage {refused.name} of {self.run_dir} is there for another format "
                f"({self._changes(stage, found)}), and {' or '.join(self.selected)} judges what is there: type "
                f"stage={refused.name} first{kept}, or give name=... for a new run"
            )
        replace = "stage.force=true" if stage.name in self.selected else "stage=all stage.force=true"
        return f"{there}: give name=... for a new run, or {replace} to redo it and what follows from it"

    def _changes(self, stage: Stage, found: Found) -> str:
        """What differs from the record, old -> new."""
        old, new = _flat(found.record["settings"]), _flat(self.reads[stage.name])
        keys, stale = self._differing(stage, found), self._other_inputs(stage, found)
        parts = [_difference(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys[:SHOWN]]
        parts += [f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
        if not parts and stale:
            parts = [f"other result of {', '.join(stale)}"]
        elif not parts and found.record["fingerprint"] == self.prints[stage.name]:
            parts = [f"{' or '.join(stage.needs)} made anew"]
        return ", ".join(parts) or "made by another version of kvcalib"

    def _differing(self, stage: Stage, found: Found) -> list[str]:
        """Dotted keys of the settings that are not as recorded."""
        old, new = _flat(found.record["settings"]), _flat(self.reads[stage.name])
        return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]

    def _other_inputs(self, stage: Stage, found: Found) -> list[str]:
        """Inputs that have, or will have, another result than the recorded one."""
        before = {need: item["fingerprint"] for need, item in found.record["inputs"].items()}
        return [need for need in stage.needs if before.get(need) != self.prints[need]]


def _difference(key: str, old: Any, new: Any) -> str:
    """A changed setting for the eye: a fingerprint of content says nothing but that it changed."""
    if key.startswith(FILES):
        return f"file {key.removeprefix(FILES)} of model.path changed"
    if any(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in (old, new)):
        return f"content of {key} changed"
    return f"{key} {old} -> {new}"


def _flat(tree: dict, prefix: str = "") -> dict:
    """Nested dicts as one dict of dotted keys."""
    flat = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat.update(inner if inner is not None else {f"{prefix}{key}": value})
    return flat
