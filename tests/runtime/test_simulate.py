"""The stepwise simulation and the real cache say the same thing twice: equal logits."""

import pytest
import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.runtime.cache import CalibratedCache
from kvcalib.runtime.simulate import SimulatedCache, stale_pairs
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

TOKENS = 150
FORMATS = [
    ("static", "token"),
    ("static, per head", "channels"),
    ("group", "channels"),
    ("token", "token"),
    ("fp8", "fp8"),
    ("static", "identity"),
    ("identity", "token"),
    ("mixed", "norm"),
    ("trellis", "trellis"),
    ("q-norm", "q-norm"),
]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 300, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def in_chunks(model, ids, cache, chunk):
    with torch.no_grad():
        parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split(chunk, dim=1)]
    return torch.cat(parts, dim=1)


def simulated(model, ids, artifact, chunk=None):
    with torch.no_grad():
        return model(ids, cache=SimulatedCache(artifact, model, chunk=chunk), use_cache=True).logits


def check(model, ids, spec, chunk):
    """Real and simulated agree far better with each other than with the unquantised model."""
    artifact = make_artifact(model, spec, ids)
    real = in_chunks(model, ids, CalibratedCache(artifact, model), chunk)
    expected = simulated(model, ids, artifact, chunk)
    with torch.no_grad():
        exact = model(ids).logits
    effect = (real - exact).abs().max()
    assert effect > 1e-3, "nothing was quantised, so nothing was tested"
    torch.testing.assert_close(real, expected, rtol=0, atol=min(1e-3, effect.item() / 20))


@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
@pytest.mark.parametrize(("key", "value"), FORMATS)
def test_stepwise_equals_the_real_cache(model, ids, key, value, chunk):
    check(model, ids, cache_spec(key, value, window=16, sink=4), chunk)


@pytest.mark.parametrize("sink", [0, 1, 4])
@pytest.mark.parametrize("window", [0, 16, 64])
@pytest.mark.parametrize("chunk", [7, 32])
def test_stepwise_equals_the_real_cache_for_any_window_and_sink(model, ids, window, sink, chunk):
    check(model, ids, cache_spec(window=window, sink=sink), chunk)


@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi",
        "gpt_neox",
        "glm",
        "llama-yarn",
        "gpt2",
        "smollm3",
    ],
)
def test_stepwise_equals_the_real_cache_in_other_families(family, ids):
    model = tiny(family)
    exact = {"window": 0, "sink": 0} if family == "mistral" else {"window": 16, "sink": 4}
    check(model, ids, cache_spec(**exact), 32)  # mistral looks back on 16 tokens and no further


def test_a_text_that_begins_beyond_longropes_switch_is_that_of_the_real_cache(ids):
    check(tiny("phi3-longrope"), ids[:, :100], cache_spec(window=4, sink=2), 40)


@pytest.mark.parametrize(
    ("family", "tokens", "chunk"), [("phi3-longrope", 60, 20), ("llama-dynamic", 60, 20), ("llama-dynamic", 60, None)]
)
def test_growing_beyond_the_frequencies_is_refused_as_by_the_real_cache(ids, family, tokens, chunk):
    model, ids = tiny(family), ids[:, :tokens]
    artifact = make_artifact(model, cache_spec(window=4, sink=2), ids[:, :30])
    with pytest.raises(UnsupportedModel, match="changes its rotary frequencies beyond 32 tokens"):
        simulated(model, ids, artifact, chunk)
    with pytest.raises(UnsupportedModel, match="changes its rotary frequencies beyond 32 tokens"):
        in_chunks(model, ids, CalibratedCache(artifact, model), chunk or tokens)


def test_keys_after_rotation_grow_beyond_any_frequencies(ids):
    model, ids = tiny("llama-dynamic"), ids[:, :100]
    artifact = make_artifact(model, cache_spec("group", "token", window=4, sink=2), ids[:, :30])
    assert simulated(model, ids, artifact).isfinite().all()


@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("window", [0, 16])
def test_nothing_quantised_is_exact(model, ids, window, chunk):
    artifact = make_artifact(model, cache_spec("identity", "identity", window=window, sink=1), ids)
    with torch.no_grad():
        assert torch.equal(simulated(model, ids, artifact, chunk), model(ids).logits)


def test_before_the_first_page_is_complete_nothing_is_quantised(model, ids):
    spec = cache_spec(window=16, sink=4)
    ids = ids[:, : 32 + 16 + 4]
    artifact = make_artifact(model, spec, ids)
    with torch.no_grad():
        torch.testing.assert_close(simulated(model, ids, artifact, 4), model(ids).logits)


def test_the_ideal_simulation_tends_to_the_exact_model_as_the_window_grows(model, ids):
    with torch.no_grad():
        exact = model(ids).logits
    errors = [
        (simulated(model, ids, make_artifact(model, cache_spec(window=window), ids)) - exact).abs().mean()
        for window in (0, 64, 128, TOKENS)
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3] == 0


def test_batch_rows_do_not_influence_each_other(model, ids):
    artifact = make_artifact(model, cache_spec("group", "channels", window=8, sink=2), ids)
    pair = torch.cat([ids, ids.flip(1)])
    both = simulated(model, pair, artifact)
    torch.testing.assert_close(both[1:], simulated(model, ids.flip(1), artifact), rtol=0, atol=1e-4)


def test_stale_pairs_of_the_ideal_simulation():
    stale = stale_pairs(6, cache_spec(window=2, sink=1), None)
    assert stale.int().tolist()[4] == [0, 1, 1, 0, 0, 0]
    assert stale_pairs(6, cache_spec(window=0, sink=0), None).tril().sum() == 21


def test_stale_pairs_of_a_chunked_cache():
    stale = stale_pairs(80, cache_spec(window=4, sink=3), 10)
    first = (stale[:, 3]).nonzero()[0].item()
    assert first == 40, "the page of tokens 3..34 leaves the window with token 38, the chunk after begins at 40"
    assert not stale[:, :3].any()
    assert torch.equal(stale[first, 3:35], torch.ones(32, dtype=torch.bool))
    assert not stale[first, 35:].any()
