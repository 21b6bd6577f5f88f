import math

import pytest
import torch
from transformers import DynamicCache

from kvcalib.eval.perplexity import compare
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact


def plain(model):
    return DynamicCache(config=model.config)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("chunk", [1, 53, 159, 160, 1000])
def test_perplexity_is_that_of_one_pass(model, windows, chunk):
    window = windows[0]
    caches = plain(model), plain(model)
    fidelity = compare(model, window, *caches, chunk=chunk)
    loss = torch.nn.functional.cross_entropy(model(window[None]).logits[0, :-1], window[1:])
    assert fidelity.tokens == 159
    assert fidelity.ppl_reference == fidelity.ppl == pytest.approx(math.exp(loss), rel=1e-4)
    assert [cache.get_seq_length() for cache in caches] == [160, 160]


def test_only_the_candidate_is_quantised(model, windows):
    artifact = make_artifact(model, cache_spec(), windows[:1])
    cache = CalibratedCache(artifact, model)
    fidelity = compare(model, windows[0], plain(model), cache, chunk=32)
    exact = compare(model, windows[0], plain(model), plain(model), chunk=32)
    assert fidelity.ppl_reference == exact.ppl_reference
    assert fidelity.mean_kl > 1e-4


def test_one_pass_through_the_real_cache_would_measure_nothing(model, windows):
    cache = CalibratedCache(make_artifact(model, cache_spec(), windows[:1]), model)
    assert compare(model, windows[0], plain(model), cache, chunk=160).kl == 0
