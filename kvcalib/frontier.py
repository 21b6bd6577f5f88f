"""Many formats on one model and one text: each a run of its own, then one table of them all.

    <runs>/<name>/<method>/            a run: calibration, `reference`, `measure`
    <runs>/<name>/frontier.{json,md,html}

What methods share (statistics of the model, its own predictions) is measured by the first that needs it and re-used by
the others, as between any two runs. Killing the command loses the method that was running; the same command goes on
from there. All settings are composed, and all stages planned, before the first method runs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from kvcalib import pipeline, records, stages
from kvcalib.errors import ConfigError, KvcalibError
from kvcalib.planner import Planner
from kvcalib.session import Session
from kvcalib.settings import FrontierSettings, Settings, plain

log = logging.getLogger(__name__)

EVERY = "all"
OWN = ("quant", "peer", "stage", "stage.run")
"""What a method says, and the command line must not."""


WORD = re.compile(r"""(?:[^\s'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")+""")
"""One word as typed, its quotes included."""


class Method(NamedTuple):
    """One row of the table. words: what is typed for it; due: stages that will run."""

    name: str
    words: str
    settings: Settings
    due: int


def check_typed(keys: set[str]) -> None:
    """Raise ConfigError for settings that would be the same for all methods."""
    for key in sorted(keys & {*OWN}):
        raise ConfigError(
            f"{key}=... is what the methods of a frontier differ in: choose with frontier.methods=[...], or add "
            "\"+frontier.sets.mine.NAME='quant=... quant.key.bits=...'\" frontier.set=mine"
        )


def chosen(settings: FrontierSettings) -> dict[str, str]:
    """Name -> words of the methods that `frontier.methods`, or `frontier.set`, ask for."""
    every = {name: words for group in settings.sets.values() for name, words in group.items()}
    if settings.methods is not None:
        for pattern in settings.methods:
            if not any(fnmatchcase(name, pattern) for name in every):
                known = ", ".join(every)
                raise ConfigError(
                    f"frontier.methods: {pattern!r} is no method, nor a pattern such as kivi*; use {known}"
                )
        return {n: words for n, words in every.items() if any(fnmatchcase(n, p) for p in settings.methods)}
    if settings.set == EVERY:
        return every
    if settings.set not in settings.sets:
        raise ConfigError(f"frontier.set={settings.set} must be one of {', '.join(settings.sets)}, {EVERY}")
    return dict(settings.sets[settings.set])


def run(settings: Settings, compose: Callable[[list[str]], Settings], *, progress: Callable) -> str:
    """Carry out and report; returns what the command prints.

    compose: settings of the command line with some words changed. Raises ConfigError if nothing could be measured.
    """
    with records.exclusive(Path(settings.run_dir)):
        methods = [_planned(settings, name, words, compose) for name, words in chosen(settings.frontier).items()]
        return _report(settings, methods, _rows(methods, progress))


def _rows(methods: list[Method], progress: Callable) -> list[dict]:
    if not methods:
        raise ConfigError("no method is asked for: give frontier.methods=[...] or frontier.set=...")
    rows, loaded, clock = [], {}, Clock(sum(method.due > 0 for method in methods))
    for number, method in enumerate(methods, 1):
        log.info("[%d/%d] %s%s", number, len(methods), method.name, clock.remaining())
        with clock.timing(method.due > 0):
            rows.append(_row(method, loaded, progress))
    if all("error" in row for row in rows):
        raise ConfigError(f"no method could be measured; the first: {rows[0]['error']}")
    return rows


def _planned(settings: Settings, name: str, words: str, compose) -> Method:
    try:
        own = compose([*WORD.findall(words), f"name={name}", "stage=measure"])
        own.run_dir = str(Path(settings.run_dir) / name)
        plan = Planner(own, stages.table_of(own)).decisions()
        due = [stage for stage, decision in plan.items() if decision.action == "run"]
        stages.check_texts(Session(own), due)
    except KvcalibError as error:
        raise ConfigError(f"method {name}: {error}") from error
    return Method(name, words, own, len(due))


def _row(method: Method, loaded: dict, progress: Callable) -> dict:
    """Name, words, and either the metrics or the sentence that says why there are none."""
    row = {"method": method.name, "words": method.words}
    session, table = Session(method.settings, loaded), stages.table_of(method.settings)
    try:
        done = pipeline.run(method.settings, table, session, progress=progress, prepare=stages.prepare)
    except KvcalibError as error:
        log.warning("%s: %s", method.name, error)
        return row | {"error": str(error)}
    return row | (records.read_json(done["measure"].path / "metrics.json") or {})


def _report(settings: Settings, methods: list[Method], rows: list[dict]) -> str:
    from kvcalib.report.frontier import write

    every = [method.settings for method in methods]
    facts = {
        "name": settings.name,
        "model": settings.model.name,
        "text": said_of(
            (s.eval.text.value if s.eval.text else s.data.name, s.eval.windows, s.eval.length) for s in every
        ),
        "calibration": said_of((s.data.name, s.data.windows, s.data.length) for s in every),
        "contrasts": plain(settings.frontier)["contrasts"],
        "spreads": plain(settings.frontier)["spreads"],
        "rows": rows,
    }
    return write(facts, Path(settings.run_dir))


def said_of(texts: Iterable[tuple[str, int, int]]) -> str:
    """(name, windows, length) of the texts of all methods -> `wikitext2 or pydoc, 2 to 32 x 1024 tokens`"""
    names, windows, lengths = zip(*texts, strict=True)
    return f"{' or '.join(dict.fromkeys(names))}, {_span(windows)} x {_span(lengths)} tokens"


def _span(counts: tuple[int, ...]) -> str:
    return f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}"


class Clock:
    """Time left, from the time that methods took so far; those that are finished already count as nothing."""

    def __init__(self, due: int):
        self.due, self.spent = due, []

    def remaining(self) -> str:
        left = self.due - len(self.spent)
        if not self.spent or not left:
            return ""
        minutes = left * sum(self.spent) / len(self.spent) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"

    def timing(self, counts: bool):
        return _Timing(self.spent if counts else [])


class _Timing:
    def __init__(self, spent: list[float]):
        self.spent = spent

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *exception):
        self.spent.append(time.monotonic() - self.start)
