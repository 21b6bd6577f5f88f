"""Calibration and evaluation text by name; the two never overlap.

    pydoc      English reference text of Python's standard library (pydoc_data.topics), sorted by
               topic: even topics calibrate, odd ones evaluate, and a paragraph that several topics
               share belongs to the first. Always there, no download.
    pycode     source code of Python's standard library, the modules that are one file: even ones calibrate, odd
               ones evaluate. Always there, no download.
    wikitext2  train split calibrates, test split evaluates. Text as in the original files, one
               line after the other.
    c4         first documents of one train shard, and of one validation shard, CHARACTERS of each.
    textfile   UTF-8 text of your own. Without `eval_path` the last HELD_OUT share of the text, from
               the next line start, evaluates and the rest calibrates.

`eval_path` replaces the evaluation text of every name. Several files, topics or documents are
joined by a blank line, files in sorted order.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvcalib.data.hub import hub_column
from kvcalib.errors import ConfigError, MissingInput

CHARACTERS = 16_000_000
"""Text taken from C4: some four million tokens, of the two hundred million of a shard."""
HELD_OUT = 0.1
REPEATABLE = 60
"""Characters below which a paragraph may occur in both halves of pydoc."""
JSON_NAME = re.compile(r"\.jsonl?(\.gz)?$")
SPLITS = ("calibration", "evaluation")
BUILT_IN = ("pydoc", "pycode")
FOLDERS = {
    "wikitext2": {"calibration": "wiki.train*.raw", "evaluation": "wiki.test*.raw"},
    "c4": {"calibration": "c4-train*.json*", "evaluation": "c4-validation*.json*"},
}
"""What the files of each split are called where a folder holds both."""
C4_FILES = {
    "calibration": "en/c4-train.00000-of-01024.json.gz",
    "evaluation": "en/c4-validation.00000-of-00008.json.gz",
}


class Corpus(NamedTuple):
    """A text by name. path, eval_path: file, folder or glob; prefix: of the settings that these come from."""

    name: str
    path: str | None = None
    eval_path: str | None = None
    prefix: str = "data."

    def files(self, split: str) -> list[Path]:
        """What the split is read from; [] for text that no file of the user's holds.

        Raises MissingInput where there is no such file, ConfigError where the path is for another split or name.
        """
        if split == "evaluation" and self.eval_path is not None:
            return files_of(self.eval_path, f"{self.prefix}eval_path")
        if self.path is None:
            return []
        key, name = f"{self.prefix}path", self.prefix[:-1]
        if self.name in BUILT_IN:
            raise ConfigError(f"{name}={self.name} reads no file: use {name}=textfile {key}={self.path}")
        if self.name in FOLDERS and Path(self.path).is_dir():
            return files_of(f"{glob.escape(self.path)}/{FOLDERS[self.name][split]}", key)
        files = files_of(self.path, key)
        if self.name in FOLDERS and split == "evaluation":
            parts = " and ".join(FOLDERS[self.name].values())
            raise ConfigError(
                f"{key}={self.path} is one file, which calibrates: evaluation needs {self.prefix}eval_path=FILE,"
                f" or a folder with {parts} as {key}"
            )
        return files

    @property
    def is_cut(self) -> bool:
        """Whether both splits are parts of the same files."""
        return self.name == "textfile" and self.eval_path is None


def load_text(corpus: Corpus, split: str) -> str:
    """The text that calibrates or evaluates.

    Raises MissingInput where there is no text to be had, ConfigError where the splits overlap.
    """
    assert split in SPLITS, split
    if corpus.name not in SOURCES:
        raise ConfigError(f"data.name={corpus.name!r} must be one of: {', '.join(SOURCES)}")
    files = corpus.files(split)
    if corpus.eval_path is not None:
        check_held_out(corpus, corpus)
    if files:
        key = "eval_path" if split == "evaluation" and corpus.eval_path is not None else "path"
        text, where = _read_all(corpus.name, files), f"{corpus.prefix}{key}={getattr(corpus, key)}"
    else:
        text, where = SOURCES[corpus.name](corpus, split), f"{corpus.prefix[:-1]}={corpus.name}"
    if files and corpus.is_cut:
        cut = _cut(text)
        text = text[:cut] if split == "calibration" else text[cut:]
    if not text.strip():
        raise MissingInput(f"the {split} text of {where} is blank")
    return text


def check_held_out(calibrates: Corpus, judges: Corpus) -> None:
    """Raise ConfigError if a file that calibrates is one that judges, unless each is the part for it."""
    with contextlib.suppress(MissingInput):  # a text that is gone is missed where it is read
        calibrating, judging = calibrates.files("calibration"), judges.files("evaluation")
        if calibrates.is_cut and judges.is_cut and calibrating == judging:
            return
        if shared := {*calibrating} & {*judging}:
            key = f"{judges.prefix}{'eval_path' if judges.eval_path is not None else 'path'}"
            raise ConfigError(
                f"{key}: {min(shared)} is calibration text too (data.path={calibrates.path}); give other files"
            )


def _pydoc(_corpus: Corpus, split: str) -> str:
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = [_unseen(topics[name], seen) for name in sorted(topics)]
    return _join(text for text in texts[SPLITS.index(split) :: 2] if text)


def _unseen(topic: str, seen: set[str]) -> str:
    """The paragraphs of a topic that no earlier topic had, whatever their indent.

    A quarter of the topics' text is repeated in others, so without this evaluation would meet what
    calibration has read. Headings and other short lines stay.
    """
    kept = []
    for paragraph in topic.split("\n\n"):
        words = " ".join(paragraph.split())
        if len(words) < REPEATABLE or words not in seen:
            kept.append(paragraph)
        seen.add(words)
    return "\n\n".join(kept).strip("\n")


def _pycode(_corpus: Corpus, split: str) -> str:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    if not files:
        raise MissingInput(f"this Python has no source files in {library}: use data=textfile data.path=<your code>")
    return _join(map(_read, files[SPLITS.index(split) :: 2]))


def _wikitext2(_corpus: Corpus, split: str) -> str:
    part = {"calibration": "train", "evaluation": "test"}[split]
    rows = hub_column("Salesforce/wikitext", "wikitext-2-raw-v1", split=part)
    return "".join(row or " \n" for row in rows)


def _c4(_corpus: Corpus, split: str) -> str:
    return _join(_first(hub_column("allenai/c4", split="all", data_files={"all": C4_FILES[split]})))


def _textfile(corpus: Corpus, _split: str) -> str:
    name = corpus.prefix[:-1]
    raise ConfigError(f"{name}=textfile needs {corpus.prefix}path=<file, folder or glob>")


SOURCES = {"pydoc": _pydoc, "pycode": _pycode, "wikitext2": _wikitext2, "c4": _c4, "textfile": _textfile}
"""Text that is not read from files of the user's."""


