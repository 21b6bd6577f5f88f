"""Modes of torch that a caller may be in: the cache says what DynamicCache says, in each and after each."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kvcalib.artifact.io import load_artifact, save_artifact
from kvcalib.artifact.schema import LayerTables
from kvcalib.errors import UnsupportedModel
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


OPERATIONS = {
    "crop": lambda cache, path: cache.crop(-20),
    "crop below a page": lambda cache, path: cache.crop(-60),
    "reorder": lambda cache, path: cache.reorder_cache(torch.tensor([2, 1, 0])),
    "select": lambda cache, path: cache.batch_select_indices(torch.tensor([2, 1, 0])),
    "repeat": lambda cache, path: (cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.arange(3))),
    "copy": lambda cache, path: copy.deepcopy(cache),
    "reset": lambda cache, path: cache.reset(),
    "load": lambda cache, path: CalibratedCache.load(cache.save(path), cache._artifact, cache._model),
}


@pytest.mark.parametrize("prefill", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_done_in_inference_mode_can_be_gone_on_with_outside(model, ids, artifact, operation, prefill, tmp_path):
    logits = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = CalibratedCache(artifact, model)
        with prefill():
            model(ids[:, :80], cache=cache)
        with mode():
            made = OPERATIONS[operation](cache, tmp_path / "saved")
        cache = made if isinstance(made, CalibratedCache) else cache
        with torch.no_grad():
            logits.append([model(part, cache=cache).logits for part in ids[:, 80:].split([1, 25], dim=1)])
    for inside, outside in zip(*logits, strict=True):
        assert torch.equal(inside, outside)


def test_beam_search_in_inference_mode_then_a_step_outside(model, ids, artifact):
    cache, exact = CalibratedCache(artifact, model), DynamicCache(config=model.config)
    for each in (cache, exact):
        with torch.inference_mode():
            options = {"num_beams": 3, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
            model.generate(ids[:1, :50], cache=each, eos_token_id=None, **options)
        with torch.no_grad():
            model(ids[:, :40], cache=each)
    assert cache.get_seq_length() == exact.get_seq_length()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [20, 80])
def test_a_gradient_is_a_sentence_and_not_a_wrong_number(model, ids, artifact, tokens, kernel, monkeypatch):
    monkeypatch.setenv("KVCALIB_KERNEL", kernel)
    cache, plain = (CalibratedCache(artifact, model) for _ in range(2))
    for part in ids[:1, : tokens + 10].split([tokens, 10], dim=1):
        logits = model(part, cache=cache).logits
        with torch.no_grad():
            torch.testing.assert_close(logits, model(part, cache=plain).logits)
        with pytest.raises(UnsupportedModel, match=r"no gradient: call the model under torch.no_grad\(\)"):
            logits.logsumexp(-1).sum().backward()
    assert cache.get_seq_length() == tokens + 10


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_gradient_of_a_part_is_a_sentence_too(ids, part):
    model = tiny("llama")
    artifact = make_artifact(model, cache_spec(window=8, sink=2), ids[:1])
    for name, weight in model.named_parameters():
        weight.requires_grad = name.startswith(f"model.layers.1.self_attn.{part}") or "layers.1.mlp" in name
    logits = model(ids, cache=CalibratedCache(artifact, model)).logits
    with pytest.raises(UnsupportedModel, match=r"no gradient: call the model under torch.no_grad\(\)"):
        logits.logsumexp(-1).sum().backward()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_default_device_elsewhere(model, ids, artifact, kernel, monkeypatch, tmp_path):
    """Tensors that kernels on the CPU write to would be made there: memory that is none."""
    monkeypatch.setenv("KVCALIB_KERNEL", kernel)
    expected = in_parts(model, ids, CalibratedCache(artifact, model))
    fresh = LayerTables(
        artifact.layers[0].key._replace(zero=artifact.layers[0].key.zero.clone()), artifact.layers[0].value
    )
    anew = replace(artifact, layers=artifact.layers | {0: fresh})  # no plan of a kernel is there yet
    feedback = make_artifact(model, cache_spec("feedback", "norm"), ids[:1, :60])
    with torch.device("meta"):
        cache = CalibratedCache(anew, model)
        ours = in_parts(model, ids, cache)
        cache.crop(-3), cache.reorder_cache(torch.tensor([2, 1, 0], device="cpu")), copy.deepcopy(cache)
        cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.tensor([0, 3], device="cpu"))
        path = save_artifact(feedback, tmp_path / "artifact.safetensors")
        loaded = CalibratedCache(load_artifact(path), model)
        in_parts(model, ids, loaded)
        CalibratedCache.load(loaded.save(tmp_path / "prefix.safetensors"), path, model)
    assert all(map(torch.equal, ours, expected))
