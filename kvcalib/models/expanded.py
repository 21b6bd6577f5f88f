"""GGUF weights, expanded once and kept in the user's cache.

Reading a .gguf file through transformers takes half a minute (its vocabulary is parsed string by
string, several times over, and every tensor is dequantised in numpy); reading the same model from
safetensors takes a second. So the first load leaves a folder in transformers' own format:

    $XDG_CACHE_HOME or ~/.cache / kvcalib / <file stem>-<dtype>-<key>

where the key covers path, size and time of the file and the version of transformers. It is renamed
into place when complete, replaces what an older key left, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import __version__

from kvcalib.models.gguf import cache_home

log = logging.getLogger(__name__)


def expanded_folder(file: Path, dtype: torch.dtype) -> Path:
    """Where the expanded form of `file` is, or will be."""
    stat = file.stat()
    key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{__version__}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_home() / f"{_family(file, dtype)}-{digest}"


def keep_expanded(model, tokenizer, file: Path, dtype: torch.dtype) -> bool:
    """Write the expanded form; False, with a line in the log, where the disk does not take it."""
    target = expanded_folder(file, dtype)
    _forget_that_it_was_quantised(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            partial = Path(folder) / "model"
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for old in target.parent.glob(f"{_family(file, dtype)}-*"):
                shutil.rmtree(old)
            partial.rename(target)
    except OSError as error:
        log.warning("cannot keep the expanded weights in %s (%s)", target, error.strerror)
        return False
    return True


def _family(file: Path, dtype: torch.dtype) -> str:
    return f"{file.stem}-{str(dtype).removeprefix('torch.')}"


def _forget_that_it_was_quantised(model) -> None:
    """A saved config that names a .gguf file could not be loaded without it."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
