"""What cannot work says so in one sentence, and what only looks as if it could not works."""

import copy
import gc
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvcalib.errors import ArtifactError, ConfigError, UnsupportedModel
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 300, (1, 60), generator=torch.Generator().manual_seed(12))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, cache_spec(window=8, sink=2), ids)


def compiled_outside():
    return torch.compile(tiny("llama"))


def compiled_in_place():
    model = tiny("llama")
    model.compile()
    return model


def compiled_forward():
    model = tiny("llama")
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize("make", [compiled_outside, compiled_in_place, compiled_forward])
def test_a_compiled_model(artifact, make):
    with pytest.raises(UnsupportedModel, match=r"under torch\.compile") as caught:
        CalibratedCache(artifact, make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [None, "runs/model", torch.nn.Linear(2, 2)])
def test_what_is_no_model(artifact, other):
    with pytest.raises(UnsupportedModel, match=f"not {type(other).__name__}; pass a PreTrainedModel"):
        CalibratedCache(artifact, other)


def test_a_path_in_place_of_an_artifact(model):
    with pytest.raises(ArtifactError, match=r"use CalibratedCache\.from_pretrained"):
        CalibratedCache("kvcalib.safetensors", model)


def test_an_encoder_decoder_and_latent_attention(artifact):
    with pytest.raises(UnsupportedModel, match="'t5' is not supported: it is an encoder-decoder"):
        CalibratedCache(artifact, tiny("t5"))
    with pytest.raises(UnsupportedModel, match=r"compressed latent \(MLA\)"):
        CalibratedCache(artifact, tiny("deepseek_v3"))


def test_a_static_cache_beside_ours(model, ids, artifact):
    """transformers refuses two caches in one call; alone, its static cache works on an attached model."""
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cache = CalibratedCache(artifact, model)
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        model.generate(ids, cache=cache, cache_implementation="static", **options)
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    static = StaticCache(config=model.config, max_cache_len=100)
    assert torch.equal(model.generate(ids, cache=static, **options), expected)


def test_offloading_the_cache(model, ids, artifact):
    with pytest.raises(UnsupportedModel, match="is not offloaded"):
        CalibratedCache(artifact, model).offload(0)


def test_attention_weights_are_the_models_own_until_something_is_packed(ids, artifact):
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(ids[:, :30], cache=DynamicCache(config=model.config), output_attentions=True).attentions
        model.config.output_attentions = True
        cache = CalibratedCache(artifact, model)
        ours = model(ids[:, :30], cache=cache).attentions
        assert len(ours) == len(theirs) == 2
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        model(ids[:, 30:], cache=cache, output_attentions=False)
        with pytest.raises(UnsupportedModel, match="gives no attention weights"):
            model(ids[:, :1], cache=cache, output_attentions=True)
        with pytest.raises(UnsupportedModel, match="gives no attention weights"):
            model(ids[:, :1], cache=cache)


def test_falcon_reads_the_packed_bits_through_torch(ids):
    model = tiny("falcon")
    artifact = make_artifact(model, cache_spec(window=8, sink=2), ids)
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids, cache=cache)
        assert cache.layers[0].store.page_counts == [1]
        assert model(ids[:, :1], cache=cache).logits.isfinite().all()
        with pytest.raises(UnsupportedModel, match="leave output_attentions out"):
            model(ids[:, :1], cache=cache, output_attentions=True)
    del cache
    gc.collect()
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match=r"'eager' cannot .* one of \['sdpa'\]"):
        CalibratedCache(artifact, model)


@pytest.mark.slow
def test_a_model_compiled_around_a_living_cache_gives_the_same_numbers(ids, artifact):
    model = tiny("llama")
    compiled = torch.compile(model, backend="eager")
    ours, theirs = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    with torch.no_grad():
        for part in ids.split(20, dim=1):
            torch.testing.assert_close(compiled(part, cache=ours).logits, model(part, cache=theirs).logits)


