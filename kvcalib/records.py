"""What a stage leaves behind, and when it counts as finished.

    <run>/<stage>/stage.json    written last, inside <stage>.partial, which is then renamed

`stage.json` holds the fingerprint, the settings that were read, the inputs, times, versions, a
summary and the list of output files with sizes. A stage whose result was found in another run has
only this file, with `reused_from` (a path relative to the run folder). A kill at any moment leaves
the old finished stage or none: renames are atomic, and `.partial` folders are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvcalib.errors import ConfigError

PARTIAL = ".partial"
RECORD = {"fingerprint": str, "settings": dict, "inputs": dict, "finished": str, "outputs": list}
"""What a stage.json must hold to count."""


class Found(NamedTuple):
    """A finished stage: its record, and the folder that holds the outputs."""

    record: dict
    path: Path


def fingerprint(content: Any) -> str:
    """sha256 of the canonical JSON text."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Any | None:
    """The content, or None where there is no readable JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Atomically: a reader sees the old file or the whole new one."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_record(folder: Path) -> dict | None:
    """The content of stage.json, or None where it is missing or damaged."""
    record = read_json(folder / "stage.json")
    if not isinstance(record, dict) or any(type(record.get(key)) is not kind for key, kind in RECORD.items()):
        return None
    return record


def finished(run_dir: Path, stage: str) -> Found | None:
    """The finished stage of a run, with every output in place; else None."""
    record = read_record(run_dir / stage)
    if record is None:
        return None
    path = run_dir / stage
    if "reused_from" in record:
        path = Path(os.path.normpath(run_dir / record["reused_from"]))
        origin = read_record(path)
        if origin is None or origin["fingerprint"] != record["fingerprint"]:
            return None
    return Found(record, path) if _complete(path, record["outputs"]) else None


def sibling(runs_root: Path, run_dir: Path, stage: str, wanted: str) -> Found | None:
    """The same stage with the same fingerprint, finished in another run of the root or one folder below, or beside."""
    places = {*runs_root.glob(f"*/{stage}/stage.json"), *runs_root.glob(f"*/*/{stage}/stage.json")}
    places |= {*run_dir.parent.glob(f"*/{stage}/stage.json")}
    for path in sorted(places):
        other = path.parent.parent
        found = finished(other, stage) if other != run_dir else None
        if found and "reused_from" not in found.record and found.record["fingerprint"] == wanted:
            return found
    return None


def outputs_of(folder: Path) -> list[dict]:
    """Every file below the folder with its size, sorted by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [{"file": str(p.relative_to(folder)), "bytes": p.stat().st_size} for p in files]


def _complete(folder: Path, outputs: list[dict]) -> bool:
    """Every output has its size, and those in JSON can be read."""
    paths = [(folder / item["file"], item["bytes"]) for item in outputs]
    whole = all(path.is_file() and path.stat().st_size == size for path, size in paths)
    return whole and all(read_json(path) is not None for path, _ in paths if path.suffix == ".json")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that takes its place when the block ends without error.

    Its files get the mode that the umask asks for, whatever the library that wrote them thinks.
    """
    fresh = target.with_name(target.name + PARTIAL)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _open_to_readers(fresh)
    old = target.with_name(target.name + ".old" + PARTIAL)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.replace(old)
    fresh.replace(target)
    shutil.rmtree(old, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Hold the run folder: two processes must not write it at once. A kill lets go of it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as lock:
        _lock(lock, run_dir)
        for leftover in run_dir.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _lock(lock, run_dir: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: no lock, as for most tools there
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"run folder {run_dir} is in use by another process: wait for it, or give name=..."
        ) from error
