"""Caches to compare with: filled from one prefill as the model itself would fill them, weighed to the byte."""

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.eval import contenders as module
from kvcalib.eval.contenders import check_layers, contenders, filled, held_bytes, prefilled, twin
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.fixture
def artifact(model, windows):
    return make_artifact(model, cache_spec(window=16, sink=4), windows[:1])


@pytest.fixture
def states(model, windows):
    return prefilled(model, windows[0], chunk=50)


def by_name(found):
    return {each.name: each for each in found}


def test_a_twin_shares_weights_and_nothing_else(model):
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other.config is not model.config


def test_the_attention_of_the_others_is_left_alone(model, artifact):
    found = by_name(contenders(model, artifact, ["full", "bfloat16"]))
    ours = found["kvcalib"].make()
    assert model.config._attn_implementation == "kvcalib"
    assert found["full"].model.config._attn_implementation == "sdpa"
    assert found["bfloat16"].model.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    del ours


def test_our_cache_is_filled_as_the_model_fills_it(model, artifact, states, windows):
    ours = by_name(contenders(model, artifact, []))["kvcalib"]
    expected = ours.make()
    with torch.no_grad():
        model(windows[:1, :101], cache=expected, use_cache=True)
    cache = filled(ours, states, 101, 1)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.get_seq_length() == 101
        assert layer.store.page_counts == other.store.page_counts == [2]
        pages, wanted = (each.store.decode(each.store.pages[0, :2])[0] for each in (layer, other))
        torch.testing.assert_close(pages, wanted, atol=0.05, rtol=0.05)  # a chunked prefill rounds differently
    with torch.no_grad():
        step = [model(windows[:1, 101:102], cache=each, use_cache=True).logits for each in (cache, expected)]
    torch.testing.assert_close(*step, atol=1e-2, rtol=1e-2)


def test_rows_are_equal_and_counted(model, artifact, states):
    for each in contenders(model, artifact, ["full"]):
        cache = filled(each, states, 120, 3)
        assert cache.get_seq_length() == 120
    assert cache.layers[0].keys.shape[0] == 3
    assert torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[2])


def test_held_bytes_of_plain_caches_are_those_of_keys_and_values(model, artifact, states):
    found = by_name(contenders(model, artifact, ["full", "bfloat16"]))
    elements = 2 * sum(key[:, :, :96].numel() for key, _ in states.values())
    assert held_bytes(filled(found["full"], states, 96, 2)) == elements * 2 * 4
    assert held_bytes(filled(found["bfloat16"], states, 96, 1)) == elements * 2


def test_held_bytes_of_ours_are_those_of_the_memory_report(model, artifact, states):
    cache = filled(contenders(model, artifact, [])[0], states, 96, 1)
    assert held_bytes(cache) == cache.memory_report()["total_bytes"]


@pytest.mark.parametrize("name", ["quanto4", "hqq2"])
def test_quantised_peers_hold_less_than_half_precision(model, artifact, states, name):
    pytest.importorskip(module.BACKENDS[name[:-1]][0])
    found = by_name(contenders(model, artifact, [name, "bfloat16"]))
    cache = filled(found[name], states, 128, 1)
    assert 0 < held_bytes(cache) < held_bytes(filled(found["bfloat16"], states, 128, 1))


def test_a_package_that_is_not_there_is_named(model, artifact, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = by_name(contenders(model, artifact, ["quanto4", "hqq2", "full"]))
    assert found["quanto4"].missing == "pip install optimum-quanto"
    assert found["hqq2"].missing == "pip install hqq"
    assert found["full"].missing is None


def test_layers_with_a_state_of_their_own_are_refused():
    with pytest.raises(ConfigError, match=r"keep a state .* bench.contexts=\[\]"):
        check_layers(tiny("qwen3_next"))
    check_layers(tiny("llama"))
