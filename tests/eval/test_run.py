import json
import math

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.eval.run import check_pages, evaluate
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

KEYS = {
    *("ppl_fp", "ppl_simulated", "ppl_cache", "kl_cache", "top1_agreement", "tokens", "window"),
    *("bits_per_element_key", "bits_per_element_value", "bytes_per_token", "bytes_per_token_fp16"),
    *("compression", "compression_pages", "outlier_rate_key", "outlier_rate_value", "needle_fp", "needle_cache"),
}
SETTINGS = {
    "chunk": 32,
    "needle_tasks": ["passkey"],
    "needle_lengths": [],
    "needle_depths": [0.5],
    "needle_trials": 1,
    "sample_tokens": 8,
    "prompt": None,
    "seed": 0,
}


@pytest.fixture
def measure(model, tokenizer, windows, progress):
    def run(spec, *, model=model, **settings):
        artifact = make_artifact(model, spec, windows[:1])
        return evaluate(model, tokenizer, artifact, windows, progress=progress, **(SETTINGS | settings))

    return run


@pytest.mark.parametrize("window", [0, 16])
def test_identity_is_exact_in_every_measure(measure, window):
    spec = cache_spec("identity", "identity", window=window)
    metrics = measure(spec, needle_lengths=[200])
    assert metrics["ppl_cache"] == metrics["ppl_fp"]
    assert metrics["ppl_simulated"] == metrics["ppl_fp_whole"]
    assert metrics["ppl_fp_whole"] == pytest.approx(metrics["ppl_fp"], rel=1e-5)
    assert metrics["kl_cache"] == metrics["kl_simulated"] == 0
    assert metrics["top1_agreement"] == metrics["top1_simulated"] == 1
    assert metrics["needle_fp"] == metrics["needle_cache"]
    assert metrics["sample"]["fp"] == metrics["sample"]["cache"]
    assert metrics["outlier_rate_key"] == metrics["outlier_rate_value"] == 0


def test_every_key_is_there_and_is_json(measure, progress):
    metrics = measure(cache_spec(window=16, sink=4), needle_lengths=[200])
    assert metrics.keys() >= KEYS
    json.dumps(metrics, allow_nan=False)
    assert metrics["tokens"] == 2 * 159
    assert (metrics["window"], metrics["windows"]) == (160, 2)
    assert set(metrics["seconds"]) == {"simulated", "cache", "needle", "sample"}
    assert [call[0] for call in progress.calls] == [2, 2, 1]


def test_quantisation_shows_in_every_measure(measure):
    metrics = measure(cache_spec("group", "channels"))
    assert metrics["kl_cache"] > 1e-3
    assert metrics["kl_simulated"] > 1e-3
    assert metrics["ppl_cache"] != metrics["ppl_fp"]
    assert metrics["ppl_simulated"] != metrics["ppl_fp_whole"]
    assert metrics["top1_agreement"] < 1


def test_totals_follow_from_the_windows(measure):
    metrics = measure(cache_spec())
    logs = [math.log(ppl) for ppl in metrics["per_window"]["ppl_cache"]]
    assert len(logs) == 2
    assert metrics["ppl_cache"] == pytest.approx(math.exp(sum(logs) / 2))
    assert metrics["kl_cache"] == pytest.approx(sum(metrics["per_window"]["kl_cache"]) / 2)


def test_memory_is_that_of_one_full_window(measure, model, windows):
    spec = cache_spec(window=16, sink=4)
    cache = CalibratedCache(make_artifact(model, spec, windows[:1]), model)
    with torch.no_grad():
        for part in windows[:1].split(32, dim=1):
            model(part, cache=cache, use_cache=True)
    metrics, report = measure(spec, needle_lengths=[200]), cache.memory_report()
    assert metrics["memory"] == report
    assert metrics["memory"]["tokens"] == 160
    assert metrics["bits_per_element_key"] == report["bits_per_element_key"]
    assert metrics["compression"] == pytest.approx(metrics["bytes_per_token_fp16"] / metrics["bytes_per_token"])


@pytest.mark.parametrize(("window", "sink", "chunk"), [(160, 0, 32), (97, 0, 32), (92, 5, 32), (16, 4, 160)])
def test_settings_that_measure_nothing_quantised_are_refused(measure, progress, window, sink, chunk):
    with pytest.raises(ConfigError, match=f"eval.length=160 .*quant.sink={sink} .*quant.window={window} ") as caught:
        measure(cache_spec(window=window, sink=sink), chunk=chunk)
    assert "\n" not in str(caught.value)
    assert progress.calls == []


@pytest.mark.parametrize(("window", "sink", "chunk"), [(96, 0, 32), (92, 4, 32), (48, 0, 80)])
def test_one_page_that_is_read_is_enough(measure, window, sink, chunk):
    assert measure(cache_spec(window=window, sink=sink), chunk=chunk)["kl_cache"] > 0


def test_the_length_that_the_message_proposes_is_enough():
    spec = cache_spec(window=100, sink=3)
    with pytest.raises(ConfigError, match="use eval.length=161 or more"):
        check_pages(spec, 160, 32)
    check_pages(spec, 161, 32)
    check_pages(cache_spec("identity", "identity", window=100), 10, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": ""}, "eval.prompt=''"),
        ({"prompt": "x" * 600}, "the prompt has 600 tokens and the model takes 512"),
        ({"needle_lengths": [400, 50]}, r"eval.needle_lengths=50 is too short: .* take \d+ tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(measure, progress, settings, message):
    with pytest.raises(ConfigError, match=message):
        measure(cache_spec(), **settings)
    assert progress.calls == []


def test_needles_without_trials_are_not_checked(measure):
    assert measure(cache_spec(), needle_lengths=[50], needle_trials=0)["needle_fp"] is None


def test_memory_that_says_nothing_is_none(measure, monkeypatch):
    monkeypatch.setattr(CalibratedCache, "memory_report", lambda self: {"tokens": 0})
    assert measure(cache_spec())["compression"] is None


def test_the_order_of_the_windows_does_not_matter(measure, model, tokenizer, windows, progress):
    artifact = make_artifact(model, cache_spec(), windows[:1])
    both = evaluate(model, tokenizer, artifact, windows, progress=progress, **SETTINGS)
    flipped = evaluate(model, tokenizer, artifact, windows.flip(0), progress=progress, **SETTINGS)
    assert both["per_window"]["ppl_cache"] == flipped["per_window"]["ppl_cache"][::-1]
    assert both["per_window"]["kl_simulated"] == flipped["per_window"]["kl_simulated"][::-1]


def test_the_model_is_left_as_it_was(measure):
    model = tiny("llama", attention_dropout=0.5).train()
    original = model.config._attn_implementation
    metrics = measure(cache_spec("identity", "identity"), model=model)
    assert metrics["kl_cache"] == 0, "dropout was on"
    assert model.training
    assert model.config._attn_implementation == original


def test_nan_is_refused(measure):
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(ConfigError, match="NaN"):
        measure(cache_spec(), model=model)
