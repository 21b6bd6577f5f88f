"""One column of text of a data set of the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from kvcalib.errors import MissingInput
from kvcalib.hub import obtain


def hub_column(name: str, *config: str, **kwargs) -> Iterable[str]:
    """Column "text"; arguments as for `datasets.load_dataset`.

    Raises MissingInput with what to pass instead.
    """
    from datasets import load_dataset

    def download() -> Iterable[str]:
        return load_dataset(name, *config, **kwargs)["text"]

    def cached() -> Iterable[str] | None:
        with _cache_only(), contextlib.suppress(OSError, ValueError):
            return download()
        return None

    try:
        return obtain(f"datasets/{name}", cached, download)
    except MissingInput as error:
        raise MissingInput(
            f"no text from {name}: {error}; pass files of it as data.path=FOLDER, or use data=pydoc, which is always"
            " there"
        ) from error


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
