"""Layers that look back on a window alone."""

import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import UnsupportedModel
from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


def test_sliding_window_layers_stay_small():
    sliding = tiny("mistral")
    long = torch.randint(3, 300, (1, 240), generator=torch.Generator().manual_seed(6))
    artifact = make_artifact(sliding, cache_spec("identity", "token", window=0, sink=2), long)
    cache, exact = CalibratedCache(artifact, sliding), DynamicCache(config=sliding.config)
    with torch.no_grad():
        ours = torch.cat([sliding(part, cache=cache).logits for part in long.split(40, dim=1)], 1)
        theirs = torch.cat([sliding(part, cache=exact).logits for part in long.split(40, dim=1)], 1)
    assert (ours - theirs).abs().max() < 0.5
    assert cache.layers[0].store.page_counts[0] <= 5
    assert cache.get_seq_length() == 240


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_crop_within_a_sliding_window_is_right_or_refused(family, window):
    """Whatever is left after a crop covers the window of the next token; else nothing has changed."""
    model, artifact = tiny(family), None
    long = torch.randint(3, 300, (1, 240), generator=torch.Generator().manual_seed(6))
    artifact = make_artifact(model, cache_spec("static", "token", window=window, sink=2), long[:, :60])
    refused = []
    for count in (3, 30, 60, 90, 110, 130, 150, 200):
        cache = CalibratedCache(artifact, model)
        with torch.no_grad():
            for part in long.split(40, dim=1):
                model(part, cache=cache)
            try:
                cache.crop(-count)
            except UnsupportedModel as error:
                refused.append(str(error))
                assert {layer.get_seq_length() for layer in cache.layers} == {240}
                continue
            ours = model(long[:, 240 - count :][:, :1], cache=cache).logits
            theirs = model(long[:, : 241 - count], use_cache=False).logits[:, -1:]
        assert (ours - theirs).abs().max() < 0.25 * theirs.abs().max()
    assert refused
    assert all("has forgotten what it would see" in text for text in refused)
    assert not any("crop(-30)" in text for text in refused)


@pytest.mark.parametrize("jump", [60, 200, 1000])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_position_ids_that_jump_do_not_make_it_forget_what_masks_show(family, jump):
    """A mask counts columns: the window of a query holds as many tokens, wherever they stand."""
    model = tiny(family, sliding_window=64, max_position_embeddings=4096)
    ids = torch.randint(3, 290, (1, 268), generator=torch.Generator().manual_seed(6))
    positions = torch.cat([torch.arange(100), torch.arange(jump, jump + 168)])[None]
    key = TensorSpec(8, "uniform", "group", group=16, rope="post")
    spec = CacheSpec(key, TensorSpec(8, "uniform", "token", scope="head"), 0, 0)
    cache, exact = CalibratedCache(make_artifact(model, spec, ids), model), DynamicCache(config=model.config)
    with torch.no_grad():
        ours, theirs = (
            torch.cat(
                [
                    model(ids[:, part], cache=each, position_ids=positions[:, part]).logits
                    for part in map(slice, [0, 100, 140, 260], [100, 140, 260, 268])
                ],
                dim=1,
            )
            for each in (cache, exact)
        )
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()
    assert any(layer.store.forgotten[0] for layer in cache.layers)


@pytest.mark.parametrize("count", [1, 60, 64, 65, 70])
@pytest.mark.parametrize("window", [8, 16])
def test_a_crop_that_cuts_every_page_that_is_left(window, count):
    """Without a sink nothing is packed then, and yet the buffer does not begin with the first token."""
    model = tiny("mistral", sliding_window=window, max_position_embeddings=2048)
    ids = torch.randint(3, 290, (2, 660), generator=torch.Generator().manual_seed(6))
    key, value = TensorSpec(8, "uniform", "group", group=8), TensorSpec(8, "uniform", "token", scope="head")
    cache = CalibratedCache(make_artifact(model, CacheSpec(key, value, 0, 0), ids[:1, :60]), model)
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids[:, :640].split(64, dim=1):
            model(part, cache=cache)
        try:
            cache.crop(-count)
        except UnsupportedModel:
            assert count > 65
            return
        model(ids[:, : 640 - count], cache=exact)
        for part in ids[:, 640:].split([9, 11], dim=1):
            ours, theirs = (model(part, cache=each).logits for each in (cache, exact))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1)
