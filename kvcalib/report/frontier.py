"""A comparison of formats as frontier.json, frontier.md and frontier.html: table, contrasts, Pareto plots.

A method is on the frontier when no other has as few bits and as small a divergence. Needles count among those that
the unchanged model finds: the others say nothing about a cache. Lines of the plot join the methods
of a family: those whose names are equal but for their numbers.
"""

from __future__ import annotations

import base64
import html
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

from kvcalib.report import plots, tables
from kvcalib.report.build import STYLE

HEADER = ("method", "true bits", "in pages: keys", "values", "perplexity", "rise", "KL", "same top", "needles kept", "")
SPREAD = ("", "runs", "rise", "lowest", "highest", "KL", "lowest", "highest", "keys beyond range", "lowest", "highest")
BEST = "*"
EXPLAINED = "* no other method has as few bits and as small a KL divergence."


def write(facts: dict, out: Path) -> str:
    """facts: {name, model, text, calibration, contrasts, spreads, rows}. Writes three files, returns a text."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "frontier.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (out / "frontier.md").write_text(_markdown(facts), encoding="utf-8")
    (out / "frontier.html").write_text(_html(facts), encoding="utf-8")
    blocks = [f"\n== {facts['name']}: {introduction(facts)}", columns(HEADER, table_rows(facts["rows"]))]
    blocks += [columns(header, rows, title) for title, header, rows in extra_tables(facts)]
    blocks.insert(2, EXPLAINED)
    blocks += [f"{row['method']}: {row['error']}" for row in facts["rows"] if "error" in row]
    return "\n\n".join([*blocks, f"report   {out / 'frontier.html'}"])


def line(row: dict) -> str:
    """One method alone, for the end of its run."""
    return columns(HEADER[:-1], [_cells(row)])


def introduction(facts: dict) -> str:
    measured = _measured(facts["rows"])
    needles = measured[0].get("needle_fp")
    found = f", finds {needles:.0%} of the needles" if needles is not None else ""
    perplexity = sorted({f"{row['ppl_fp']:.2f}" for row in measured}, key=float)
    return (
        f"{facts['model']} on {facts['text']}, calibrated on {facts['calibration']}; "
        f"full precision has perplexity {' or '.join(perplexity)}{found}"
    )


def table_rows(rows: list[dict]) -> list[tuple[str, ...]]:
    """Cells of the main table, in the order given; failed methods have a dash."""
    best = frontier_of(rows)
    return [_cells(row) + (BEST if row["method"] in best else "",) for row in rows]


def frontier_of(rows: list[dict]) -> set[str]:
    """Methods that none with as few bits (to a hundredth) undercuts in KL."""
    found, least = set(), float("inf")
    if len({row["ppl_fp"] for row in _measured(rows)}) > 1:  # other texts are no competition
        return found
    for row in sorted(_measured(rows), key=lambda row: (round(row["bits"], 2), row["kl"])):
        if row["kl"] < least:
            found.add(row["method"])
            least = row["kl"]
    return found


def _measured(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "error" not in row]


def _cells(row: dict) -> tuple[str, ...]:
    if "error" in row:
        return (row["method"], "-", "-", "-", "-", "-", "-", "-", "-")
    bits = [f"{row[key]:.2f}" for key in ("bits", "bits_key", "bits_value")]
    needles = row.get("needle_kept")
    found = "-" if needles is None else f"{needles:.0%}"
    return (
        row["method"],
        *bits,
        f"{row['ppl']:.2f}",
        _rise(row["rise"]),
        f"{row['kl']:.4f}",
        f"{row['top1']:.1%}",
        found,
    )


def _rise(rise: float) -> str:
    return f"{rise:+.1%}".replace("-0.0%", "+0.0%") if rise < 10 else f"x {1 + rise:,.0f}"


def extra_tables(facts: dict) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, header, rows) of contrasts and spreads of which something was measured."""
    by_name = {row["method"]: row for row in _measured(facts["rows"])}
    found = []
    for title, names in facts["contrasts"].items():
        members = [by_name[name] for name in names if name in by_name]
        if len(members) > 1:
            found.append((title + _on_texts(members), HEADER[:-1], list(map(_cells, members))))
    spread = [_spread(title, pattern, by_name) for title, pattern in facts["spreads"].items()]
    if any(spread):
        found.append(("Spread: mean, lowest and highest", SPREAD, [row for row in spread if row]))
    return found


