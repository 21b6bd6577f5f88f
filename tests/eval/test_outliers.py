from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kvcalib.eval.outliers import FrameHits, stored_rate
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


def exact_cache(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    return cache


def hits(model, artifact, ids):
    counter = FrameHits(artifact, model)
    counter.observe(exact_cache(model, ids), ids.shape[1])
    return counter.result()


def test_stored_share_counts_whole_elements(model, windows):
    artifact = make_artifact(model, cache_spec("static", "channels"), windows[:1])
    assert stored_rate(artifact, "key") == round(0.02 * 32 * 2 * 16) / (32 * 2 * 16)
    assert stored_rate(artifact, "value") == 0


@pytest.mark.parametrize("family", ["llama", "llama-dynamic"])
def test_hits_are_projected_keys_beyond_the_frame(family, windows):
    """Dynamic scaling: in one pass, a text longer than the original length is rotated by frequencies of its own."""
    model, sink, ids = tiny(family), 3, windows[:1]
    artifact = make_artifact(model, cache_spec(sink=sink), ids)
    projected = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(
            lambda module, args, output, i=i: projected.__setitem__(i, output[0, sink:])
        )
        for i, layer in enumerate(model.model.layers)
    ]
    found = hits(model, artifact, ids)
    for hook in hooks:
        hook.remove()
    beyond = [projected[i].abs() > layer.key.scale.flatten() for i, layer in artifact.layers.items()]
    assert set(found) == {"outlier_hit_rate_key"}, "values have ranges of run time"
    expected = torch.stack(beyond).float().mean().item()
    assert expected > 0.001
    assert found["outlier_hit_rate_key"] == pytest.approx(expected, rel=1e-3)


def test_fp8_frames_reach_to_448(model, windows):
    artifact = make_artifact(model, cache_spec("fp8", "fp8"), windows[:1])
    found = hits(model, artifact, windows[:1])
    assert found["outlier_hit_rate_key"] < 1e-3
    assert found["outlier_hit_rate_value"] < 1e-3


def test_levels_that_lie_farther_out_do_not_widen_the_frame(model, windows):
    artifact = make_artifact(model, cache_spec(), windows[:1])
    wider = {
        i: replace(layer, key=layer.key._replace(levels=2 * layer.key.levels)) for i, layer in artifact.layers.items()
    }
    expected = hits(model, artifact, windows[:1])["outlier_hit_rate_key"]
    assert expected > 0.001
    assert hits(model, replace(artifact, layers=wider), windows[:1])["outlier_hit_rate_key"] == expected


def test_ranges_of_run_time_have_no_hits(model, windows):
    artifact = make_artifact(model, cache_spec("group", "token"), windows[:1])
    assert hits(model, artifact, windows[:1]) == {}


def test_sliding_layers_count_the_tokens_that_they_keep(windows):
    model = tiny("mistral")
    artifact = make_artifact(model, cache_spec("static", "fp8", sink=150), windows[:1])
    counter = FrameHits(artifact, model)
    counter.observe(exact_cache(model, windows[:1]), 160)
    assert counter._seen["key"] == 2 * 10 * 2 * 16  # layers, tokens 150 to 159, heads, channels
