"""CalibratedCache as users drive it: generate, beams, padding, other caches, memory."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

from kvcalib.artifact.io import save_artifact
from kvcalib.errors import ArtifactError, ConfigError, UnsupportedModel
from kvcalib.quant.spec import PAGE
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, cache_spec("static", "token", window=8, sink=2), ids[:1])


@pytest.fixture(scope="module")
def exact(model, ids):
    return make_artifact(model, cache_spec("identity", "identity"), ids[:1])


def generate(model, ids, cache, **options):
    options = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(ids, cache=cache, **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"prefill_chunk_size": 16}],
    ids=["greedy", "beams", "sampling", "chunked"],
)
def test_identity_gives_the_tokens_of_dynamic_cache(model, ids, exact, attention, options):
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    expected = generate(model, ids, DynamicCache(config=model.config), **options)
    torch.manual_seed(0)
    assert torch.equal(generate(model, ids, CalibratedCache(exact, model), **options), expected)
    gc.collect()
    assert model.config._attn_implementation == attention
    model.set_attn_implementation("sdpa")


def test_quantised_cache_is_exact_while_every_token_is_in_the_window(model, ids):
    artifact = make_artifact(model, cache_spec(window=200), ids[:1])
    expected = generate(model, ids, DynamicCache(config=model.config))
    assert torch.equal(generate(model, ids, CalibratedCache(artifact, model)), expected)


def test_left_padded_rows_equal_their_single_runs(model, ids, artifact):
    pad = 17
    padded = ids.clone()
    padded[1, :pad] = 0
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    both = CalibratedCache(artifact, model)
    out = generate(model, padded, both, attention_mask=mask)
    for row, start in ((0, 0), (1, pad)):
        single = CalibratedCache(artifact, model)
        alone = generate(model, padded[row : row + 1, start:], single)
        assert torch.equal(out[row, 60:], alone[0, 60 - start :])
        count = single.layers[0].store.page_counts[0]
        assert both.layers[0].store.page_counts[row] == count > 0
        stored = both.layers[0].store.pages[row, :count], single.layers[0].store.pages[0, :count]
        assert (stored[0] != stored[1]).float().mean() < 1e-3  # a matmul of another shape rounds differently


def test_beams_follow_their_own_history(model, ids, artifact):
    """Beam search over packed pages: each returned beam scores what a fresh cache gives the same tokens."""
    out = generate(
        model, ids[:1], CalibratedCache(artifact, model), num_beams=3, num_return_sequences=3,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    tokens = out.sequences[0, 60:]
    cache, logits = CalibratedCache(artifact, model), []
    with torch.no_grad():
        logits.append(model(out.sequences[:1, :60], cache=cache).logits[:, -1])
        for token in tokens[:-1]:
            logits.append(model(token.view(1, 1), cache=cache).logits[:, -1])
    score = torch.stack(logits, 1).log_softmax(-1)[0].gather(1, tokens[:, None]).mean()
    torch.testing.assert_close(out.sequences_scores[0], score, rtol=1e-3, atol=1e-3)


def test_the_model_works_with_other_caches_while_ours_lives_and_after(model, ids, artifact):
    expected = generate(model, ids, DynamicCache(config=model.config))
    ours = CalibratedCache(artifact, model)
    generate(model, ids, ours)
    assert torch.equal(generate(model, ids, DynamicCache(config=model.config)), expected)
    assert torch.equal(generate(model, ids, None, use_cache=False), expected)
    del ours
    gc.collect()
    assert model.config._attn_implementation == "sdpa"
    assert not model.model.rotary_emb._forward_pre_hooks


def test_two_caches_in_turn_do_not_mix(model, ids, artifact):
    expected = generate(model, ids[:1], CalibratedCache(artifact, model))
    first, second = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1, :-1], cache=first)
        model(ids[1:, :40], cache=second)
    assert torch.equal(generate(model, ids[:1], first), expected)
    assert second.get_seq_length() == 40


def test_a_copied_cache_goes_its_own_way(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1], cache=cache)
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        ours = model(ids[1:], cache=cache).logits
        model(ids[:1], cache=twin)
        del cache
        gc.collect()
        twin.crop(-60)
        theirs = model(ids[1:], cache=twin).logits
    assert twin.get_seq_length() == 120
    torch.testing.assert_close(ours[:, :1], theirs[:, :1], rtol=0, atol=0.3)


def test_reset_starts_over(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    expected = generate(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, cache), expected)


def test_memory_report_counts_what_the_tensors_hold(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    generate(model, ids, cache)
    report = cache.memory_report()
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in layer.store.tensors().values())
    assert report["total_bytes"] - report["tables_bytes"] - report["kernel_bytes"] == pytest.approx(held, abs=1)
    assert report["tokens"] == 109
    assert report["saved_bytes"] < 0  # 109 tokens of a tiny fp32 model: the exact window dominates


def test_pages_grow_by_the_stated_bits(model, artifact):
    cache = CalibratedCache(artifact, model)
    long = torch.randint(3, 300, (1, 32 * 6 + 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        model(long, cache=cache)
    store, report = cache.layers[0].store, cache.memory_report()
    assert store.page_counts == [6]
    assert report["key_pages_bytes"] == 2 * 6 * store.layout.tensor_bytes("key")
    elements = PAGE * 2 * 16
    spec = artifact.spec.key
    bits = spec.bits + (32 * spec.outliers_per_page(2, 16) + 16 * 5) / elements
    assert store.layout.tensor_bytes("key") * 8 / elements == bits


def test_artifact_of_another_model_is_refused_with_the_difference(ids, artifact):
    other = tiny("llama", num_hidden_layers=3)
    with pytest.raises(ArtifactError, match="layers: artifact has 2, model has 3"):
        CalibratedCache(artifact, other)


def test_from_pretrained_reads_a_file_and_a_folder(tmp_path, model, ids, artifact):
    path = save_artifact(artifact, tmp_path / "kvcalib.safetensors")
    expected = generate(model, ids, CalibratedCache(artifact, model))
    for where in (path, tmp_path, str(tmp_path)):
        assert torch.equal(generate(model, ids, CalibratedCache.from_pretrained(where, model)), expected)


@pytest.mark.parametrize(("window", "sink", "kept"), [(0, 4, 10), (0, 4, 3), (0, 0, 33), (8, 4, 20)])
def test_crop_and_go_on_equals_a_fresh_cache(model, ids, window, sink, kept):
    artifact = make_artifact(model, cache_spec("identity", "token", window=window, sink=sink), ids[:1])
    cropped, fresh = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1, :50], cache=cropped)
        cropped.crop(kept - 50)
        model(ids[:1, :kept], cache=fresh)
        ours = model(ids[:1, kept:60], cache=cropped).logits
        theirs = model(ids[:1, kept:60], cache=fresh).logits
    assert cropped.get_seq_length() == fresh.get_seq_length() == 60
    assert (ours - theirs).abs().mean() < 0.06  # what was cut out of a page stays rounded


@pytest.mark.parametrize("window", [0, 100])
def test_assisted_decoding_runs_and_is_exact_in_the_window(model, ids, window):
    artifact = make_artifact(model, cache_spec(window=window, sink=4), ids[:1])
    draft = tiny("llama", num_hidden_layers=1)
    options = {
        "max_new_tokens": 24,
        "min_new_tokens": 24,
        "do_sample": False,
        "assistant_model": draft,
        "pad_token_id": 0,
    }
    cache = CalibratedCache(artifact, model)
    out = model.generate(ids[:1, :30], cache=cache, **options)
    assert out.shape == (1, 54)
    assert draft.config._attn_implementation == "sdpa"  # its cache is one of its own
    if window:
        assert torch.equal(out, model.generate(ids[:1, :30], **options))


def test_a_mask_over_packed_tokens_is_honoured_and_a_bias_is_refused(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    mask = torch.ones(1, 60, dtype=torch.long)
    with torch.no_grad():
        model(ids[:1, :59], cache=cache)
        twin = copy.deepcopy(cache)
        seen = model(ids[:1, 59:], cache=cache).logits
        mask[:, 2:40] = 0
        hidden = model(ids[:1, 59:], attention_mask=mask, position_ids=torch.tensor([[59]]), cache=twin).logits
        assert (seen - hidden).abs().max() > 0.1
        bias = torch.zeros(1, 1, 1, 61)
        bias[..., 3] = 0.5
        with pytest.raises(UnsupportedModel, match="adds a bias"):
            model(ids[:1, :1], attention_mask=bias, cache=cache)


def test_two_turns_of_a_padded_batch(model, ids):
    """Row 1 of turn one is finished early; its filler is masked out in turn two, as generate does."""
    artifact = make_artifact(model, cache_spec("identity", "identity"), ids[:1])
    quantised = make_artifact(model, cache_spec(window=8, sink=4), ids[:1])
    logits = {}
    for name, cache in (
        ("dynamic", DynamicCache(config=model.config)),
        ("identity", CalibratedCache(artifact, model)),
        ("quantised", CalibratedCache(quantised, model)),
    ):
        with torch.no_grad():
            model(ids, cache=cache)
            mask = torch.ones(2, 110, dtype=torch.long)
            mask[1, 45:60] = 0
            positions = (mask.cumsum(1) - 1)[:, 60:]
            logits[name] = model(ids[:, :50], attention_mask=mask, position_ids=positions, cache=cache).logits
    torch.testing.assert_close(logits["identity"], logits["dynamic"], rtol=0, atol=1e-5)
    assert (logits["quantised"] - logits["dynamic"]).abs().max() < 1.0


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    twin = copy.deepcopy(model)
    other = CalibratedCache(artifact, twin)
    assert torch.equal(generate(model, ids, cache), generate(twin, ids, other))
    del other
    gc.collect()
    assert twin.config._attn_implementation == "sdpa"
    assert not twin.model.rotary_emb._forward_pre_hooks


def test_misuse_is_a_sentence(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1, :5], cache=cache)
        with pytest.raises(ConfigError, match="holds 1 rows and got 2"):
            model(ids[:, :5], cache=cache)
        with pytest.raises(UnsupportedModel, match="made for another model"):
            tiny("llama", seed=1)(ids[:1, :5], cache=CalibratedCache(artifact, model))


def test_attention_set_by_hand_under_a_living_cache(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    expected = generate(model, ids[:1], CalibratedCache(artifact, model))
    model.set_attn_implementation("eager")
    assert torch.equal(generate(model, ids[:1], cache), expected)
    del cache
    gc.collect()
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
