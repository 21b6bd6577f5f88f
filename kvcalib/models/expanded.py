"""GGUF weights, expanded once and kept in the user's cache.

Reading a .gguf file through transformers takes half a minute (its vocabulary is parsed string by
string, several times over, and every tensor is dequantised in numpy); reading the same model from
safetensors takes a second. So the first load leaves a folder in transformers' own format:

    $XDG_CACHE_HOME or ~/.cache / kvcalib / <file stem>-<dtype>-<key>

where the key covers the bytes of the file and the version of transformers, so copies of one file
share one folder. It is renamed into place when complete and then left alone, since another process
may be reading it; folders that are no longer used may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from pathlib import Path

import torch
from transformers import __version__

from kvcalib.models.gguf import cache_home, file_hash, partial_folder

log = logging.getLogger(__name__)


def expanded_folder(file: Path, dtype: torch.dtype) -> Path:
    """Where the expanded form of `file` is, or will be."""
    digest = hashlib.sha256(f"{_content(file)}:{__version__}".encode()).hexdigest()[:12]
    return cache_home() / f"{file.stem}-{str(dtype).removeprefix('torch.')}-{digest}"


def keep_expanded(model, tokenizer, file: Path, dtype: torch.dtype) -> bool:
    """Write the expanded form; False, with a line in the log, where the disk does not take it."""
    target = expanded_folder(file, dtype)
    _forget_that_it_was_quantised(model)
    try:
        with partial_folder(target.parent) as folder:
            partial = Path(folder) / "model"
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            _publish(partial, target)
    except OSError as error:
        log.warning("cannot keep the expanded weights in %s (%s)", target, error.strerror)
        return False
    return True


def discard(folder: Path) -> None:
    """Take a damaged expansion away, in one step for whoever looks for it."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".damaged-", dir=folder.parent) as away:
        folder.rename(Path(away) / folder.name)


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same content
            raise


def _content(file: Path) -> str:
    """sha256 of a file, read once and remembered for as long as path, size and time are the same."""
    stat = file.stat()
    seen = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()
    memo = cache_home() / ".sha256" / seen[:32]
    with contextlib.suppress(OSError):
        digest = memo.read_text()
        if len(digest) == 64:
            return digest
    digest = file_hash(file)
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(digest)
    return digest


def _forget_that_it_was_quantised(model) -> None:
    """A saved config that names a .gguf file could not be loaded without it."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
