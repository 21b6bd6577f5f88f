"""bench.json: what is in it, that settings decide it, and what is refused. No assertion is about time."""

import json
from contextlib import nullcontext

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.eval import contenders as peers_module
from kvcalib.eval import decode_speed, prefill_speed, speed, timing
from kvcalib.eval.speed import bench, capped, parse_shapes
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny

SETTINGS = {
    "shapes": ["model", "4/2/16"],
    "formats": ["group4"],
    "lengths": [200],
    "batches": [1, 2],
    "contexts": [64, 128],
    "peers": ["full", "bfloat16", "quanto4"],
    "prefill": [100],
    "steps": 4,
    "rounds": 2,
    "longest": 512,
    "calibration": None,
    "stages": {"collect": {"seconds": 1.0, "peak_memory_bytes": 5, "reused": False}},
    "seed": 0,
}


@pytest.fixture
def run(model, windows, progress, monkeypatch):
    monkeypatch.setattr(speed, "others_now", lambda: 0.0)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)  # one call a sample: no test looks at a time
    artifact = make_artifact(model, cache_spec(window=16, sink=4), windows[:1])

    def call(model=model, **settings):
        return bench(model, artifact, windows.flatten(), progress=progress, **(SETTINGS | settings))

    return call


def cases(rows, *keys):
    return {tuple(row[key] for key in keys) for row in rows}


@pytest.fixture
def without_peers(monkeypatch):
    monkeypatch.setattr(peers_module, "find_spec", lambda name: None)


def test_every_case_and_contender_is_there(run, without_peers):
    found = run()
    json.dumps(found, allow_nan=False)
    names = {"kvcalib", "full", "bfloat16", "quanto4", "full:empty", "bfloat16:empty"}
    expected = {(batch, context, name) for batch in (1, 2) for context in (64, 128) for name in names}
    assert cases(found["decode"], "batch", "context", "contender") == expected
    assert cases(found["prefill"], "tokens", "contender") == {(100, n) for n in ("none", "kvcalib", "full", "quanto4")}
    assert cases(found["attention"], "shape", "batch") == {(s, b) for s in ("4/2/16",) for b in (1, 2)}
    assert found["stages"] == SETTINGS["stages"]


def test_a_missing_package_is_a_row_with_what_to_install(run, without_peers):
    row = next(row for row in run()["decode"] if row["contender"] == "quanto4")
    assert row["missing"] == "pip install optimum-quanto"
    assert "ms" not in row


def test_rows_hold_what_a_reader_needs(run, without_peers):
    found = run(batches=[2], contexts=[128])
    ours = next(row for row in found["decode"] if row["contender"] == "kvcalib")
    assert ours.keys() >= {"ms", "ms_q1", "ms_q3", "cpu_ms", "tokens_per_second", "bytes", "steps"}
    assert (ours["steps"], ours["samples"]) == (4, 2)
    assert ours["tokens_per_second"] == pytest.approx(2000 / ours["ms"])
    prompt = next(row for row in found["prefill"] if row["contender"] == "kvcalib")
    assert prompt["packing_seconds"] > 0
    assert prompt["bytes"] > 0


def test_conditions_say_where_and_how(run):
    found = run(contexts=[], prefill=[])["conditions"]
    assert found["threads"] == torch.get_num_threads()
    assert found["kernel"]
    assert found.keys() >= {"cpu", "cores", "torch", "torch_cpu", "load_average", "others_before", "others_during"}


def test_a_busy_machine_is_said_at_once(run, monkeypatch, caplog):
    monkeypatch.setattr(speed, "others_now", lambda: 1.4)
    with caplog.at_level("WARNING"):
        run(contexts=[], prefill=[])
    assert "other programs are using 1.4 of" in caplog.text


def test_contexts_are_no_longer_than_the_model_takes(run, without_peers):
    found = run(contexts=[64, 128, 4096, 8192], prefill=[9999], longest=128, batches=[1])
    assert {row["context"] for row in found["decode"]} == {64, 128}
    assert {row["tokens"] for row in found["prefill"]} == {128}
    assert capped([8, 4, 9], 8) == [4, 8]


def test_the_context_that_a_row_names_is_reached_and_not_passed(run, monkeypatch, without_peers):
    lengths, made = [], decode_speed.Decoding.__init__

    def watched(self, contender, cache, ids):
        made(self, contender, cache, ids)
        lengths.append((contender.name, self))

    monkeypatch.setattr(decode_speed.Decoding, "__init__", watched)
    run(contexts=[128], batches=[1], prefill=[], peers=["full"])
    held = [decoding.cache.get_seq_length() for name, decoding in lengths if decoding.cache.get_seq_length() > 50]
    assert len(held) == 2
    assert all(128 - decode_speed.MULTIPLE < length <= 128 for length in held)


def test_settings_that_leave_no_context_are_refused_before_anything_runs(run, progress):
    with pytest.raises(ConfigError, match=r"bench.contexts=64 is too short for bench.rounds=20 .*: use \d+ or more"):
        run(rounds=20)
    assert progress.calls == []
    shortest = decode_speed.shortest_context(4, 3)
    run(rounds=3, contexts=[shortest], batches=[1], prefill=[])


def test_models_with_other_states_are_timed_in_attention_alone(run, progress):
    model = tiny("qwen3_next")
    with pytest.raises(ConfigError, match="keep a state"):
        run(model=model)
    assert progress.calls == []
    assert run(model=model, contexts=[], prefill=[])["attention"]


def test_too_little_memory_is_a_row_that_says_so(run, monkeypatch):
    monkeypatch.setattr(decode_speed, "available_memory", lambda: 1000)
    found = run(prefill=[])
    assert all("GiB" in row["missing"] for row in found["decode"])


def test_calibration_is_compared_with_plain_passes(run, windows, model):
    calls = []
    found = run(calibration=(windows, lambda: calls.append(0)), contexts=[], prefill=[])["calibration"]
    assert calls
    assert (found["windows"], found["length"]) == (2, 160)
    assert found["ratio"] == pytest.approx(found["measured"]["ms"] / found["plain"]["ms"])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(run, without_peers, monkeypatch, fails):
    model = tiny("llama", vocab_size=259, max_position_embeddings=512).train()
    if fails:
        monkeypatch.setattr(decode_speed.Decoding, "block", lambda self, steps: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        run(model=model, batches=[1])
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_shapes_are_read_and_not_repeated(model):
    assert [shape.name for shape in parse_shapes(model, ["model", "4/2/16", "32/8/128"])] == ["4/2/16", "32/8/128"]


def test_memory_of_a_pass_is_counted_by_the_kernel():
    before = prefill_speed.reset_peak()
    if before is None:
        pytest.skip("no /proc/self/clear_refs")
    block = torch.ones(25_000_000)
    assert prefill_speed.peak() - before >= 4 * block.numel() * 0.9
    del block