def test_a_column_that_was_padding_cannot_be_shown_later(model, ids, artifact):
    """In pages there is nothing left of it; without quantisation there is, and the mask decides as always."""
    mask = torch.ones_like(ids)
    mask[:, 10:20] = 0
    identity = make_artifact(model, cache_spec("identity", "identity"), ids)
    step, logits = torch.full((1, 1), 60), []
    with torch.no_grad():
        for cache in (CalibratedCache(identity, model), DynamicCache(config=model.config)):
            model(ids, attention_mask=mask, cache=cache)
            logits.append(model(ids[:, :1], attention_mask=torch.ones(1, 61), position_ids=step, cache=cache).logits)
        assert torch.equal(*logits)
        cache = CalibratedCache(artifact, model)
        model(ids, attention_mask=mask, cache=cache)
        with pytest.raises(ConfigError, match="shows column 10 of row 0, which it hid"):
            model(ids[:, :1], attention_mask=torch.ones(1, 61), position_ids=step, cache=cache)


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy])
def test_a_pickled_cache(model, artifact, write):
    with pytest.raises(UnsupportedModel, match=r"is not pickled; cache\.save\(path\)"):
        write(CalibratedCache(artifact, model))


@pytest.mark.parametrize("shift", [-60, 2**24])
def test_positions_that_a_page_cannot_tell_apart(model, ids, artifact, shift):
    """Keys before rotation are rotated when they are read; those after it are stored as they are."""
    positions = torch.arange(60)[None] + shift
    with torch.no_grad():
        with pytest.raises(ConfigError, match=f"position_ids of row 0 go from {shift + 2} to .*rope=post"):
            model(ids, position_ids=positions, cache=CalibratedCache(artifact, model))
        after = make_artifact(model, cache_spec("group", window=8, sink=2), ids)
        model(ids, position_ids=positions, cache=CalibratedCache(after, model))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.bfloat16).min, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_masks_as_people_write_them(ids, hidden, dtype):
    model = tiny("llama").to(dtype)
    artifact = make_artifact(model, cache_spec(window=8, sink=2), ids)
    columns = torch.arange(60)
    seen = (columns <= torch.arange(55, 60)[:, None]) & (columns != 20)
    logits = []
    for mask in (seen, torch.zeros(5, 60, dtype=dtype).masked_fill(~seen, hidden)):
        cache = CalibratedCache(artifact, model)
        with torch.no_grad():
            model(ids[:, :55], cache=cache)
            logits.append(model(ids[:, 55:], attention_mask=mask[None, None], cache=cache).logits)
    assert torch.equal(*logits)


class Wrapped(torch.nn.Module):
    """An adapter around a projection."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def with_an_adapter():
    model = tiny("llama")
    model.model.layers[1].self_attn.k_proj = Wrapped(model.model.layers[1].self_attn.k_proj)
    return model


def packed_by_torch():
    return torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_an_adapter, "k_proj of layer 1 is a Wrapped of no known size; merge adapters"),
        (packed_by_torch, "weights k_proj.* and no tensor; load the model unquantised"),
        (lambda: tiny("llama").to("meta"), "on the device meta, without numbers; load the model"),
    ],
)
def test_weights_that_cannot_be_read(artifact, make, words):
    with pytest.raises(UnsupportedModel, match=words):
        CalibratedCache(artifact, make())


@pytest.mark.parametrize("place", [None, 3])
def test_an_artifact_that_is_no_path(model, artifact, place):
    for given in (place, artifact):
        with pytest.raises(ArtifactError, match=f"path or a hub id, not by {type(given).__name__}"):
            CalibratedCache.from_pretrained(given, model)


def test_no_rows_and_no_plain_tensors(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids, cache=cache)
    for act in (lambda: cache.batch_select_indices(torch.tensor([]).long()), lambda: cache.batch_repeat_interleave(0)):
        with pytest.raises(ConfigError, match=r"one row or more; cache.reset\(\)"):
            act()
    with pytest.raises(UnsupportedModel, match="no plain keys and values"):
        list(cache)
    assert (cache.get_seq_length(), cache.layers[0].store.batch) == (60, 1)


def test_dropout(ids):
    model = tiny("llama", attention_dropout=0.5).train()
    cache = CalibratedCache(make_artifact(model, cache_spec(window=8, sink=2), ids), model)
    with torch.no_grad():
        model(ids[:, :50], cache=cache)
        with pytest.raises(UnsupportedModel, match=r"dropout .* call model.eval\(\)"):
            model(ids[:, 50:], cache=cache)
        model.eval()
        model(ids[:, 50:], cache=cache)
