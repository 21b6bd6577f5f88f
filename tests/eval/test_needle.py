import re

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.eval.needle import Trial, found, grid, needle
from kvcalib.eval.prompts import build_prompt
from kvcalib.models.tiny import byte_tokenizer
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact

KEY = "48213"


@pytest.fixture
def run(model, tokenizer, windows, progress):
    def grid(spec, **options):
        cache = CalibratedCache(make_artifact(model, spec, windows[:1]), model)
        settings = {"lengths": [300], "depths": [0.0], "trials": 1, "seed": 0} | options
        with torch.no_grad():
            return needle(model, tokenizer, cache, spec, progress=progress, **settings)

    return grid


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("length", [200, 257, 500, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompt_has_the_wanted_length_and_one_bos(length, depth, bos):
    tokenizer = byte_tokenizer(prepend_bos=bos)
    ids = build_prompt(tokenizer, length, depth, KEY, 1).ids
    assert length - len("village ") <= len(ids) <= length
    assert ids.count(tokenizer.bos_token_id) == int(bos)
    assert (ids[0] == tokenizer.bos_token_id) is bos
    assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_needle_stands_at_its_depth(tokenizer, depth):
    prompt = build_prompt(tokenizer, 3000, depth, KEY, 1)
    text = tokenizer.decode(prompt.ids)
    assert text.count(f"The pass key is {KEY}.") == 1
    before = tokenizer.decode(prompt.ids[: prompt.needle_end])
    assert before.endswith(f"{KEY} is the pass key.")
    assert before.index("The pass key is") / len(text) == pytest.approx(depth, abs=0.05)
    assert text.endswith("The pass key is")


def test_prompt_is_a_function_of_its_seed(tokenizer):
    first, again, other = (build_prompt(tokenizer, 500, 0.5, KEY, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.ids != other.ids


def test_too_short_for_the_needle(tokenizer):
    with pytest.raises(ConfigError, match=r"needle_lengths=40 .* take \d+ tokens"):
        build_prompt(tokenizer, 40, 0.5, KEY, 1)


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        (" 48213.", True),
        ("\n**48213", True),
        (" 482137", True),
        (" 4821", False),
        (" 148213", False),
        (" 7, or 48213", False),
        (" unknown", False),
        ("", False),
    ],
)
def test_scoring_looks_at_the_first_digits(text, passed):
    assert found(text, KEY) is passed


def test_grid_and_shares(run, progress):
    result = run(cache_spec(), depths=[0.0, 0.5], trials=2)
    assert progress.calls == [(4, "needle")]
    assert [(row["length"], row["depth"]) for row in result["needle"]] == [(300, 0.0), (300, 0.5)]
    assert result["needle_fp"] == result["needle_cache"] == 0, "a random model finds nothing"
    assert result["needle_skipped"] == []


@pytest.mark.parametrize(("depth", "window", "packed"), [(0.0, 0, 1), (0.0, 64, 1), (1.0, 64, 0), (0.0, 300, 0)])
def test_a_row_says_whether_its_needle_was_packed(run, depth, window, packed):
    assert run(cache_spec(window=window, sink=4), depths=[depth])["needle"][0]["packed"] == packed


def test_nothing_is_packed_without_quantisation(run):
    assert run(cache_spec("identity", "identity"))["needle"][0]["packed"] == 0


def test_lengths_beyond_the_model_are_left_out_and_told(run, caplog):
    with caplog.at_level("INFO"):
        result = run(cache_spec(), lengths=[300, 512, 4096])
    assert result["needle_skipped"] == [512, 4096]
    assert [row["length"] for row in result["needle"]] == [300]
    assert "4096" in caplog.text


@pytest.mark.parametrize("options", [{"lengths": []}, {"trials": 0}, {"lengths": [9999]}])
def test_without_trials_there_is_no_rate(run, options):
    result = run(cache_spec(), **options)
    assert result["needle_fp"] is result["needle_cache"] is None
    assert result["needle"] == []


def test_a_model_that_copies_passes_until_the_cache_forgets(monkeypatch, run, tokenizer):
    """The answer is taken from the cache under test, and the key from the trial."""
    keys = []

    def answers(model, ids, exact, cache, **kwargs):
        assert type(cache) is CalibratedCache
        assert type(exact) is not CalibratedCache
        keys.append(re.search(r"key is (\d{5})", tokenizer.decode(ids))[1])
        return [tokenizer(text).input_ids for text in (f" {keys[-1]}", " 0")]

    monkeypatch.setattr("kvcalib.eval.needle.continue_both", answers)
    result = run(cache_spec(), trials=3)
    assert (result["needle_fp"], result["needle_cache"]) == (1, 0)
    assert len(set(keys)) == 3


def test_what_the_model_itself_does_not_find_is_not_held_against_a_cache():
    jobs = [Trial("passkey", 512, depth, 0) for depth in (0.1, 0.5, 0.9)]
    outcomes = [{"fp": f, "cache": c, "packed": True} for f, c in ((True, True), (True, False), (False, False))]
    result = grid(jobs, outcomes)
    assert (result["needle_fp"], result["needle_cache"]) == pytest.approx((2 / 3, 1 / 3))
    assert result["needle_kept"] == 0.5
    assert grid(jobs[2:], outcomes[2:])["needle_kept"] is None
