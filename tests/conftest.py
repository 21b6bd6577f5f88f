"""Shared fixtures: a random generator with a fixed seed, the settings of a plain command."""

import copy
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def generator():
    """A seeded torch generator, so that a failure repeats."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def default_settings():
    """Settings of `quant=nuq3`, typed in /launch."""
    from hydra import compose, initialize_config_dir

    from kvcalib import cli

    cli.register_schema()
    with initialize_config_dir(cli.conf_dir(), version_base="1.3"):
        return cli.to_settings(compose("config", ["quant=nuq3"]), Path("/launch"))


@pytest.fixture
def settings(default_settings):
    """A copy to change."""
    return copy.deepcopy(default_settings)
