"""The page of a run: built from JSON alone, self-contained, safe with any text."""

import json
import re
import subprocess
import sys

import pytest

from kvcalib.errors import MissingInput
from kvcalib.report import plots
from kvcalib.report.build import build, distortions, figures, read_run, widths

RECORD = {
    "settings": {"quant": {"key": {"bits": 3}}},
    "finished": "2026-01-01T00:00:00",
    "seconds": 1.5,
    "peak_memory_bytes": 2**20,
    "versions": {"kvcalib": "0.1.0"},
    "summary": {},
}
FIT = {"stored": 1.0, "exact": 0.9, "uniform": 3.0, "nf": 2.0, "kmeans": 0.95}
METRICS = {
    "ppl_fp": 10.0,
    "ppl_cache": 10.5,
    "bytes_per_token": 100.0,
    "bytes_per_token_fp16": 400.0,
    "needle": [
        {"length": 256, "depth": 0.5, "fp": 1.0, "cache": 0.5},
        {"length": 512, "depth": 0.1, "fp": 1.0, "cache": 1.0},
    ],
    "sample": {"prompt": "<script>alert(1)</script>", "fp": "a", "cache": "b"},
}


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "tiny-nuq3"
    layers = {"0": {"key": FIT, "value": FIT}, "1": {"key": FIT, "value": FIT}}
    write(run / "codebooks", {**RECORD, "summary": {"fitted": ["key", "value"], "layers": layers}})
    write(run / "collect", {**RECORD, "reused_from": "../tiny-nuq2/collect"})
    write(run / "evaluate", {**RECORD, "finished": "2026-01-02T00:00:00"})
    (run / "evaluate" / "metrics.json").write_text(json.dumps(METRICS))
    return run


def write(folder, record):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(json.dumps(record))


def test_page_is_self_contained_and_escaped(run_dir):
    summary = build(run_dir)
    page = (run_dir / "report" / "report.html").read_text()
    assert summary["figures"] == page.count("data:image/png;base64,iVBOR") == 6
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script>" not in page
    assert "10.500" in page
    assert "quant.key.bits" in page
    assert "tiny-nuq2" in page


def test_markdown_and_csv_lie_beside_it(run_dir, tmp_path):
    build(run_dir, tmp_path / "elsewhere")
    assert "| perplexity, quantised cache | 10.500 |" in (tmp_path / "elsewhere" / "report.md").read_text()
    assert "ppl_cache,10.5" in (tmp_path / "elsewhere" / "metrics.csv").read_text()


BENCH = {
    "conditions": {
        **{"cpu": "A processor", "threads": 2, "cores": 4, "kernel": "AVX2", "torch": "2.13", "torch_cpu": "AVX2"},
        **{"transformers": "5.24", "dtype": "float32", "others_during": 0.0, "disturbed": False},
    },
    "decode": [
        {
            **{"batch": 1, "context": context, "contender": "kvcalib", "tokens_per_second": 42.0, "bytes": 2**20},
            **{"ms": 24.0, "ms_q1": 23.0, "ms_q3": 25.0, "cpu_ms": 30.0},
        }
        for context in (512, 2048)
    ],
    **{"attention": [], "prefill": [], "calibration": None, "stages": {}},
}


def test_speed_is_shown_where_it_was_measured(run_dir):
    before = build(run_dir)["figures"]
    (run_dir / "bench").mkdir()
    (run_dir / "bench" / "bench.json").write_text(json.dumps(BENCH))
    assert build(run_dir)["figures"] == before + 2
    page = (run_dir / "report" / "report.md").read_text()
    assert "| 1 | 2,048 | kvcalib | 24.0 (23.0-25.0) | 30.0 | 42.0 |" in page
    assert "A processor, 2 of 4 cores" in page


