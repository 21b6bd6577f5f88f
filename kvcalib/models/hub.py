"""A model of the Hugging Face hub as a local folder.

Only what a causal language model needs is fetched: safetensors, config and tokenizer at the top of
the repository, not the duplicates in other formats that many repositories carry.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from huggingface_hub import snapshot_download

from kvcalib.errors import MissingInput
from kvcalib.hub import obtain

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]

log = logging.getLogger(__name__)


def hub_folder(name: str, revision: str | None) -> Path:
    """Folder with the complete model `name`; downloads it if need be.

    Raises MissingInput with what to do when it is neither here nor to be had.
    """

    def cached() -> Path | None:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        return None if missing_files(folder) else folder

    def download() -> Path:
        log.info("downloading %s from the hub", name)
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))

    try:
        return obtain(name, cached, download)
    except MissingInput as error:
        wanted = f"{name} (model.revision={revision})" if revision else name
        raise MissingInput(
            f"no weights for {wanted}: {error}; on a machine that has access run"
            f" `hf download {name} --local-dir FOLDER`, then pass model.path=FOLDER"
        ) from error


def missing_files(folder: Path) -> list[str]:
    """Files without which the model in `folder` cannot be loaded."""
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise MissingInput(f"{index} is damaged ({type(error).__name__}: {error}): copy it again") from error
    return sorted(name for name in {"config.json", *names} if not (folder / name).is_file())
