"""One column of text of a data set of the Hugging Face hub, with a quick no where it cannot be had.

The cache on this machine is asked first, so that a data set downloaded once loads without a
network. The hub's client retries a dead network for half a minute, hence the single request before
a download.
"""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator

from kvcalib.errors import MissingInput

TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""


def hub_column(name: str, *config: str, **kwargs) -> Iterable[str]:
    """Column "text"; arguments as for `datasets.load_dataset`.

    Raises MissingInput with what to pass instead.
    """
    from datasets import load_dataset

    try:
        with _cache_only():
            return load_dataset(name, *config, **kwargs)["text"]
    except (OSError, ValueError):
        reason = _why_unreachable()
    if reason:
        raise _missing(name, f"it is not on this machine and the hub cannot be asked ({reason})")
    try:
        return load_dataset(name, *config, **kwargs)["text"]
    except (OSError, ValueError) as error:
        raise _missing(name, f"the download failed ({str(error).splitlines()[0]})") from error


@contextlib.contextmanager
def _cache_only() -> Iterator[None]:
    """Keep `datasets` off the network."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _why_unreachable() -> str | None:
    """None when the hub answers, else why not."""
    from datasets import config

    if config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(config.HF_ENDPOINT, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        return str(getattr(error, "reason", error))
    return None


def _missing(name: str, reason: str) -> MissingInput:
    return MissingInput(
        f"no text from {name}: {reason}; pass files of it as data.path=FOLDER, or use data=pydoc, which is always there"
    )
