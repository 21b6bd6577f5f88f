import json

import pytest

from kvcalib.report import frontier


def row(method, bits, kl, *, rise=0.05, needles=1.0, **other):
    both = {"bits_key": bits, "bits_value": bits}
    measured = {"ppl_fp": 20.0, "ppl": 20 * (1 + rise), "rise": rise, "kl": kl, "top1": 0.9}
    return {"method": method, "words": f"quant={method}", "bits": bits, **both, **measured} | {
        "needle_fp": 1.0,
        "needle_kept": needles,
        **other,
    }


@pytest.fixture
def facts():
    rows = [
        row("nuq4", 4.4, 0.01),
        row("nuq2", 2.4, 0.3, needles=0.5),
        row("int4", 4.4, 0.2),
        row("int2", 2.2, 9.0, rise=900.0, needles=0.0),
        {"method": "hqq4", "words": "peer=hqq4", "error": "hqq is not there: `pip install hqq`"},
    ]
    return {
        "name": "tiny-frontier",
        "model": "tiny",
        "text": "pydoc, 4 x 256 tokens",
        "calibration": "pydoc, 8 x 256 tokens",
        "contrasts": {"Keys": ["int4", "nuq4", "nothing"], "Alone": ["nuq4", "nothing"]},
        "spreads": {"nuq": "nuq*", "none": "x*"},
        "rows": rows,
    }


def test_best_are_those_that_nothing_smaller_undercuts(facts):
    assert frontier.frontier_of(facts["rows"]) == {"nuq4", "nuq2", "int2"}


def test_methods_on_other_texts_do_not_compete(facts):
    facts["rows"] = [row("a", 3, 0.1), row("b", 4, 0.2, ppl_fp=9.0)]
    assert frontier.frontier_of(facts["rows"]) == set()
    assert "full precision has perplexity 9.00 or 20.00" in frontier.introduction(facts)
    facts |= {"contrasts": {"Both": ["a", "b"]}, "spreads": {"both": "*"}}
    (contrast, *_), (_, _, [spread]) = frontier.extra_tables(facts)
    assert contrast == "Both (on different texts)"
    assert spread[0] == "both (on different texts)"


def test_what_is_printed(facts, tmp_path):
    text = frontier.write(facts, tmp_path)
    lines = text.splitlines()
    assert "full precision has perplexity 20.00, finds 100% of the needles" in text
    nuq2 = next(line for line in lines if line.startswith("nuq2")).split()
    assert nuq2 == ["nuq2", "2.40", "2.40", "2.40", "21.00", "+5.0%", "0.3000", "90.0%", "50%", "*"]
    assert "x 901" in next(line for line in lines if line.startswith("int2"))
    assert "hqq4: hqq is not there: `pip install hqq`" in lines
    assert lines[lines.index("Keys") + 2].startswith("int4")
    assert lines[lines.index("Keys") + 3].startswith("nuq4")
    assert "Alone" not in lines, "nothing to compare with"
    assert str(tmp_path / "frontier.html") in lines[-1]


def test_one_method_alone_is_a_line(facts):
    header, cells = frontier.line(facts["rows"][0]).splitlines()
    assert header.split()[:3] == ["method", "true", "bits"]
    assert cells.split()[0] == facts["rows"][0]["method"]


def test_spread_is_over_the_methods_of_a_pattern(facts):
    (_, _, rows) = next(table for table in frontier.extra_tables(facts) if table[0].startswith("Spread"))
    assert rows == [("nuq", "2", "+5.00%", "+5.00%", "+5.00%", "0.1550", "0.0100", "0.3000", "-", "-", "-")]


def test_the_three_files(facts, tmp_path):
    frontier.write(facts, tmp_path)
    assert json.loads((tmp_path / "frontier.json").read_text()) == facts
    markdown = (tmp_path / "frontier.md").read_text()
    assert "| nuq4 | 4.40 |" in markdown
    assert "| hqq4 | - |" in markdown
    assert "`quant=nuq2`" in markdown
    page = (tmp_path / "frontier.html").read_text()
    assert page.count("<img") == 3
    assert "KL divergence" in page
    assert "pip install hqq" in page


def test_lines_join_a_family():
    assert frontier.family("kivi4-w128") == frontier.family("kivi2-w128") != frontier.family("kivi4")
    assert frontier.family("mixed4.3") == frontier.family("mixed3")


def test_a_fall_in_perplexity_is_left_out_where_the_axis_is_logarithmic(facts):
    facts["rows"] = [row("nuq4", 4.4, 0.01, rise=-0.01)]
    assert "Rise in perplexity" not in frontier.pictures(facts["rows"])
    assert "KL divergence, nats per token" in frontier.pictures(facts["rows"])


def test_what_a_logarithmic_axis_cannot_show_is_named(facts, monkeypatch):
    titles = []
    monkeypatch.setattr(frontier.plots, "pareto", lambda _, title, **__: titles.append(title))
    facts["rows"] = [row("nuq4", 4.4, 0.01, rise=-0.01), row("nuq3", 3.4, 0.05), row("identity", 16, 0.0, rise=0.0)]
    frontier.pictures(facts["rows"])
    assert titles[0] == "Rise in perplexity\nnot above zero, where this scale ends: nuq4, identity"
    assert titles[1] == "KL divergence, nats per token\nnot above zero, where this scale ends: identity"


def test_a_rise_of_nothing_has_no_minus(facts):
    facts["rows"] = [row("nuq4", 4.4, 0.01, rise=-0.0002)]
    assert frontier.table_rows(facts["rows"])[0][5] == "+0.0%"
