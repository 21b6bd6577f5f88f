"""Model and tokenizer from plain arguments: hub, local folder, GGUF file, or random weights.

`path` decides where it is given, whatever the source: a folder, a .gguf file, or else a hub id.
Without it `source` decides: "gguf" looks in installed packages, "random" builds from `config`.

Code that comes with weights is never run, pickled weights are never read, and weights that the
checkpoint lacks are an error, where transformers would draw them at random and go on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    __version__,
)
from transformers.utils import logging as hf_logging

from kvcalib.errors import ConfigError, MissingInput, UnsupportedModel
from kvcalib.hub import first_line
from kvcalib.models.expanded import discard, expanded_folder, keep_expanded
from kvcalib.models.gguf import installed_gguf
from kvcalib.models.hub import hub_folder, missing_files
from kvcalib.models.tiny import random_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
log = logging.getLogger(__name__)

LOAD_ERRORS = (OSError, ValueError, LookupError, EOFError, RuntimeError, SafetensorError, struct.error)


class _MissingPackage(MissingInput):
    """A Python package that transformers imports late, for the model at hand."""


def load_model(
    *,
    source: str,
    path: str | None = None,
    gguf_file: str | None = None,
    packages: list[str] = (),
    install: str | None = None,
    sha256: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    config: dict | None = None,
    seed: int = 0,
):
    """(model in eval mode on `device`, tokenizer).

    dtype "auto": what the checkpoint says; for GGUF and random weights float32 on the CPU and
    bfloat16 elsewhere. Raises MissingInput, UnsupportedModel or ConfigError, one sentence each.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"model.dtype={dtype} must be auto, {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device} but torch sees no GPU: use device=cpu")
    if path is not None:
        model, tokenizer = _from_path(str(path), gguf_file, revision, dtype, device)
    elif source == "gguf":
        file = installed_gguf(list(packages), gguf_file, sha256=sha256, install=install)
        model, tokenizer = _from_gguf(file, _own_dtype(dtype, device))
    elif source == "random":
        model, tokenizer = random_model(config or {}, seed=seed)
        model = model.to(_own_dtype(dtype, device))
    else:
        raise ConfigError(f"model.source={source} needs model.path=<hub id, folder or .gguf file>")
    return _placed(model, device).eval(), tokenizer


def _from_path(path: str, gguf_file: str | None, revision: str | None, dtype: str, device: str):
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        return _from_gguf(local, _own_dtype(dtype, device))
    if local.is_dir():
        inside = local / (gguf_file or "")
        if inside.is_file() and not (local / "config.json").is_file():
            return _from_gguf(inside, _own_dtype(dtype, device))
        return _from_folder(local, dtype)
    if local.is_file():
        raise MissingInput(f"model.path={path} is a file: give its folder, or a .gguf file")
    if path.startswith(("/", ".", "~")):
        raise MissingInput(f"model.path={path}: there is no such folder")
    return _from_folder(hub_folder(path, revision), dtype, name=path)


def _from_folder(folder: Path, dtype: str, *, name: str | None = None):
    """Model and tokenizer of a folder in transformers' format; `name`: what the user called it."""
    name = name or str(folder)
    _check_files(folder, name)
    with _quiet():
        config = _folder_config(folder, name)
        tokenizer = _tokenizer(folder, name)
        kind = dtype if dtype == "auto" else DTYPES[dtype]
        model = _weights(folder, name, config=config, dtype=kind, use_safetensors=True)
    return model, tokenizer


def _from_gguf(file: Path, dtype: torch.dtype):
    """Model and tokenizer of a .gguf file; its quantised weights are expanded to `dtype`."""
    _check_gguf(file)
    folder, kind = expanded_folder(file, dtype), str(dtype).removeprefix("torch.")
    if folder.is_dir():
        try:
            return _from_folder(folder, kind, name=str(file))
        except _MissingPackage:
            raise
        except MissingInput:
            log.warning("%s is damaged and is made anew", folder)
            discard(folder)
    size = file.stat().st_size / 2**20
    log.info("expanding %s (%.0f MiB) once into %s: about half a minute per 100 MiB", file.name, size, folder)
    begun = time.monotonic()
    with tqdm(total=4, desc=f"expanding {file.name}", unit="part", file=sys.stderr) as bar, _quiet():
        model, tokenizer = _read_gguf(file, dtype, bar.update)
        kept = keep_expanded(model, tokenizer, file, dtype)
        bar.update()
    log.info("expanded in %.0f s%s", time.monotonic() - begun, "; later loads take a second" if kept else "")
    if kept:
        return _from_folder(folder, kind, name=str(file))
    return model, tokenizer