def _on_texts(rows: list[dict]) -> str:
    """A warning where methods are measured on texts of their own, which the perplexity of the model tells."""
    return " (on different texts)" if len({row["ppl_fp"] for row in rows}) > 1 else ""


def _spread(title: str, pattern: str, by_name: dict[str, dict]) -> tuple[str, ...]:
    rows = [row for name, row in by_name.items() if fnmatchcase(name, pattern)]
    if len(rows) < 2:
        return ()
    cells = [title + _on_texts(rows), str(len(rows))]
    for key, form in (("rise", "{:+.2%}"), ("kl", "{:.4f}"), ("outlier_hit_rate_key", "{:.2%}")):
        values = [row[key] for row in rows if key in row]
        cells += (
            [form.format(x) for x in (sum(values) / len(values), min(values), max(values))] if values else ["-"] * 3
        )
    return tuple(cells)


def family(method: str) -> str:
    """The name without its numbers: `kivi4-w128` and `kivi2-w128` are kivi-w."""
    return re.sub(r"[\d.]+", "", method)


def pictures(rows: list[dict]) -> dict[str, bytes]:
    """Title -> PNG: what is lost, against true bits."""
    lines: dict[str, list[dict]] = {}
    for row in _measured(rows):
        lines.setdefault(family(row["method"]), []).append(row)
    wanted = {"Rise in perplexity": ("rise", True), "KL divergence, nats per token": ("kl", True)}
    if any(row.get("needle_kept") is not None for row in _measured(rows)):
        wanted["Needles kept, of those that full precision finds"] = ("needle_kept", False)
    drawn = {}
    for title, (key, logarithmic) in wanted.items():
        points = {name: _points(group, key, logarithmic) for name, group in lines.items()}
        kept = {name: found for name, found in points.items() if found}
        left = [row["method"] for row in _measured(rows) if logarithmic and row[key] <= 0]
        note = f"\nnot above zero, where this scale ends: {', '.join(left)}" if left else ""
        if kept:
            drawn[title] = plots.pareto(kept, title=title + note, unit=title, logarithmic=logarithmic)
    return drawn


def _points(rows: list[dict], key: str, logarithmic: bool) -> list[tuple[float, float]]:
    values = [(row["bits"], row[key]) for row in rows if row.get(key) is not None]
    return sorted((bits, value) for bits, value in values if value > 0 or not logarithmic)


def columns(header: tuple[str, ...], rows: list[tuple[str, ...]], title: str = "") -> str:
    """Plain text in columns."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *text] if title else text)


def _markdown(facts: dict) -> str:
    blocks = [f"# {facts['name']}", introduction(facts), tables.markdown(HEADER, table_rows(facts["rows"]))]
    blocks.append(EXPLAINED.replace("*", "\\*"))
    for title, header, rows in extra_tables(facts):
        blocks += [f"## {title}", tables.markdown(header, rows)]
    failed = [f"- {row['method']}: {row['error']}" for row in facts["rows"] if "error" in row]
    blocks += ["## Not measured", "\n".join(failed)] if failed else []
    words = [(row["method"], f"`{row['words']}`") for row in facts["rows"]]
    return "\n\n".join([*blocks, "## Methods", tables.markdown(("method", "settings"), words)]) + "\n"


def _html(facts: dict) -> str:
    name = html.escape(facts["name"])
    body = [f"<h1>{name}</h1><p>{html.escape(introduction(facts))}</p>", _html_table(HEADER, table_rows(facts["rows"]))]
    body.append(f"<p>{html.escape(EXPLAINED)}</p>")
    for title, png in pictures(facts["rows"]).items():
        source = base64.b64encode(png).decode()
        body.append(f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{source}"></figure>')
    for title, header, rows in extra_tables(facts):
        body.append(f"<h2>{html.escape(title)}</h2>{_html_table(header, rows)}")
    body += [f"<p>{html.escape(row['method'] + ': ' + row['error'])}</p>" for row in facts["rows"] if "error" in row]
    body.append(
        "<h2>Methods</h2>" + _html_table(("method", "settings"), [(r["method"], r["words"]) for r in facts["rows"]])
    )
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    joined = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{joined}\n</body></html>\n'


def _html_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + "\n".join([line(header, "th"), *(line(row, "td") for row in rows)]) + "</table>"
