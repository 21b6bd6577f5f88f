"""A model of the Hugging Face hub as a local folder, and a quick no when it cannot be had.

The cache on this machine is asked first, so that a model downloaded once loads without a network.
Only what a causal language model needs is fetched: safetensors, config and tokenizer at the top of
the repository, not the duplicates in other formats that many repositories carry. The hub's own
client retries a dead network for half a minute per file, hence the single request beforehand.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvcalib.errors import MissingInput

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]
TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""

log = logging.getLogger(__name__)


def hub_folder(name: str, revision: str | None) -> Path:
    """Folder with the complete model `name`; downloads it if need be.

    Raises MissingInput with what to do when it is neither here nor to be had.
    """
    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if not missing_files(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise MissingInput(f"model.path={name} is neither a folder here nor a hub id (owner/name)") from error
    return _download(name, revision)


def missing_files(folder: Path) -> list[str]:
    """Files without which the model in `folder` cannot be loaded."""
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    return sorted(name for name in {"config.json", *names} if not (folder / name).is_file())


def _download(name: str, revision: str | None) -> Path:
    reason = _why_unreachable()
    if reason:
        raise _missing(name, f"it is not on this machine and the hub cannot be asked ({reason})")
    log.info("downloading %s from the hub", name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{name}"
        raise _missing(name, f"it is gated: accept its licence on {page} and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise _missing(
            name,
            "the hub has no such public model; check the spelling or log in with `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise MissingInput(f"model.revision={revision}: {name} has no such revision") from error
    except OSError as error:
        raise _missing(name, f"the download failed ({first_line(error)})") from error


def _why_unreachable() -> str | None:
    """None when the hub answers, else why not."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        return str(getattr(error, "reason", error))
    return None


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class where it has none."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _missing(name: str, reason: str) -> MissingInput:
    return MissingInput(
        f"no weights for {name}: {reason}; on a machine that has access run"
        f" `hf download {name} --local-dir FOLDER`, then pass model.path=FOLDER"
    )
