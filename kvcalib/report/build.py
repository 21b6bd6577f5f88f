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
from kvcalib.report import plots, speed, tables

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figcaption { color: #555; font-size: .9rem; }
img { max-width: 100%; } pre { white-space: pre-wrap; background: #f6f6f6; padding: .8rem; }
"""


OLD_BENCH = (
    "OUT OF DATE: timed with another format or calibration than what this run has now; stage=bench times it again."
)
FITS = {
    "stored": "what the artifact holds: fitted, rounded to bfloat16 and adjusted",
    "exact": "the optimum by dynamic programming",
    "uniform": "evenly spaced",
    "nf": "NormalFloat, the quantiles of a normal distribution",
}
"""Kinds of levels compared in the distortion figures."""


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple]


class Figure(NamedTuple):
    png: bytes
    caption: str = ""


class Run(NamedTuple):
    """What a run folder says: records by stage, and the measured numbers."""

    name: str
    records: dict[str, dict]
    metrics: dict
    bench: dict
    bench_is_old: bool = False


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
    metrics = _json(run_dir / "evaluate" / "metrics.json")
    if not metrics:
        where = run_dir / "evaluate" / "metrics.json"
        raise MissingInput(f"{where} is missing or damaged: run `kvcalib stage=evaluate stage.force=true` first")
    whole = {name: record for name, record in records.items() if "finished" in record}
    ordered = dict(sorted(whole.items(), key=lambda item: item[1]["finished"]))
    bench = _json(run_dir / "bench" / "bench.json")
    of = {name: records.get(name, {}).get("inputs", {}).get("export", {}) for name in ("evaluate", "bench")}
    is_old = of["bench"].get("fingerprint") != of["evaluate"].get("fingerprint")
    return Run(run_dir.name, ordered, metrics, bench if "conditions" in bench else {}, is_old)


def _json(path: Path) -> dict:
    """The content, or nothing where the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def page_tables(run: Run) -> Iterator[Table]:
    """The tables of the page, in order."""
    yield Table("Measured", ("what", "value"), tables.metric_rows(run.metrics))
    if run.bench:
        said = [speed.conditions_line(run.bench), *speed.sentences(run.bench)]
        said = [OLD_BENCH, *said] if run.bench_is_old else said
        yield Table("Speed", ("what was timed where, and what it says",), [(sentence,) for sentence in said])
        yield from (Table(*table) for table in speed.all_tables(run.bench))
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


def figures(run: Run) -> Iterator[Figure]:
    """Everything that the run has numbers for."""
    m = run.metrics
    names = {"ppl_fp": "full precision", "ppl_simulated": "simulated", "ppl_cache": "cache"}
    if shown := {label: m[key] for key, label in names.items() if m.get(key) is not None}:
        yield Figure(plots.bars(shown, title="Perplexity on held-out text", unit="perplexity"))
    sizes = {"fp16": m.get("bytes_per_token_fp16"), "quantised": m.get("bytes_per_token")}
    if None not in sizes.values():
        caption = _size_caption(run)
        yield Figure(plots.bars(sizes, title="Cache, everything stored", unit="bytes per token"), caption)
    for side, series in distortions(run).items():
        caption = "Levels compared on the calibration sample, smaller is better: " + "; ".join(
            f"{kind} is {meaning}" for kind, meaning in FITS.items() if kind in series
        )
        yield Figure(plots.per_layer(series, title=f"Distortion of {side}s", unit="weighted error"), f"{caption}.")
    if series := widths(run):
        caption = "Mean bits of a code, where every rotary pair of keys and every 16 channels of values has its own."
        yield Figure(plots.per_layer(series, title="Bits by layer", unit="bits"), caption)
    yield from map(Figure, speed.figures(run.bench) if run.bench else ())
    for side, label in (("fp", "full precision"), ("cache", "quantised cache")):
        if m.get("needle"):
            yield Figure(plots.needle(m["needle"], title=f"Needles found, {label}", side=side))


def _size_caption(run: Run) -> str:
    """Why a short context is larger per token than its pages."""
    quant = run.records.get("export", {}).get("settings", {}).get("quant", {})
    if not run.metrics.get("window") or not any(quant.get(key) for key in ("window", "sink")):
        return ""
    return (
        f"At {run.metrics['window']:,} tokens, of which the last {quant['window']} and the first {quant['sink']} "
        "stay exact: the share of these falls as the context grows."
    )


def distortions(run: Run) -> dict[str, dict[str, list[float]]]:
    """Side ("key", "value") -> kind of levels -> weighted distortion per layer, where fitted."""
    summary = run.records.get("codebooks", {}).get("summary", {})
    layers = list(summary.get("layers", {}).values())
    series = {
        side: {
            kind: [at[side][kind] for at in layers] for kind in FITS if all(kind in at.get(side, {}) for at in layers)
        }
        for side in summary.get("fitted", [])
    }
    return {side: kinds for side, kinds in series.items() if kinds}


def widths(run: Run) -> dict[str, list[float]]:
    """Side -> mean width per layer, where widths are mixed."""
    layers = list(run.records.get("codebooks", {}).get("summary", {}).get("layers", {}).values())
    found = {f"{side}s": [at.get(side, {}).get("mean_width") for at in layers] for side in ("key", "value")}
    return {side: means for side, means in found.items() if means and None not in means}


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


def _html(run: Run, pictures: list[Figure]) -> str:
    name = html.escape(run.name)
    body = [f"<h1>{name}</h1>"]
    measured, *others = page_tables(run)
    body.append(_html_table(measured))
    body += [_html_figure(picture) for picture in pictures]
    if run.metrics.get("sample"):
        text = html.escape(tables.sample_text(run.metrics["sample"]))
        body.append(f"<h2>Continuation of one prompt</h2><pre>{text}</pre>")
    body += [_html_table(table) for table in others]
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    joined = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{joined}\n</body></html>\n'


def _html_figure(picture: Figure) -> str:
    image = f'<img alt="figure" src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
    caption = f"<figcaption>{html.escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f"<figure>{image}{caption}</figure>"


def _html_table(table: Table) -> str:
    def row(cells: tuple, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    lines = [row(table.header, "th"), *(row(cells, "td") for cells in table.rows)]
    return f"<h2>{table.title}</h2><table>" + "\n".join(lines) + "</table>"
