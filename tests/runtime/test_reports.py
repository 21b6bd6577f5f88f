"""Faults that users of other quantised caches have reported, each as a small test of this one."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvcalib
from kvcalib.artifact.schema import LayerTables
from kvcalib.errors import ArtifactError
from kvcalib.fit.frame import frame_from_bounds
from kvcalib.models.rotary import rotary
from kvcalib.quant.rope import make_rope, to_pre_rope
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (3, 90), generator=torch.Generator().manual_seed(21))


def quick_artifact(model, ids, window=4, **options):
    return make_artifact(model, cache_spec(window=window, sink=2, **options), ids[:1])


def filled(artifact, model, ids):
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


def test_large_key_biases_survive_four_bits(ids):
    """Three channels at +-50: exact in the window, a few percent of their spread once packed."""
    model = tiny("qwen2-bias")
    roomy = quick_artifact(model, ids, window=64)
    prompt = ids[:1, :40]
    expected = model.generate(prompt, cache=DynamicCache(config=model.config), max_new_tokens=12, **GREEDY)
    assert torch.equal(
        model.generate(prompt, cache=CalibratedCache(roomy, model), max_new_tokens=12, **GREEDY), expected
    )

    artifact = framed_by_bounds(quick_artifact(model, ids, window=8), model, ids)
    cache, exact = filled(artifact, model, ids[:1]), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:1], cache=exact)
    for index, layer in enumerate(cache.layers):
        store = layer.store
        key, _, positions = store.decode(store.pages[0, : store.page_counts[0]])
        theirs = exact.layers[index].keys[0][:, positions].transpose(0, 1)
        error = (key - theirs).abs().amax(0).flatten()[[1, 8, 20]]
        assert key.isfinite().all()
        assert (error < 0.05 * 50).all()


def framed_by_bounds(artifact, model, ids):
    """Frames of the keys as calibration makes them: from the smallest to the largest of every channel."""
    cache, layers = DynamicCache(config=model.config), {}
    with torch.no_grad():
        model(ids[:1], cache=cache)
    for index, info in rotary(model).items():
        key = cache.layers[index].keys[0].transpose(0, 1)
        rope = make_rope(key.shape[-1], info.kind, info.inv_freq, info.scaling)
        pre = to_pre_rope(key, torch.arange(len(key)), rope)
        zero, scale = frame_from_bounds(pre.amin(0).double().numpy(), pre.amax(0).double().numpy())
        tables = artifact.layers[index]
        layers[index] = LayerTables(tables.key._replace(zero=zero, scale=scale), tables.value)
    return replace(artifact, layers=layers)


def test_reorders_one_after_another_and_on_the_step_that_packs(model, ids):
    identity = make_artifact(model, cache_spec("identity", "token", window=4, sink=2), ids[:1])
    cache = filled(identity, model, ids[:, :37])
    assert cache.layers[0].store.page_counts == [0, 0, 0]
    with torch.no_grad():
        model(ids[:, 37:38], cache=cache)  # 38 = 2 + 32 + 4: the step that packs
    assert cache.layers[0].store.page_counts == [1, 1, 1]
    pages = cache.layers[0].store.pages[:, :1].clone()
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.layers[0].store.pages[:, :1], pages[[0, 0, 2]])
    single = filled(identity, model, ids[2:, :37])  # row 2 of the reordered cache is what row 2 was at first
    with torch.no_grad():
        model(ids[2:, 37:38], cache=single)
        ours, alone = model(ids[:, 40:41], cache=cache).logits, model(ids[2:, 40:41], cache=single).logits
    torch.testing.assert_close(ours[2], alone[0], rtol=0, atol=1e-4)


def test_every_stored_tensor_follows_the_rows(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    cache = CalibratedCache(quick_artifact(model, ids), model)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    for act, rows in (
        (lambda: cache.batch_repeat_interleave(3), 9),
        (lambda: cache.batch_select_indices(torch.tensor([4, 8])), 2),
        (lambda: cache.batch_select_indices(torch.tensor([False, True])), 1),
    ):
        act()
        for layer in cache.layers:
            store = layer.store
            assert {tensor.shape[0] for tensor in store.tensors().values()} == {rows}
            assert len(store.page_counts) == len(store.sink_counts) == len(store.forgotten) == rows


def test_an_artifact_serves_many_caches_and_stays_as_it_is(model, ids):
    artifact = quick_artifact(model, ids)
    before = copy.deepcopy(artifact)
    for _ in range(2):
        filled(artifact, model, ids)
    assert artifact.spec == before.spec
    assert artifact.model == before.model
    for index, layer in artifact.layers.items():
        for ours, theirs in ((layer.key, before.layers[index].key), (layer.value, before.layers[index].value)):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)
    with pytest.raises(ArtifactError, match="layers: artifact has 2, model has 3"):
        CalibratedCache(artifact, tiny("llama", num_hidden_layers=3))


@pytest.mark.parametrize("restore", ["deepcopy", "crop"])
def test_a_second_question_hears_nothing_of_the_first_answer(model, ids, restore):
    """The context is packed; the answers stay within the window, so both ways back are exact."""
    artifact = quick_artifact(model, ids, window=40)
    context, questions = ids[:1, :80], (ids[1:2, :7], ids[2:, :9])
    cache = filled(artifact, model, context)
    assert cache.layers[0].store.page_counts == [1]
    first = copy.deepcopy(cache) if restore == "deepcopy" else cache
    length = context.shape[1]
    prompt = torch.cat([context, questions[0]], dim=1)
    model.generate(prompt, cache=first, max_new_tokens=12, **GREEDY)
    if restore == "crop":
        cache.crop(length - cache.get_seq_length())
    prompt = torch.cat([context, questions[1]], dim=1)
    again = model.generate(prompt, cache=cache, max_new_tokens=12, **GREEDY)
    assert torch.equal(
        again, model.generate(prompt, cache=filled(artifact, model, context), max_new_tokens=12, **GREEDY)
    )


@pytest.mark.parametrize("count", [0, 1, 4, 5, 40, 90])
def test_crop_takes_negative_counts_and_keeps_what_was_packed(model, ids, count):
    cache = filled(quick_artifact(model, ids), model, ids)
    before = cache.layers[0].store.pages[:, :2].clone()
    with pytest.raises(ValueError, match=r"pass the number of tokens to drop as a negative number"):
        cache.crop(1)
    cache.crop(-count)
    store = cache.layers[0].store
    assert cache.get_seq_length() == 90 - count
    kept = store.page_counts[0]
    assert torch.equal(store.pages[:, :kept], before[:, :kept])


@pytest.mark.parametrize("count", [torch.tensor(-3), torch.tensor([-3]), np.int64(-3)])
def test_a_count_to_crop_may_be_what_a_comparison_of_tokens_gave(model, ids, count, tmp_path):
    """A length that is a tensor would follow whatever happens to copies."""
    cache = filled(quick_artifact(model, ids), model, ids)
    cache.crop(count)
    twin, length = copy.deepcopy(cache), cache.get_seq_length()
    model(ids[:, :13], cache=twin)
    assert type(length) is int
    assert (cache.get_seq_length(), twin.get_seq_length()) == (87, 100)
    cache.save(tmp_path / "cropped")


@pytest.mark.parametrize("count", [-3.0, torch.tensor(-3.0), "3", None])
def test_a_count_to_crop_that_is_no_integer_is_a_sentence(model, ids, count):
    cache = filled(quick_artifact(model, ids), model, ids)
    with pytest.raises(ValueError, match="the number of tokens is an integer"):
        cache.crop(count)
    assert cache.get_seq_length() == 90


def test_the_report_says_when_nothing_is_saved(model, ids):
    report = filled(quick_artifact(model, ids), model, ids[:, :16]).memory_report()
    assert report["saved_bytes"] < 0
    assert report["compression"] < 1
    assert report["compression_pages"] == pytest.approx(32 / (report["page_bits_key"] + report["page_bits_value"]))
    for name in ("key_pages_bytes", "value_exact_bytes", "tables_bytes", "bits_per_element_key", "bytes_per_token"):
        assert name in report


def test_all_layers_report_one_length(ids):
    """Windows, states and packed layers side by side: masks are made from any of them."""
    for family in ("gemma3_text", "qwen3_next", "mistral"):
        model = tiny(family)
        cache = filled(quick_artifact(model, ids), model, ids)
        lengths = {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")}
        assert lengths == {90}
        assert {layer.get_mask_sizes(3) for layer in cache.layers if hasattr(layer, "store")} == {(93, 0)}


def test_initialisation_in_advance_is_harmless(model, ids):
    cache = CalibratedCache(quick_artifact(model, ids), model)
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.get_max_length() == -1
    with torch.no_grad():
        assert torch.equal(
            model(ids, cache=cache).logits, model(ids, cache=CalibratedCache(cache._artifact, model)).logits
        )


def test_no_attribute_that_transformers_has_removed():
    gone = re.compile(r"\b(key_cache|value_cache|to_legacy_cache|from_legacy_cache|seen_tokens)\b")
    for path in Path(kvcalib.__file__).parent.rglob("*.py"):
        assert not gone.search(path.read_text()), path
