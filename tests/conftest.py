"""Shared fixtures: one thread, a fixed seed, a random generator."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def generator():
    """A seeded torch generator, so that a failure repeats."""
    import torch

    return torch.Generator().manual_seed(0)
