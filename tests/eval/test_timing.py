"""Alternation, summaries and the progress of steps that take different time; no timing decides anything here."""

import pytest

from kvcalib.eval import timing
from kvcalib.eval.timing import Ticker, alternate, quartiles, read_bandwidth, summary


def test_contenders_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)  # one call a sample
    order = []
    found = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert "".join(order[-6:]) == "ababab"
    assert found["a"]["samples"] == found["b"]["samples"] == 3
    assert found["a"]["calls"] == 1


def test_a_quick_call_is_called_often_for_one_sample():
    calls = []
    found = alternate({"quick": lambda: calls.append(0)}, rounds=2)["quick"]
    assert found["calls"] == timing.MOST_CALLS
    assert len(calls) == 2 * timing.MOST_CALLS + 2  # and two that do not count


def test_every_round_moves_the_bar():
    ticks = []
    alternate({"a": lambda: None}, rounds=4, tick=lambda: ticks.append(0))
    assert len(ticks) == 4


@pytest.mark.parametrize(
    ("samples", "expected"), [([5.0], (5, 5, 5)), ([1.0, 2.0, 3.0], (1.5, 2, 2.5)), ([4, 1, 3, 2, 5], (2, 3, 4))]
)
def test_quartiles_lie_within_the_samples(samples, expected):
    assert quartiles(samples) == expected


def test_a_summary_is_of_the_median():
    found = summary([3.0, 1.0, 100.0], [1.0, 2.0, 3.0])
    assert (found["ms"], found["cpu_ms"], found["samples"]) == (3.0, 2.0, 3)
    assert found["ms_q1"] <= found["ms"] <= found["ms_q3"]


def test_a_bar_moves_by_the_work_done_and_ends_full():
    seen = []

    def progress(items, total, description):
        seen.append((total, description))
        for item in items:
            seen.append(item)
            yield item

    bar = Ticker(progress, 10, "work")
    bar(3)
    assert seen == [(10, "work"), 0, 1, 2]
    bar.close()
    assert seen[-1] == 9
    bar(5)  # more work than foreseen does no harm


def test_bandwidth_is_a_number_of_bytes_per_second():
    assert read_bandwidth(1 << 16, rounds=1) > 1e6
    assert read_bandwidth(0, rounds=1) > 0