def test_timings_of_another_format_are_marked(run_dir):
    for stage, print_ in (("evaluate", "new"), ("bench", "old")):
        (run_dir / stage).mkdir(exist_ok=True)
        path = run_dir / stage / "stage.json"
        record = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(record | {"inputs": {"export": {"fingerprint": print_}}}))
    (run_dir / "bench" / "bench.json").write_text(json.dumps(BENCH))
    build(run_dir)
    assert "OUT OF DATE" in (run_dir / "report" / "report.html").read_text()
    record = json.loads((run_dir / "evaluate" / "stage.json").read_text())
    (run_dir / "bench" / "stage.json").write_text(json.dumps({"inputs": record["inputs"]}))
    build(run_dir)
    assert "OUT OF DATE" not in (run_dir / "report" / "report.html").read_text()


@pytest.mark.parametrize("text", ["{", "{}", '{"decode": {"tokens_per_s": 42}}'])
def test_a_damaged_bench_is_left_out(run_dir, text):
    (run_dir / "bench").mkdir()
    (run_dir / "bench" / "bench.json").write_text(text)
    assert build(run_dir)["figures"] == 6


def test_sparse_metrics_make_a_shorter_page(run_dir):
    (run_dir / "evaluate" / "metrics.json").write_text(json.dumps({"ppl_fp": 10.0}))
    (run_dir / "codebooks" / "stage.json").write_text(json.dumps(RECORD))
    assert build(run_dir)["figures"] == 1


def test_mixed_widths_are_drawn_instead_of_distortions(run_dir):
    layers = {str(i): {"key": {"mean_width": 2.0 + i}, "value": {"mean_width": 3.0}} for i in range(2)}
    write(run_dir / "codebooks", {**RECORD, "summary": {"fitted": ["key", "value"], "layers": layers}})
    run = read_run(run_dir)
    assert distortions(run) == {}
    assert widths(run) == {"keys": [2.0, 3.0], "values": [3.0, 3.0]}
    assert any("Mean bits of a code" in (figure.caption or "") for figure in figures(run))


def test_distortions_are_grouped_by_side_and_kind(run_dir):
    series = distortions(read_run(run_dir))
    assert series["key"]["uniform"] == [3.0, 3.0]


def test_figures_are_explained(run_dir):
    record = {**RECORD, "settings": {"quant": {"window": 128, "sink": 4}}}
    write(run_dir / "export", record)
    (run_dir / "evaluate" / "metrics.json").write_text(json.dumps({**METRICS, "window": 1024}))
    build(run_dir)
    page = (run_dir / "report" / "report.html").read_text()
    assert "exact is the optimum by dynamic programming" in page
    assert "At 1,024 tokens, of which the last 128 and the first 4 stay exact" in page


@pytest.mark.parametrize(
    ("value", "text"), [(23040.0, "23,040"), (263.686, "263.7"), (0.04123, "0.04123"), (1e-5, "0.000010"), (0, "0")]
)
def test_numbers_on_bars_are_readable(value, text):
    assert plots.readable(value) == text


def test_a_kind_of_levels_that_was_not_fitted_is_left_out(run_dir):
    found = read_run(run_dir)
    del found.records["codebooks"]["summary"]["layers"]["1"]["key"]["exact"]
    assert set(distortions(found)["key"]) == {"stored", "uniform", "nf"}
    assert "exact" in distortions(found)["value"]


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_damaged_records_are_left_out_and_damaged_metrics_are_a_sentence(run_dir, text):
    (run_dir / "collect" / "stage.json").write_text(text)
    assert "collect" not in read_run(run_dir).records
    (run_dir / "evaluate" / "metrics.json").write_text(text)
    with pytest.raises(MissingInput, match=r"metrics.json is missing or damaged: .* stage=evaluate"):
        build(run_dir)


def test_nothing_evaluated_yet_is_a_sentence(tmp_path):
    with pytest.raises(MissingInput, match="stage=evaluate"):
        build(tmp_path)


def test_a_report_needs_no_torch(run_dir):
    code = (
        "import sys; from pathlib import Path; from kvcalib.report.build import build\n"
        f"build(Path({str(run_dir)!r}))\n"
        "assert not {'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
