"""A tiny model, token windows for it, and the folders that the first two stages leave."""

from types import SimpleNamespace

import pytest
import torch

from kvcalib.calib.collect import collect
from kvcalib.calib.fisher import fisher
from kvcalib.models.rotary import rotary
from tests.models.zoo import tiny

SINK = 2


def quiet(items, total, desc):
    return items


def make_windows(count: int = 3, length: int = 100, *, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (count, length), generator=generator)
    return SimpleNamespace(ids=ids, hash=f"windows-{seed}", source={"name": "random"})


def calibrated(model, windows, out, *, tokens: int = 1 << 20):
    """Folder with `collect` and `fisher` done."""
    infos = rotary(model)
    collect(model, infos, windows, sink=SINK, out=out / "collect", progress=quiet)
    gradients = {"labels": "text", "repeat": 0.0, "seed": 0}
    fisher(model, infos, windows, sink=SINK, tokens=tokens, out=out / "fisher", progress=quiet, **gradients)
    return out


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small only lose by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def llama():
    return tiny("llama")


@pytest.fixture(scope="package")
def folder(llama, tmp_path_factory):
    return calibrated(llama, make_windows(), tmp_path_factory.mktemp("calibrated"))