def files_of(path: str, key: str = "data.path") -> list[Path]:
    """The files that `path` (file, folder or glob) stands for, sorted; key: the setting that it is from.

    Raises MissingInput when there is none.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        found = [p for p in root.rglob("*") if p.is_file()]
    else:
        found = [root] if root.is_file() else [Path(p) for p in glob.glob(str(root))]
    files = sorted(p for p in found if p.is_file())
    if not files:
        what = "a folder without files" if root.is_dir() else "no such file"
        raise MissingInput(f"{path}: {what} ({key})")
    return files


def _cut(text: str) -> int:
    """Where the held-out part starts: a line start at or after 1 - HELD_OUT of the text."""
    earliest = int(len(text) * (1 - HELD_OUT))
    newline = text.find("\n", earliest)
    return newline + 1 if 0 <= newline < len(text) - 1 else earliest


def _read_all(name: str, files: list[Path]) -> str:
    """All the files, one after the other; those of C4 are JSON lines, plain text (.txt, .raw, ...) excepted."""
    if name != "c4":
        return _join(map(_read, files))
    texts = (t for f in files for t in (_documents(f) if JSON_NAME.search(f.name) else [_read(f)]))
    return _join(_first(texts))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    except OSError as error:
        raise MissingInput(f"{file} cannot be read: {error.strerror}") from error


def _documents(file: Path) -> Iterator[str]:
    """The field "text" of every line of a .json, .jsonl or .json.gz file."""
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_field(file, number, line)
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    except (OSError, EOFError, zlib.error) as error:
        raise MissingInput(f"{file} cannot be read: {error}") from error


def _text_field(file: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise MissingInput(f"{file}, line {number}: not JSON ({error.msg})") from error
    if type(record) is not dict or type(record.get("text")) is not str:
        raise MissingInput(f'{file}, line {number}: no field "text" as in C4')
    return record["text"]


def _not_utf8(file: Path, error: UnicodeDecodeError) -> MissingInput:
    return MissingInput(
        f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}):"
        " convert it, for instance with `iconv -f latin1 -t utf-8`"
    )


def _first(documents: Iterable[str]) -> Iterator[str]:
    """Documents until CHARACTERS are reached."""
    total = 0
    for document in documents:
        yield document
        total += len(document)
        if total >= CHARACTERS:
            return


def _join(texts: Iterable[str]) -> str:
    return "\n\n".join(texts)
