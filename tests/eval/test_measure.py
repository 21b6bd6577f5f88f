import pytest
import torch
from transformers import DynamicCache

from kvcalib.eval.measure import Calibrated, measure
from kvcalib.eval.reference import reference
from kvcalib.quant.spec import CacheSpec, TensorSpec
from tests.helpers import KEYS, cache_spec, make_artifact

NEEDLES = {"tasks": ["passkey"], "lengths": [300], "depths": [0.0], "trials": 1, "seed": 0}


@pytest.fixture
def measured(model, tokenizer, windows, progress, tmp_path):
    def run(spec, **needles):
        reference(model, tokenizer, windows, out=tmp_path, progress=progress, **NEEDLES | needles)
        member = Calibrated(make_artifact(model, spec, windows[:1]), model)
        return measure(model, tokenizer, member, windows, tmp_path, seed=0, progress=progress)

    return run


def test_nothing_is_lost_where_nothing_is_quantised(measured):
    found = measured(cache_spec("identity", "identity"))
    assert found["kl"] == 0
    assert found["rise"] == pytest.approx(0, abs=1e-6)
    assert found["top1"] == 1
    assert found["bits"] == pytest.approx(16, abs=0.1)


def test_coarser_formats_lose_more(measured):
    fine, coarse = (measured(CacheSpec(s, s, 0, 1), trials=0)["kl"] for s in (_uniform(6), _uniform(2)))
    assert 0 < fine < coarse / 10


def test_exact_tokens_count_with_their_bits(measured, windows):
    without, recent = (measured(cache_spec(window=w, sink=1), trials=0) for w in (0, 63))
    assert recent["bits_key"] == without["bits_key"]
    page, tokens = (without["bits_key"] + without["bits_value"]) / 2, windows.shape[1]
    assert without["bits"] == pytest.approx((16 + (tokens - 1) * page) / tokens)
    assert recent["bits"] == pytest.approx((16 * 64 + (tokens - 64) * page) / tokens)
    assert recent["kl"] < without["kl"]


def test_outliers_beyond_thresholds_count_by_their_number(measured):
    spec = CacheSpec(TensorSpec(4, "nuq", "static", rope="pre", outliers=0.02, rank="threshold"), _uniform(4), 0, 1)
    found = measured(spec, trials=0)
    assert found["bits_key"] == pytest.approx(4 + 32 * found["outlier_hit_rate_key"], abs=0.15)  # and row pointers
    assert 0 < found["outlier_hit_rate_key"] < 0.2


def test_needles_are_those_of_the_reference(measured, progress):
    found = measured(cache_spec(sink=1))
    assert [(row["task"], row["length"], row["packed"]) for row in found["needle"]] == [("passkey", 300, 1)]
    assert found["needle_fp"] == found["needle_cache"] == 0


def test_the_keys_of_the_exact_pass_are_those_of_the_model(model, windows):
    """Hit rates do not depend on the format's own errors."""
    spec = CacheSpec(KEYS["static"], _uniform(2), 0, 0)
    member = Calibrated(make_artifact(model, spec, windows[:1]), model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(windows[:1], cache=cache, use_cache=True)
    assert member.bits(lambda: cache, windows.shape[1])["outlier_hit_rate_key"] > 0


def _uniform(bits: int) -> TensorSpec:
    return TensorSpec(bits, "uniform", "token")
