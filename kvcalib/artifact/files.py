"""A safetensors file that is there as a whole or not at all.

It is written beside its target under a name that no other process or thread has, and renamed. It is read in one go:
a map of the file would follow whoever writes over it.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from kvcalib.errors import ConfigError

UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError)
"""What stands in the way of reading a file: no such user's home, a NUL in the name, damage."""


def read_whole(path: str | Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata, and tensors that own their memory. Raises one of UNREADABLE."""
    path = Path(path).expanduser()
    if path.exists() and not path.is_dir() and not path.is_file():
        raise OSError("it is no plain file")  # a pipe would be waited for
    data = path.read_bytes()
    tensors = load(data)  # checks the header
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__") or {}, tensors


def save_whole(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Writes contiguous CPU tensors; folders are made, a link is followed. Returns the path.

    Raises ConfigError for what is no place for a file, or cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a file is named by its path, not by {type(path).__name__}")
    try:
        path = Path(path).expanduser()
        target = _target(path)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            partial = Path(folder) / "whole"
            partial.touch()
            before = target if target.exists() else partial  # the new file's mode is what the umask asks for
            mode = before.stat().st_mode  # safetensors would leave it to its owner alone
            save_file(tensors, partial, metadata | {"format": "pt"})
            partial.chmod(mode)
            os.replace(partial, target)
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be written ({error}): give another place") from error
    return path


def _target(path: Path) -> Path:
    """Where a link leads, its folder made."""
    target, mend = Path(os.path.realpath(path)), "give the name of a file, such as prefix.safetensors"
    if target.is_dir():
        raise ConfigError(f"{path} is a folder: {mend}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path} is no plain file: {mend}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{path.parent} is a file and no folder: {mend}") from error
    return target
