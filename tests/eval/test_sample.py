import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import ConfigError
from kvcalib.eval.sample import continue_both, continue_greedily, sample, stop_ids
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def crude(model, windows):
    """Makes an empty cache that quantises so coarsely that it changes predictions."""
    artifact = make_artifact(model, cache_spec("group", "channels"), windows[:1])
    return CalibratedCache(artifact, model)


def plain(model):
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("last", [1, 8, 160, 200])
def test_continuation_is_that_of_generate(model, windows, last):
    expected = model.generate(windows[:1], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert continue_greedily(model, windows[0], plain(model), tokens=12, last=last) == expected[0, 160:].tolist()


def test_ends_before_a_stop_token(model, windows):
    new = continue_greedily(model, windows[0], plain(model), tokens=12)
    stopped = continue_greedily(model, windows[0], plain(model), tokens=12, stop=frozenset({new[3]}))
    assert stopped == new[: new.index(new[3])]


def test_the_first_token_already_reads_the_quantised_prompt(model, windows, crude):
    """In one pass it is that of the exact model, in two it depends on the pages."""

    def first(cache, last):
        cache.reset()
        prompts = (row[:n] for row in windows for n in range(100, 160, 4))
        tokens = []
        for prompt in prompts:
            cache.reset()
            tokens += continue_greedily(model, prompt, cache, tokens=1, last=last)
        return tokens

    exact = first(plain(model), 1)
    assert first(crude, 160) == exact
    assert first(crude, 1) != exact


def test_stop_ids_join_model_and_tokenizer(model, tokenizer, monkeypatch):
    assert stop_ids(model, tokenizer) == {257}
    monkeypatch.setattr(model.generation_config, "eos_token_id", [3, 257])
    assert stop_ids(model, tokenizer) == {3, 257}
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert stop_ids(model, tokenizer) == {257}


def test_without_a_prompt_half_of_the_window_is_continued(model, tokenizer, windows):
    shown = sample(model, tokenizer, plain(model), windows[0], prompt=None, tokens=5)
    assert shown["prompt"] == tokenizer.decode(windows[0, :80])
    assert shown["fp"] == shown["cache"] != ""


def test_a_prompt_of_ones_own(model, tokenizer, windows, crude):
    shown = sample(model, tokenizer, crude, windows[0], prompt="Once " * 30, tokens=8)
    assert shown["prompt"] == "Once " * 30
    assert len(shown["fp"]) == len(shown["cache"]) == 8
    assert crude.get_seq_length() == 150 + 7
    assert crude.memory_report()["key_pages_bytes"] > 0


def test_no_tokens_no_sample(model, tokenizer, windows):
    assert sample(model, tokenizer, plain(model), windows[0], prompt="x", tokens=0) is None


@pytest.mark.parametrize(("prompt", "reason"), [("", "no tokens"), ("x" * 512, "512 tokens")])
def test_prompts_that_cannot_be_continued(model, tokenizer, windows, prompt, reason):
    with pytest.raises(ConfigError, match=reason):
        sample(model, tokenizer, plain(model), windows[0], prompt=prompt, tokens=5)


def test_a_continuation_ends_where_the_model_does(model, tokenizer, windows, caplog):
    with caplog.at_level("INFO"):
        sample(model, tokenizer, plain(model), windows[0], prompt="x" * 510, tokens=5)
    assert "2 tokens instead of 5" in caplog.text


def test_both_continuations_are_those_of_either_cache(model, windows, crude):
    for ids, last in ((windows[0, :150], 1), (windows[0, :150], 8), (windows[0, :4], 4)):
        crude.reset()
        alone = [continue_greedily(model, ids, each, tokens=6, last=last) for each in (plain(model), crude)]
        crude.reset()
        both = continue_both(model, ids, plain(model), crude, tokens=6, last=last)
        assert list(both) == alone
    assert "update" not in vars(crude)


def test_both_continuations_of_a_model_with_layers_that_cache_no_keys():
    hybrid = tiny("qwen3_next")
    ids = torch.arange(5, 45)
    alone = continue_greedily(hybrid, ids, plain(hybrid), tokens=4)
    assert continue_both(hybrid, ids, plain(hybrid), plain(hybrid), tokens=4) == (alone, alone)
