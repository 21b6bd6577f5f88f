"""Numbers as text: only what was measured is shown, at the documented precision."""

import csv

from kvcalib.report import tables

METRICS = {
    "ppl_fp": 12.3456,
    "ppl_cache": 12.5,
    "kl_cache": 0.01234,
    "top1_agreement": 0.9876,
    "bytes_per_token": 4321.0,
    "needle_fp": 1.0,
    "needle_cache": 0.5,
    "tokens": 4096,
    "sample": {"prompt": "Once", "fp": "upon a\ntime", "cache": "there was"},
}
STAGES = {"export": ("/r/export", "0.1 s"), "report": ("/r/report", "up to date")}


def test_missing_metrics_give_no_row():
    labels = [label for label, _ in tables.metric_rows({"ppl_fp": 1.0, "needle_fp": None})]
    assert labels == ["perplexity, full precision"]


def test_overview_shows_numbers_sample_paths_and_times():
    text = tables.overview(METRICS, STAGES)
    assert "12.346" in text
    assert "98.8%" in text
    assert "4,321" in text
    assert "upon a time" in text
    assert "/r/export/kvcalib.safetensors" in text
    assert "/r/report/report.html" in text
    assert "export 0.1 s, report up to date" in text


def test_overview_says_why_true_bits_are_more_than_those_of_pages():
    bits = {"page_bits_key": 3.3366, "page_bits_value": 3.512, "bits_per_element_key": 6.2, "window": 1024}
    lines = tables.overview(METRICS | bits, STAGES, exact="the last 128 tokens are exact in float32").splitlines()
    (pages,) = [line for line in lines if line.startswith("bits per element in pages")]
    (true,) = [number for number, line in enumerate(lines) if line.startswith("true bits per element")]
    assert pages.endswith("   key 3.34, value 3.51")
    assert lines[true].endswith("   key 6.20")
    assert lines[true + 1].strip() == "at 1024 tokens; the last 128 tokens are exact in float32"


def test_overview_does_not_call_a_larger_cache_smaller():
    sizes = {"compression": 0.5, "compression_pages": 5.0, "window": 256}
    assert "0.5 times larger" not in (text := tables.overview(sizes, STAGES))
    assert "2.00 times larger at 256 tokens; pages alone 5.00 times smaller" in text
    assert "2.94 times smaller at 256 tokens;" in tables.overview(sizes | {"compression": 2.94}, STAGES)
    assert "against fp16" not in tables.overview({"window": 256}, STAGES)


def test_a_comparison_has_a_line_per_run_and_gaps():
    text = tables.comparison([("a", {"ppl_cache": 10.0}), ("long-name", {"kl_cache": 0.5})])
    assert text.splitlines() == [
        "run        ppl_cache  kl_cache",
        "a          10.000",
        "long-name             0.5",
    ]


def test_overview_of_a_single_stage_is_short():
    text = tables.overview({}, {"collect": ("/r/collect", "1.0 s")})
    assert text == "stages   collect 1.0 s"


def test_markdown_escapes_what_would_break_the_table():
    text = tables.markdown(("key", "value"), [("a|b", "two\nlines")])
    assert text.splitlines() == ["| key | value |", "| --- | --- |", "| a\\|b | two lines |"]


def test_csv_keeps_full_precision():
    rows = dict(csv.reader(tables.csv_text(METRICS).splitlines()))
    assert rows["ppl_fp"] == "12.3456"
    assert "sample" not in rows
