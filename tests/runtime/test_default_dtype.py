"""torch's default dtype is of the whole process, and changes while somebody loads a model: nothing here follows it."""

import pytest
import torch

from kvcalib.quant.rotation import hadamard
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

PARTS = [80, 5, 1, 34]


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("key", "value"), [("static", "token"), ("feedback", "norm"), ("group", "channels")])
def test_the_same_logits(key, value, dtype, when, kernel, default_dtype, monkeypatch):
    monkeypatch.setenv("KVCALIB_KERNEL", kernel)
    model = tiny("llama")
    ids = torch.randint(3, 290, (2, sum(PARTS)), generator=torch.Generator().manual_seed(3))
    artifact, logits = make_artifact(model, cache_spec(key, value, window=4, sink=2), ids[:1, :60]), []
    for other in (torch.float32, dtype):
        hadamard.cache_clear()
        default_dtype(other if when == "before" else torch.float32)
        cache, steps = CalibratedCache(artifact, model), []
        with torch.no_grad():
            for part in ids.split(PARTS, dim=1):
                steps.append(model(part, cache=cache).logits)
                default_dtype(other)
        logits.append(torch.cat(steps, dim=1))
        default_dtype(torch.float32)
    assert logits[1].dtype is torch.float32
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_rotation_is_float32_whenever_it_is_made(dtype, default_dtype):
    hadamard.cache_clear()
    default_dtype(dtype)
    assert hadamard(8).dtype is torch.float32
