"""bench.json as tables, sentences and figures: every number of them computed, none from a run."""

import json
import subprocess
import sys

import pytest

from kvcalib.report.speed import (
    attention_table,
    cache_part,
    conditions_line,
    decode_table,
    figures,
    markdown,
    prefill_table,
    sentences,
    text,
)

CONDITIONS = {
    **{"cpu": "A processor", "threads": 2, "cores": 4, "kernel": "AVX2", "torch": "2.13", "torch_cpu": "AVX2"},
    **{"transformers": "5.24", "dtype": "float32", "others_during": 0.0, "disturbed": False},
}


def timed(ms, spread=0.1, **more):
    return {"ms": ms, "ms_q1": ms - spread, "ms_q3": ms + spread, "cpu_ms": ms, "samples": 3} | more


def step(batch, context, contender, ms, spread=0.1):
    row = timed(ms, spread, tokens_per_second=1000 * batch / ms, bytes=2**20 * context / 100, steps=8)
    return {"batch": batch, "context": context, "contender": contender} | row


def attention(contender, ms, bound=0.5):
    case = {"shape": "9/3/64", "batch": 1, "tokens": 4096, "contender": contender}
    return case | timed(ms, 0.01, bytes=2**21, bound_ms=bound, error=None)


@pytest.fixture
def bench():
    return {
        "conditions": dict(CONDITIONS),
        "attention": [
            attention("kvcalib:quant", 1.0),
            attention("kvcalib:group4", 2.0),
            attention("sdpa_float32", 8.0),
            attention("sdpa_bfloat16", 20.0),
            attention("matmul_float32", 4.0),
        ],
        "decode": [
            step(1, 512, "kvcalib", 101.0),
            step(1, 512, "full", 100.0),
            step(1, 512, "full:empty", 95.0),
            {"batch": 1, "context": 512, "contender": "quanto4", "missing": "pip install optimum-quanto"},
            step(1, 4096, "kvcalib", 100.0),
            step(1, 4096, "full", 150.0),
            step(1, 4096, "quanto4", 245.0),
            step(1, 4096, "full:empty", 95.0),
        ],
        "prefill": [
            {"tokens": 512, "contender": "none"} | timed(1000.0, bytes=0, peak_bytes=2**20),
            {"tokens": 512, "contender": "kvcalib"} | timed(1100.0, bytes=2**20, peak_bytes=None, packing_seconds=0.1),
        ],
        "calibration": None,
        "stages": {"collect": {"seconds": 9.5, "peak_memory_bytes": 2**30, "reused": True}},
    }


def test_attention_is_compared_with_each_contender(bench):
    table = attention_table(bench)
    quant, group = table.rows
    assert quant[3] == "of this run"
    assert group[3] == "4 bit, groups, 1% outliers"
    assert quant[-4:] == ("8.0", "4.0", "20.0", "2.0")
    assert group[-4:] == ("4.0", "2.0", "10.0", "4.0")
    assert all(len(row) == len(table.header) for row in table.rows)


def test_a_case_that_was_left_out_says_why(bench):
    bench["attention"] = [{"shape": "9/3/64", "batch": 4, "tokens": 9, "contender": "all", "missing": "needs memory"}]
    bench["decode"] = [{"batch": 4, "context": 9, "contender": "all", "missing": "needs memory"}]
    for table in (attention_table(bench), decode_table(bench)):
        assert "needs memory" in table.rows[0]
        assert len(table.rows[0]) == len(table.header)
    assert list(sentences(bench)) == []


def test_decoding_shows_speed_size_and_the_share_of_the_cache(bench):
    rows = {(row[1], row[2]): row for row in decode_table(bench).rows}
    assert rows["4,096", "kvcalib"][3:] == ("100.0 (99.9-100.1)", "100.0", "10.0", "41.0", "5.0", "1.50")
    assert rows["512", "quanto, 4 bit"][3] == "pip install optimum-quanto"
    assert rows["512", "without a context"][-2:] == ("", "")


def test_what_a_cache_costs_is_counted_from_the_empty_step():
    found = {"full:empty": {"ms": 95.0}, "kvcalib": {"ms": 100.0}, "quanto4": {"missing": "..."}}
    assert cache_part(found, "kvcalib") == 5.0
    assert cache_part(found, "quanto4") is None
    assert cache_part(found, "full:empty") is None
    assert cache_part({"kvcalib": {"ms": 100.0}}, "kvcalib") is None


def test_where_full_precision_is_faster_is_said(bench):
    first, second = sentences(bench)
    assert first == (
        "The full-precision cache is still faster at 512 tokens with 1 row; "
        "kvcalib is faster at 4,096 tokens with 1 row."
    )
    assert second == (
        "At 4,096 tokens with 1 row the cache costs 5.0 ms of a step in kvcalib, "
        "55.0 ms in DynamicCache, float32 (11.0 x), 150.0 ms in quanto, 4 bit (30.0 x)."
    )


def test_an_overlap_of_quartiles_is_left_open(bench):
    bench["decode"] = [step(1, 512, "kvcalib", 99.0, 5.0), step(1, 512, "full", 100.0, 5.0)]
    bench["decode"] += [step(4, 512, "kvcalib", 99.0, 5.0), step(4, 512, "full", 200.0, 5.0)]
    (said,) = sentences(bench)
    assert said.startswith("The full-precision cache is nowhere clearly faster; kvcalib is faster at 512 tokens with 4")
    assert said.endswith("the spread leaves it open at 512 tokens with 1 row.")


def test_a_busy_machine_is_a_warning(bench):
    assert "WARNING" not in conditions_line(bench)
    bench["conditions"] |= {"others_during": 1.5, "disturbed": True}
    assert "WARNING: other programs used 1.5 of 4 cores" in conditions_line(bench)
    bench["conditions"] |= {"others_during": None, "disturbed": False}
    assert "is not known" in conditions_line(bench)


def test_prompts_show_time_memory_and_packing(bench):
    rows = prefill_table(bench).rows
    assert rows[0] == ("512", "without a cache", "1.00 (1.00-1.00)", "1", "0.0", "")
    assert rows[1][3:] == ("", "1.0", "0.10")


def test_terminal_and_readme_show_the_same(bench):
    bench["calibration"] = {"plain": timed(2000.0), "measured": timed(3000.0), "ratio": 1.5, "windows": 2, "length": 64}
    for shown in (text(bench), markdown(bench)):
        for part in ("A processor", "150.0 (149.9-150.1)", "still faster at 512", "1.50", "9.5", "pip install optimum"):
            assert part in shown
    assert max(map(len, text(bench).splitlines())) < 260


def test_figures_are_drawn_for_every_batch(bench):
    assert [png[:4] for png in figures(bench)] == [b"\x89PNG"] * 2
    bench["decode"].append(step(4, 512, "kvcalib", 99.0))
    assert len(list(figures(bench))) == 4
    bench["decode"] = []
    assert list(figures(bench)) == []


def test_a_bench_file_becomes_markdown_on_the_command_line(bench, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    command = [sys.executable, "-m", "kvcalib.report.speed", str(tmp_path / "bench.json")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == markdown(bench)
    assert "| --- |" in shown
