"""The ways in which people run a model: pipeline, loop by hand, offloaded weights, threads, other caches in between."""

import copy
import gc
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import accelerate
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    pipeline,
)

from kvcalib.errors import ArtifactError, ConfigError, UnsupportedModel
from kvcalib.models.tiny import byte_tokenizer
from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime import departure
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

OPTIONS = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (2, 80), generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, cache_spec(window=8, sink=2), ids[:1])


@pytest.fixture(scope="module")
def expected(model, ids, artifact):
    return model.generate(ids, cache=CalibratedCache(artifact, model), **OPTIONS)


def test_pipeline(model, artifact):
    generator = pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
    text = "A cache is a place where things are kept that will be used again. " * 2
    options = {"max_new_tokens": 12, "do_sample": False}
    exact = make_artifact(model, cache_spec("identity", "identity"), torch.arange(3, 90)[None])
    theirs = generator(text, **options)[0]["generated_text"]
    assert generator(text, cache=CalibratedCache(exact, model), **options)[0]["generated_text"] == theirs
    cache = CalibratedCache(artifact, model)
    out = generator(text, cache=cache, **options)[0]["generated_text"]
    assert out.startswith(text)
    assert cache.layers[0].store.page_counts[0] >= 2


def test_a_loop_by_hand(model, ids, artifact, expected):
    cache, row = CalibratedCache(artifact, model), ids[:1]
    with torch.no_grad():
        token = model(row, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        for _ in range(30):
            row = torch.cat([row, token], dim=1)
            token = model(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
    assert torch.equal(row[0], expected[0])


def test_both_names_of_the_argument(model, ids, artifact, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert torch.equal(model.generate(ids, cache=CalibratedCache(artifact, model), **OPTIONS), expected)
    with pytest.warns(FutureWarning, match="past_key_values"):
        old = model.generate(ids, past_key_values=CalibratedCache(artifact, model), **OPTIONS)
    assert torch.equal(old, expected)


def test_the_cache_that_comes_back_is_the_one_that_went_in(model, ids, artifact):
    cache = CalibratedCache(artifact, model)
    out = model.generate(ids, cache=cache, return_dict_in_generate=True, **OPTIONS)
    assert out.cache is cache
    assert cache.get_seq_length() == 109


def on_the_cpu(folder):
    return accelerate.cpu_offload(tiny("llama"), execution_device="cpu")


def on_disk(folder):
    tiny("llama").save_pretrained(folder)
    places = {name: "cpu" for name in ("model.embed_tokens", "model.layers.0", "model.rotary_emb", "lm_head")}
    places |= {"model.layers.1": "disk", "model.norm": "disk"}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "offload")


@pytest.mark.parametrize("offload", [on_the_cpu, on_disk])
def test_offloaded_weights(ids, artifact, expected, tmp_path, offload):
    """Weights that are not in the module have the same identity, so the artifact fits and other weights do not."""
    model = offload(tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    cache = CalibratedCache(artifact, model)
    assert torch.equal(model.generate(ids, cache=cache, **OPTIONS), expected)
    path = cache.save(tmp_path / "prefix.safetensors")
    again = CalibratedCache.load(path, artifact, tiny("llama"))
    assert again.get_seq_length() == 109


def test_two_threads_with_a_cache_each(model, ids, artifact):
    alone = [model.generate(ids[row : row + 1, : 40 + 40 * row], cache=CalibratedCache(artifact, model), **OPTIONS)
             for row in (0, 1)]  # fmt: skip
    wrong = []

    def serve(row):
        for _ in range(6):
            cache = CalibratedCache(artifact, model)
            out = model.generate(ids[row : row + 1, : 40 + 40 * row], cache=cache, **OPTIONS)
            wrong.extend([row] if not torch.equal(out, alone[row]) else [])

    threads = [threading.Thread(target=serve, args=(row,)) for row in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_cache_used_from_one_thread_after_another(model, ids, artifact):
    def prefill(cache, results):
        with torch.no_grad():
            results.append(model(ids[:, :79], cache=cache).logits)

    def decode(cache, results):
        results.append(model.generate(ids, cache=cache, **OPTIONS))

    here, there = (CalibratedCache(artifact, model), []), (CalibratedCache(artifact, model), [])
    for step in (prefill, decode):
        step(*here)
        thread = threading.Thread(target=step, args=there)
        thread.start()
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(here[1], there[1], strict=True))


def test_two_caches_in_turn_on_one_model(model, ids, artifact):
    caches = [CalibratedCache(artifact, model) for _ in range(2)]
    single = [CalibratedCache(artifact, model) for _ in range(2)]
    with torch.no_grad():
        parts = ids.split(9, dim=1)
        turns = [[model(part[row : row + 1], cache=caches[row]).logits for row in (0, 1)] for part in parts]
        for row, cache in enumerate(single):
            for part, turn in zip(parts, turns, strict=True):
                assert torch.equal(model(part[row : row + 1], cache=cache).logits, turn[row])


def test_dropping_the_cache_leaves_the_model_as_it_was(ids):
    model = tiny("gemma3_text")
    artifact = make_artifact(model, cache_spec(window=8, sink=2), ids[:1])
    hooks = {
        name: len(module._forward_pre_hooks) + len(module._forward_hooks) for name, module in model.named_modules()
    }
    before, settings = model.generate(ids, **OPTIONS), model.config.to_dict()
    cache = CalibratedCache(artifact, model)
    model.generate(ids, cache=cache, **OPTIONS)
    assert torch.equal(model.generate(ids, cache=DynamicCache(config=model.config), **OPTIONS), before)
    del cache
    gc.collect()
    assert torch.equal(model.generate(ids, **OPTIONS), before)
    assert model.config.to_dict() == settings
    for name, module in model.named_modules():
        assert len(module._forward_pre_hooks) + len(module._forward_hooks) == hooks[name]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("step", [1, 4, 70])
def test_a_cache_given_to_another_model_is_refused_and_stays_as_it_is(family, attached, step, ids):
    """Reloaded weights, a draft model: a cache of its own must not make the other model look like ours."""
    model, other = tiny(family), tiny(family)
    artifact = make_artifact(model, cache_spec("group", window=8, sink=2), ids[:1])
    own = CalibratedCache(artifact, other) if attached else DynamicCache(config=other.config)
    cache, fresh, expected = (CalibratedCache(artifact, model) for _ in range(3))
    with torch.no_grad():
        for each in (cache, expected):
            model(ids[:1, :50], cache=each)
        other(ids[:1, :50], cache=own)
        for refused in (cache, fresh):
            with pytest.raises(UnsupportedModel, match="made for another model"):
                other(ids[:1, :step], cache=refused)
        assert fresh.get_seq_length() == 0
        assert torch.equal(model(ids[:1, 50:60], cache=cache).logits, model(ids[:1, 50:60], cache=expected).logits)


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_position_ids_in_floating_point(model, ids, rope, tmp_path):
    key = TensorSpec(8, "uniform", "group", group=8, rope=rope)
    spec = CacheSpec(key, TensorSpec(8, "uniform", "token", scope="head"), 0, 2)
    artifact = make_artifact(model, spec, ids[:1])
    cache, expected = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    positions = torch.arange(80.0)[None]
    with torch.no_grad():
        ours = model(ids[:1], cache=cache, position_ids=positions).logits
        assert torch.equal(ours, model(ids[:1], cache=expected).logits)
        again = CalibratedCache.load(cache.save(tmp_path / "prefix"), artifact, model)
        assert torch.equal(model(ids[:1, :5], cache=again).logits, model(ids[:1, :5], cache=expected).logits)
        with pytest.raises(ConfigError, match="position_ids are fractions"):
            model(ids[:1], cache=CalibratedCache(artifact, model), position_ids=positions / 2)


@pytest.mark.parametrize("way", ["another head", "another head and config", "a shallow copy"])
@pytest.mark.parametrize("gone", [0, 1])
def test_two_models_over_one_base(way, gone, ids):
    first = tiny("llama")
    if way.startswith("another head"):
        second = type(first)(first.config if way == "another head" else copy.deepcopy(first.config)).eval()
        second.model, second.lm_head = first.model, first.lm_head
    else:
        second = copy.copy(first)
    artifacts = [make_artifact(each, cache_spec(window=8, sink=2), ids[:1]) for each in (first, second)]
    alone = CalibratedCache(artifacts[0], first)
    with torch.no_grad():
        expected = [first(part, cache=alone).logits for part in ids.split(40, dim=1)]
        del alone
        caches = [CalibratedCache(*each) for each in zip(artifacts, (first, second), strict=True)]
        for part, logits in zip(ids.split(40, dim=1), expected, strict=True):
            assert torch.equal(first(part, cache=caches[0]).logits, logits)
            hidden = [each.base_model(part, cache=caches[1]).last_hidden_state for each in (second,)]
            assert torch.equal(first.lm_head(hidden[0]), logits)
        left = (first, second)[1 - gone]
        del caches[gone]
        gc.collect()
        assert torch.equal(left(ids[:, :3], cache=caches[0]).logits, first.lm_head(again(first, artifacts[0], ids)))
        del caches
        gc.collect()
        assert {first.config._attn_implementation, second.config._attn_implementation} == {"sdpa"}


def again(model, artifact, ids):
    """Hidden states of three tokens more, after all of them in portions."""
    cache = CalibratedCache(artifact, model)
    for part in ids.split(40, dim=1):
        model(part, cache=cache)
    return model.model(ids[:, :3], cache=cache).last_hidden_state


def test_a_vocabulary_that_has_grown(ids, artifact):
    """For a token that pads: keys and values come from the same weights."""
    model = tiny("llama")
    cache = CalibratedCache(artifact, model)
    model.resize_token_embeddings(model.config.vocab_size + 10)
    with torch.no_grad():
        again = CalibratedCache(artifact, model)
        assert torch.equal(model(ids, cache=again).logits, model(ids, cache=cache).logits)


@pytest.mark.parametrize("change", [{"window": -1}, {"window": 1.5}, {"sink": "8"}, {"window": True}, {"sink": None}])
def test_a_format_that_was_changed_in_python_is_looked_at(model, ids, artifact, change):
    other = replace(artifact, spec=replace(artifact.spec, **change))
    with pytest.raises(ArtifactError, match=f"spec.{next(iter(change))}=.* must be a count of tokens"):
        CalibratedCache(other, model)
    trellis = make_artifact(model, cache_spec("trellis", "trellis"), ids[:1])
    for key in (replace(trellis.spec.key, rounding="feedback"), replace(trellis.spec.key, bits=4)):
        with pytest.raises(ArtifactError, match="the calibration is not usable: layers.0.key"):
            CalibratedCache(replace(trellis, spec=replace(trellis.spec, key=key)), model)
    cache = CalibratedCache(replace(artifact, spec=replace(artifact.spec, window=0, sink=0)), model)
    model(ids, cache=cache)
    assert cache.layers[0].store.page_counts[0] == 2


def test_attention_that_was_set_after_the_last_step_stays_set(ids, artifact):
    model = tiny("llama")
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1], cache=cache)
    model.set_attn_implementation("eager")
    del cache
    gc.collect()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_cache_that_is_collected_while_another_attaches(family, ids, artifact):
    """Any allocation can start a collection, also one under the lock: it must not wait for that lock."""
    model = tiny("llama")
    other = model if family == "llama" else tiny(family)
    cache = CalibratedCache(artifact, model)
    cache.itself = cache  # garbage, but not before a collection
    gc.collect()
    del cache
    real, done = other.set_attn_implementation, []
    other.set_attn_implementation = lambda name: (gc.collect(), real(name))
    made = make_artifact(other, cache_spec(window=8, sink=2), ids[:1])
    thread = threading.Thread(target=lambda: done.append(CalibratedCache(made, other)), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert done, "waits for ever"
    gc.collect()
    assert model.config._attn_implementation == ("sdpa" if other is not model else "kvcalib")
    done.clear()
    gc.collect()
    assert other.config._attn_implementation == "sdpa"


def test_the_model_is_freed_with_its_last_cache(ids, artifact):
    import weakref

    model = tiny("llama")
    cache, gone = CalibratedCache(artifact, model), weakref.ref(model)
    model.generate(ids[:1, :9], cache=cache, **OPTIONS)
    del model, cache
    gc.collect()
    assert gone() is None


def test_an_error_in_the_middle_leaves_both_usable(model, ids, artifact, expected):
    cache = CalibratedCache(artifact, model)

    def broken(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids, cache=cache)
    hook.remove()
    cache.reset()
    assert torch.equal(model.generate(ids, cache=cache, **OPTIONS), expected)


def test_a_model_that_is_pickled_while_a_cache_lives_runs_in_another_process(model, ids, artifact, tmp_path):
    cache = CalibratedCache(artifact, model)
    torch.save(model, tmp_path / "model.pt")
    del cache
    script = (
        "import torch, sys\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(model(torch.tensor([[5, 6, 7]])).logits, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt"), str(tmp_path / "logits.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_position_ids_that_jump_are_stored_and_said(model, ids, artifact, caplog):
    cache = CalibratedCache(artifact, model)
    departure._scattered.cache_clear()
    with torch.no_grad():
        model(ids, position_ids=2 * torch.arange(ids.shape[1])[None], cache=cache)
    assert [record.message for record in caplog.records if "position_ids jump" in record.message]
    assert cache.layers[0].store.page_counts[0] > 60


@pytest.mark.parametrize("tokens", [5, 7])
def test_a_model_that_is_called_again_inside_its_own_pass(model, ids, artifact, tokens):
    """By a hook, with a cache of its own: each pass has its positions, and both come to their ends."""
    inner = CalibratedCache(artifact, model)
    busy = []

    def call_again(*_):
        if busy:
            return
        busy.append(True)
        model(ids[:1, :tokens] if inner.get_seq_length() == 0 else ids[:1, :1], cache=inner)
        busy.clear()

    cache, expected = (CalibratedCache(artifact, model) for _ in range(2))
    with torch.no_grad():
        for part in ids.split([50, 5, 1, 24], dim=1):
            theirs = model(part, cache=expected).logits
            hook = model.model.layers[1].self_attn.q_proj.register_forward_hook(call_again)
            ours = model(part, cache=cache).logits
            hook.remove()
            assert torch.equal(ours, theirs)
    assert (cache.get_seq_length(), inner.get_seq_length()) == (80, tokens + 3)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_keys_at_far_positions_come_back_as_they_were(model, ids, kernel, monkeypatch):
    """Turned back before they are packed and forth when they are read, by the same angles; with rope=post by none."""
    monkeypatch.setenv("KVCALIB_KERNEL", kernel)
    found = {}
    for rope in ("pre", "post"):
        key = TensorSpec(8, "uniform", "group", group=8, rope=rope)
        spec = CacheSpec(key, TensorSpec(8, "uniform", "token", scope="head"), 0, 1)
        cache = CalibratedCache(make_artifact(model, spec, ids[:1]), model)
        places = 9_000_000 + torch.arange(80)
        with torch.no_grad():
            model(ids[:1, :75], position_ids=places[None, :75], cache=cache)
            found[rope] = model(ids[:1, 75:], position_ids=places[None, 75:], cache=cache).logits
    assert (found["pre"] - found["post"]).abs().max() < 0.03


def test_towers_keep_their_own_attention(ids):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=16, patch_size=8, projection_dim=32)
    text = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=1, vocab_size=300)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=299)
    ).eval()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})

    def attention():
        configs = model.config, model.config.text_config, model.config.vision_config
        return [config._attn_implementation for config in configs]

    before, artifact = attention(), make_artifact(model, cache_spec(), ids[:1])
    cache = CalibratedCache(artifact, model)
    assert attention() == ["kvcalib", "kvcalib", "eager"]
    with torch.no_grad():
        model(ids[:1], cache=cache)
    del cache
    gc.collect()
    assert attention() == before
