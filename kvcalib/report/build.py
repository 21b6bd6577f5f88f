"""A run folder's JSON files as one page to read: report.html, report.md, metrics.csv.

The page is self-contained (figures inside it as PNG), so the one file can be passed on. Only JSON
is read, so a report can be made again on a machine that has neither the model nor torch.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcalib.errors import MissingInput
from kvcalib.report import plots, tables

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; overflow-wrap: anywhere; }
img { max-width: 100%; } pre { white-space: pre-wrap; background: #f6f6f6; padding: .8rem; }
"""


FITS = ("stored", "exact", "uniform", "nf")
"""Kinds of levels compared in the distortion figures."""


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple]


class Run(NamedTuple):
    """What a run folder says: records by stage, and the measured numbers."""

    name: str
    records: dict[str, dict]
    metrics: dict
    bench: dict


def build(run_dir: Path, out: Path | None = None) -> dict:
    """Write the report of a run (by default into `<run_dir>/report`); returns a short summary.

    Raises MissingInput where nothing has been evaluated yet.
    """
    run_dir = Path(run_dir)
    out = run_dir / "report" if out is None else Path(out)
    out.mkdir(parents=True, exist_ok=True)
    found = read_run(run_dir)
    pictures = list(figures(found))
    (out / "report.html").write_text(_html(found, pictures), encoding="utf-8")
    (out / "report.md").write_text(_markdown(found), encoding="utf-8")
    (out / "metrics.csv").write_text(tables.csv_text(found.metrics), encoding="utf-8")
    return {"figures": len(pictures), "metrics": len(tables.metric_rows(found.metrics))}


def read_run(run_dir: Path) -> Run:
    """Everything the report shows, from the JSON files of the run folder."""
    records = {path.parent.name: _json(path) for path in run_dir.glob("*/stage.json")}
    metrics = run_dir / "evaluate" / "metrics.json"
    if not metrics.is_file():
        raise MissingInput(f"{metrics} is not there: run `kvcalib stage=evaluate` first")
    bench = run_dir / "bench" / "bench.json"
    ordered = dict(sorted(records.items(), key=lambda item: item[1]["finished"]))
    return Run(run_dir.name, ordered, _json(metrics), _json(bench) if bench.is_file() else {})


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def page_tables(run: Run) -> Iterator[Table]:
    """The tables of the page, in order."""
    yield Table("Measured", ("what", "value"), tables.metric_rows(run.metrics))
    if run.bench:
        yield Table("Speed", ("what", "value"), list(_flat(run.bench)))
    stages = [
        (name, f"{r['seconds']:.1f}", f"{r['peak_memory_bytes'] / 2**20:,.0f}", _origin(r))
        for name, r in run.records.items()
    ]
    yield Table("Stages", ("stage", "seconds", "peak MiB", "from"), stages)
    kept = {key: value for r in run.records.values() for key, value in _flat(r["settings"])}
    yield Table("Settings", ("key", "value"), sorted(kept.items()))
    versions = list(run.records.values())[-1]["versions"] if run.records else {}
    yield Table("Versions", ("package", "version"), list(versions.items()))


def _origin(record: dict) -> str:
    return os.path.basename(os.path.dirname(record.get("reused_from", ""))) or "this run"


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def figures(run: Run) -> Iterator[bytes]:
    """A PNG of everything that the run has numbers for."""
    m = run.metrics
    names = {"ppl_fp": "full precision", "ppl_simulated": "simulated", "ppl_cache": "cache"}
    if shown := {label: m[key] for key, label in names.items() if m.get(key) is not None}:
        yield plots.bars(shown, title="Perplexity on held-out text", unit="perplexity")
    sizes = {"fp16": m.get("bytes_per_token_fp16"), "quantised": m.get("bytes_per_token")}
    if None not in sizes.values():
        yield plots.bars(sizes, title="Cache, everything stored", unit="bytes per token")
    for side, series in distortions(run).items():
        yield plots.per_layer(series, title=f"Distortion of {side}s", unit="weighted error")
    if series := m.get("layers"):
        yield plots.per_layer(series, title="Error by layer", unit="relative error")
    for side, label in (("fp", "full precision"), ("cache", "quantised cache")):
        if m.get("needle"):
            yield plots.needle(m["needle"], title=f"Needles found, {label}", side=side)


def distortions(run: Run) -> dict[str, dict[str, list[float]]]:
    """Side ("key", "value") -> kind of levels -> weighted distortion per layer, where fitted."""
    summary = run.records.get("codebooks", {}).get("summary", {})
    layers = list(summary.get("layers", {}).values())
    return {
        side: {kind: [layer[side][kind] for layer in layers] for kind in FITS} for side in summary.get("fitted", [])
    }


def _markdown(run: Run) -> str:
    blocks = [f"# {run.name}"]
    for title, header, rows in page_tables(run):
        blocks += [f"## {title}", tables.markdown(header, rows)]
    if run.metrics.get("sample"):
        blocks += [
            "## Continuation of one prompt",
            f"```\n{tables.sample_text(run.metrics['sample'])}\n```",
        ]
    return "\n\n".join(blocks) + "\n"


def _html(run: Run, pictures: list[bytes]) -> str:
    name = html.escape(run.name)
    body = [f"<h1>{name}</h1>"]
    measured, *others = page_tables(run)
    body.append(_html_table(measured))
    body += [f'<img alt="figure" src="data:image/png;base64,{_base64(png)}">' for png in pictures]
    if run.metrics.get("sample"):
        text = html.escape(tables.sample_text(run.metrics["sample"]))
        body.append(f"<h2>Continuation of one prompt</h2><pre>{text}</pre>")
    body += [_html_table(table) for table in others]
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    joined = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{joined}\n</body></html>\n'


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _html_table(table: Table) -> str:
    def row(cells: tuple, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    lines = [row(table.header, "th"), *(row(cells, "td") for cells in table.rows)]
    return f"<h2>{table.title}</h2><table>" + "\n".join(lines) + "</table>"
