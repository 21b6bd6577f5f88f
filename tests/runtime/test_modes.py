"""Modes of torch that a caller may be in: the cache says what DynamicCache says, in each and after each."""

import pytest
import torch
from transformers import DynamicCache

from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

EIGHT = CacheSpec(
    TensorSpec(8, "uniform", "group", group=8, rope="pre"), TensorSpec(8, "uniform", "token", scope="head"), 0, 1
)
PARTS = [80, 5, 1, 20]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (3, sum(PARTS)), generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, EIGHT, ids[:1, :60])


def in_parts(model, ids, cache):
    with torch.no_grad():
        return [model(part, cache=cache).logits.float() for part in ids.split(PARTS, dim=1)]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(model, ids, artifact, dtype, kernel, monkeypatch):
    monkeypatch.setenv("KVCALIB_KERNEL", kernel)
    with torch.autocast("cpu", dtype=dtype):
        ours = in_parts(model, ids, CalibratedCache(artifact, model))
        theirs = in_parts(model, ids, DynamicCache(config=model.config))
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).abs().max() < 0.03 * expected.abs().max()


def test_autocast_does_not_reach_the_arithmetic_of_the_format(model, ids, monkeypatch):
    """The same keys give the same pages, although the reference multiplies matrices to make them."""
    monkeypatch.setenv("KVCALIB_KERNEL", "reference")
    artifact = make_artifact(model, cache_spec("feedback", "norm"), ids[:1, :60])
    plain, cast = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    key, value = torch.randn(2, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    for cache, enabled in ((plain, False), (cast, True)):
        layer = cache.layers[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            monkeypatch.setattr(layer.attachment, "positions", lambda: torch.arange(64)[None])
            layer.update(key, value)
            layer.attend(None, key, None, lambda *args: (None, None), scaling=1.0)
    assert plain.layers[0].store.page_counts == [2]
    assert torch.equal(plain.layers[0].store.pages, cast.layers[0].store.pages)


@pytest.mark.parametrize("into", [True, False])
def test_autocast_in_the_middle(model, ids, artifact, into):
    """Prefill in one mode, decode in the other."""
    logits = {}
    for cache in (CalibratedCache(artifact, model), DynamicCache(config=model.config)):
        with torch.no_grad():
            for part, cast in zip(ids.split(PARTS, dim=1), [not into, into, into, not into], strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                    out = model(part, cache=cache).logits.float()
                logits.setdefault(type(cache), []).append(out)
    for mine, expected in zip(logits[CalibratedCache], logits[DynamicCache], strict=True):
        assert (mine - expected).abs().max() < 0.03 * expected.abs().max()
