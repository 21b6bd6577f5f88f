"""What the Hugging Face hub has: from the cache on this machine, else from the hub, else a quick reason why not.

The cache is asked first, so that what was downloaded once needs no network. The hub's own client retries a dead
network for half a minute, with a warning each time, hence the single request before a download.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvcalib.errors import MissingInput

TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""

Found = TypeVar("Found")


def obtain(name: str, cached: Callable[[], Found | None], download: Callable[[], Found]) -> Found:
    """What `cached` finds without a network, or else what `download` gives.

    cached: None, or LocalEntryNotFoundError, where it is not here. Raises MissingInput, whose text is a reason that
    begins with "it" or "the", for a caller to put into a sentence.
    """
    try:
        if (found := cached()) is not None:
            return found
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise MissingInput("it is neither a folder here nor a hub id (owner/name)") from error
    if reason := why_unreachable():
        raise MissingInput(f"it is not on this machine and the hub cannot be asked ({reason})")
    try:
        return download()
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{name}"
        raise MissingInput(f"it is gated: accept its licence on {page} and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        how = "check the spelling or log in with `hf auth login`"
        raise MissingInput(f"the hub has no such public repository; {how}") from error
    except RevisionNotFoundError as error:
        raise MissingInput("it has no such revision") from error
    except (OSError, ValueError) as error:
        raise MissingInput(f"the download failed ({first_line(error)})") from error


def why_unreachable() -> str | None:
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
