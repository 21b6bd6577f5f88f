"""A tiny model with a byte-level tokenizer, token windows, and a progress that shows nothing."""

import pytest
import torch

from kvcalib.models.tiny import byte_tokenizer
from tests.models.zoo import tiny


@pytest.fixture(scope="package")
def model():
    special = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    return tiny("llama", max_position_embeddings=512, vocab_size=259, **special)


@pytest.fixture(scope="package")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="package")
def windows():
    return torch.randint(3, 256, (2, 160), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def progress():
    """Calls it got, as (total, description), in `progress.calls`."""

    def show(items, total, desc):
        show.calls.append((total, desc))
        return items

    show.calls = []
    return show