def _read_gguf(file: Path, dtype: torch.dtype, done: Callable[[], object]):
    """done: called after each of the three parts."""
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except ImportError as error:
        raise _missing_package(str(file), error) from error
    except LOAD_ERRORS as error:
        raise _unreadable_gguf(file, error) from error
    done()
    tokenizer = _tokenizer(file.parent, str(file), gguf_file=file.name)
    done()
    model = _weights(file.parent, str(file), gguf_file=file.name, config=config, dtype=dtype)
    done()
    return model, tokenizer


def _unreadable_gguf(file: Path, error: Exception) -> Exception:
    """An architecture that transformers does not know, or a file that is cut or damaged."""
    if "not supported" in str(error):
        return UnsupportedModel(f"transformers {__version__} cannot read {file.name}: {first_line(error)}")
    return MissingInput(f"model.path={file} is damaged ({first_line(error)}): download it again")


def _check_gguf(file: Path) -> None:
    if not file.is_file():
        raise MissingInput(f"model.path={file}: there is no such file")
    with file.open("rb") as source:
        if source.read(4) != b"GGUF":
            raise MissingInput(f"model.path={file} is not a GGUF file: download it again")


def _check_files(folder: Path, name: str) -> None:
    missing = missing_files(folder)
    if not missing:
        return
    remedy = "give the folder that `hf download ID --local-dir FOLDER` wrote"
    others = sorted(folder.glob("*.gguf"))
    if others:
        remedy = f"or did you mean model.path={others[0]}"
    elif list(folder.glob("*.bin")):
        remedy = "its weights are pickled, which are not read: convert them to safetensors"
    raise MissingInput(f"model.path={name} has no {missing[0]}: {remedy}")


def _folder_config(folder: Path, name: str) -> PreTrainedConfig:
    """The config, refused where transformers has no causal language model for it."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        model_type = raw.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise UnsupportedModel(_unknown_type(name, model_type, "auto_map" in raw))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise _missing_package(name, error) from error
    except (*LOAD_ERRORS, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise MissingInput(f"model.path={name}: config.json is damaged: {reason}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"model.path={name}: {model_type!r} is not a causal language model")
    return config


def _unknown_type(name: str, model_type: str | None, has_code: bool) -> str:
    reason = f"transformers {__version__} does not know model type {model_type!r}"
    if has_code:
        return f"model.path={name}: {reason}, and code that comes with weights is not run"
    return f"model.path={name}: {reason}; a newer one may (`pip install --upgrade transformers`)"


def _tokenizer(folder: Path, name: str, **kwargs):
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **kwargs)
    except ImportError as error:
        raise _missing_package(name, error) from error
    except Exception as error:  # the tokenizers library raises no narrower class
        raise MissingInput(f"model.path={name} has no tokenizer that can be read: {first_line(error)}") from error


def _weights(folder: Path, name: str, **kwargs):
    """The model, refused if its weights are damaged, of other shapes, or incomplete."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **kwargs
        )
    except ImportError as error:
        raise _missing_package(name, error) from error
    except LOAD_ERRORS as error:
        raise MissingInput(
            f"model.path={name}: the weights are damaged or do not fit the config"
            f" ({first_line(error)}); download them again"
        ) from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise MissingInput(
            f"model.path={name} lacks {len(lacking)} weights, for instance {lacking[0]}:"
            " the download is incomplete or the config belongs to another model"
        )
    return model


def _missing_package(name: str, error: ImportError) -> _MissingPackage:
    """What to install, from the module that is missing or from the command that transformers proposes."""
    asked = re.search(r"pip install (?:-\S+ )*['\"]?([A-Za-z][\w.-]*)", str(error))
    known = re.search(r"\b(accelerate|gguf|sentencepiece|tiktoken|protobuf)\b", str(error), re.IGNORECASE)
    package = error.name or (asked and asked[1]) or (known and known[1].lower())
    if not package:
        return _MissingPackage(f"model.path={name}: loading it needs a package that is missing ({first_line(error)})")
    package = package.split(".")[0]
    return _MissingPackage(
        f"model.path={name}: loading it needs the package {package}, which is missing or too old:"
        f" run `pip install --upgrade {package}`"
    )


def _own_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype where the checkpoint does not say one."""
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return DTYPES[dtype]


def _placed(model, device: str):
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        raise ConfigError(
            f"the model's {size:.1f} GiB of weights do not fit on device={device}:"
            " use device=cpu or model.dtype=bfloat16"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars, reports or warnings from transformers; everything as before afterwards."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
