"""The attention call alone: the same numbers for every contender, and a wrong kernel shows."""

from dataclasses import replace

import pytest
import torch

from kvcalib.artifact.schema import LayerTables, validate
from kvcalib.eval import attention_speed as module
from kvcalib.eval import timing
from kvcalib.eval.attention_speed import Case, attention_speed, full_precision, packed_store, unpacked
from kvcalib.eval.synthetic import Shape, synthetic_layer
from tests.helpers import cache_spec, make_artifact

CASE = Case(Shape(6, 2, 32), 2, 300)


@pytest.fixture(params=["static", "mixed", "feedback", "q-norm"])
def artifact(request, model, windows):
    return make_artifact(model, cache_spec(request.param, "token", window=16, sink=4), windows[:1])


@pytest.fixture
def measure(artifact, monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)  # one call a sample: no test looks at a time

    def run(case=CASE, formats=("quant", "group4", "group2", "post4")):
        return attention_speed(artifact, [case], list(formats), rounds=1, seed=0, ticker=lambda steps: None)

    return run


def test_every_contender_has_a_row(measure):
    rows = measure()
    names = {row["contender"] for row in rows}
    ours = {f"kvcalib:{name}" for name in ("quant", "group4", "group2", "post4")}
    assert names == ours | {"sdpa_float32", "sdpa_bfloat16", "matmul_float32"}
    for row in rows:
        assert (row["shape"], row["batch"], row["tokens"]) == ("6/2/32", 2, 300)
        assert row["ms"] > 0
        assert row["bound_ms"] > 0


def test_packed_attention_is_that_of_the_unpacked_numbers(measure):
    errors = {row["contender"]: row["error"] for row in measure()}
    assert all(error < 1e-4 for name, error in errors.items() if name.startswith("kvcalib"))


def test_a_wrong_kernel_shows_as_an_error(measure, monkeypatch):
    right = module.dispatch.attend
    monkeypatch.setattr(module.dispatch, "attend", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    assert measure(formats=["group4"])[0]["error"] > 5e-3


def test_tables_of_another_shape_are_whole(artifact, generator):
    key = synthetic_layer(artifact, artifact.spec, Shape(6, 3, 32), generator).key_tables
    validate(replace(artifact, layers={0: LayerTables(key, artifact.layers[0].value)}))
    assert (key.edges is not None) == artifact.spec.key.q_norm


def test_bytes_are_those_that_a_step_reads(measure):
    sizes = {row["contender"]: row["bytes"] for row in measure()}
    assert sizes["sdpa_float32"] == 2 * 4 * 2 * 300 * 2 * 32
    assert sizes["sdpa_bfloat16"] == sizes["sdpa_float32"] // 2
    assert sizes["kvcalib:group2"] < sizes["kvcalib:group4"] < sizes["sdpa_float32"]


@pytest.mark.parametrize("tokens", [200, 2000])
def test_a_store_has_as_many_tokens_as_asked_for_in_order(artifact, generator, tokens):
    store = packed_store(artifact, "group4", Case(Shape(6, 2, 32), 2, tokens), generator)
    key, value = unpacked(store)
    assert store.length == tokens
    assert key.shape == value.shape == (2, 2, tokens, 32)
    first = store.layout.read(store.pages[0], "first_position")[:, 0]
    assert first.tolist() == [4 + 32 * page for page in range(store.page_counts[0])]


def test_full_precision_contenders_agree(generator):
    query = torch.randn(2, 6, 1, 32, generator=generator)
    key, value = torch.randn(2, 2, 2, 50, 32, generator=generator)
    outputs = {name: call().float() for name, call in full_precision(query, key, value).items()}
    torch.testing.assert_close(outputs["matmul_float32"], outputs["sdpa_float32"])
    torch.testing.assert_close(outputs["sdpa_bfloat16"], outputs["sdpa_float32"], atol=0.02, rtol=0.02)


def test_what_does_not_fit_into_memory_is_a_row_that_says_so(measure, monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    (row,) = measure()
    assert row["contender"] == "all"
    assert "GiB of memory" in row["missing"]
