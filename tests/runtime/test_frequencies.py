"""Texts beyond the length at which a model changes its rotary frequencies."""

import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import UnsupportedModel
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.mark.parametrize("chunks", [[60], [40, 15, 5], [34] + [1] * 26])
def test_longrope_takes_the_long_frequencies_where_the_first_call_goes_beyond(chunks):
    model = tiny("phi3-longrope")
    ids = torch.randint(3, 290, (1, 60), generator=torch.Generator().manual_seed(2))
    artifact = make_artifact(model, cache_spec(window=4, sink=2), ids[:, :30])
    ours, theirs = CalibratedCache(artifact, model), DynamicCache(config=model.config)
    with torch.no_grad():
        for part in [*ids.split(chunks, dim=1), ids[:, :1], ids[:, 1:2]]:
            logits, expected = model(part, cache=ours).logits, model(part, cache=theirs).logits
    store = ours.layers[0].store
    assert store.page_counts == [1]
    assert store.frequencies.is_long
    key, _, positions = store.decode(store.pages[0, :1])
    exact = theirs.layers[0].keys[0, :, positions].transpose(0, 1)
    assert (key - exact).abs().mean() < 0.15 * exact.abs().mean()
    assert 0 < (logits - expected).abs().max() < 0.3
    ours.reset()
    with torch.no_grad():
        model(ids[:, :20], cache=ours)
    assert not ours.layers[0].store.frequencies.is_long


def test_longrope_chooses_again_after_going_back_to_nothing():
    model = tiny("phi3-longrope")
    ids = torch.randint(3, 290, (1, 60), generator=torch.Generator().manual_seed(2))
    cache = CalibratedCache(make_artifact(model, cache_spec(window=4, sink=2), ids[:, :30]), model)
    for length in (20, 60, 30, 60):
        fresh = CalibratedCache(cache._artifact, model)
        with torch.no_grad():
            for each in (cache, fresh):
                model(ids[:, :length], cache=each)
        assert cache.layers[0].store.frequencies.is_long == (length == 60)
        assert torch.equal(*(each.layers[0].store.pages[0, : length // 36] for each in (cache, fresh)))
        cache.crop(-length)


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic"])
def test_growing_beyond_the_frequencies_is_refused(family):
    model = tiny(family)
    ids = torch.randint(3, 290, (1, 80), generator=torch.Generator().manual_seed(2))
    artifact = make_artifact(model, cache_spec(window=4, sink=2), ids[:, :30])
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:, :30], cache=cache)
        with pytest.raises(UnsupportedModel, match="changes its rotary frequencies beyond 32 tokens"):
            model(ids[:, 30:], cache=cache)
