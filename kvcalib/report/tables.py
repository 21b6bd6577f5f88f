"""Numbers as text: the overview that ends a run, Markdown tables, and a CSV file.

`METRICS` says how each entry of `metrics.json` is called and printed. An entry that is not there
gives no row, so that an evaluation without needles, say, makes a shorter table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

METRICS = (
    ("ppl_fp", "perplexity, full precision", "{:.3f}"),
    ("ppl_simulated", "perplexity, simulated", "{:.3f}"),
    ("ppl_cache", "perplexity, quantised cache", "{:.3f}"),
    ("kl_cache", "KL from full precision, nats/token", "{:.3g}"),
    ("top1_agreement", "same most likely token", "{:.1%}"),
    ("bits_per_element_key", "true bits per key element", "{:.3f}"),
    ("bits_per_element_value", "true bits per value element", "{:.3f}"),
    ("page_bits_key", "bits per key element within a page", "{:.3f}"),
    ("page_bits_value", "bits per value element within a page", "{:.3f}"),
    ("bytes_per_token", "cache bytes per token", "{:,.0f}"),
    ("bytes_per_token_fp16", "cache bytes per token, fp16", "{:,.0f}"),
    ("compression", "times smaller than fp16, exact tokens included", "{:.2f}"),
    ("compression_pages", "times smaller than fp16, pages alone", "{:.2f}"),
    ("outlier_rate_key", "outliers among keys", "{:.2%}"),
    ("outlier_rate_value", "outliers among values", "{:.2%}"),
    ("needle_fp", "needle found, full precision", "{:.0%}"),
    ("needle_cache", "needle found, quantised cache", "{:.0%}"),
    ("tokens", "tokens measured", "{:,.0f}"),
    ("window", "tokens per window", "{:,.0f}"),
)
PREDICTIONS = ("ppl_fp", "ppl_simulated", "ppl_cache", "kl_cache", "top1_agreement")
SIZES = ("bytes_per_token", "bytes_per_token_fp16")
NEEDLES = ("needle_fp", "needle_cache")
COMPARED = ("ppl_fp", "ppl_cache", "kl_cache", "page_bits_key", "page_bits_value", "compression", "needle_cache")
"""Columns of the table that ends a sweep."""
SHIPPED = {
    "export": ("artifact", "kvcalib.safetensors"),
    "bench": ("timings", "bench.json"),
    "report": ("report", "report.html"),
}


def metric_rows(metrics: dict, keys: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """(what, value) of every metric that is there, in the order of `METRICS`."""
    wanted = {key for key, *_ in METRICS} if keys is None else set(keys)
    return [
        (label, form.format(metrics[key]))
        for key, label, form in METRICS
        if key in wanted and metrics.get(key) is not None
    ]


def overview(metrics: dict, stages: dict[str, tuple[str, str]], exact: str = "") -> str:
    """What a run prints at its end.

    stages: name -> (folder of the outputs, time or reason). exact: which tokens are not quantised, in words.
    """
    rows = [*metric_rows(metrics, PREDICTIONS), *bit_rows(metrics, exact), *metric_rows(metrics, SIZES)]
    rows += [*ratio_rows(metrics), *metric_rows(metrics, NEEDLES)]
    blocks = [aligned(rows), sample_text(metrics.get("sample"))]
    shipped = [(SHIPPED[s][0], f"{stages[s][0]}/{SHIPPED[s][1]}") for s in SHIPPED if s in stages]
    blocks.append(aligned(shipped))
    blocks.append("stages   " + ", ".join(f"{name} {how}" for name, (_, how) in stages.items()))
    return "\n\n".join(block for block in blocks if block)


def bit_rows(metrics: dict, exact: str) -> list[tuple[str, str]]:
    """Bits within pages, true bits of all that is stored, and why these are more in a short context."""
    stems = {"page_bits": "bits per element in pages", "bits_per_element": "true bits per element"}
    rows = [(label, _sides(metrics, stem)) for stem, label in stems.items()]
    if exact and metrics.get("window") and rows[-1][1]:
        rows.append(("", f"at {metrics['window']} tokens; {exact}"))
    return [row for row in rows if row[1]]


def ratio_rows(metrics: dict) -> list[tuple[str, str]]:
    """How much smaller the whole cache of a window is, and what that tends to in a longer context."""
    here, pages, window = (metrics.get(key) for key in ("compression", "compression_pages", "window"))
    if here is None:
        return []
    said = f"{_times(here)} at {window} tokens" if window else _times(here)
    return [("against fp16", f"{said}; pages alone {_times(pages)}" if pages else said)]


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"


def _sides(metrics: dict, stem: str) -> str:
    found = {side: metrics.get(f"{stem}_{side}") for side in ("key", "value")}
    return ", ".join(f"{side} {bits:.2f}" for side, bits in found.items() if bits is not None)


def comparison(runs: list[tuple[str, dict]]) -> str:
    """One line per run of a sweep: (name, metrics) -> the numbers that decide between formats."""
    measured = [key for key in COMPARED if any(metrics.get(key) is not None for _, metrics in runs)]
    lines = [("run", *measured), *((name, *(_cell(metrics, key) for key in measured)) for name, metrics in runs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(measured) + 1)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(metrics: dict, key: str) -> str:
    form = next(form for name, _, form in METRICS if name == key)
    return "" if metrics.get(key) is None else form.format(metrics[key])


def sample_text(sample: dict | None) -> str:
    """The continuation of one prompt by the quantised cache and by full precision."""
    if not sample:
        return ""
    rows = [("prompt", sample["prompt"][-160:]), ("full", sample["fp"]), ("cache", sample["cache"])]
    return aligned([(name, " ".join(text.split())) for name, text in rows])


def aligned(rows: list[tuple[str, str]]) -> str:
    """Two columns of plain text."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def markdown(header: tuple[str, ...], rows: Iterable[tuple]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [header, ("---",) * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def csv_text(metrics: dict) -> str:
    """The plain entries of metrics.json, one `key,value` a line, at full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("metric", "value"))
    writer.writerows((key, metrics[key]) for key, *_ in METRICS if metrics.get(key) is not None)
    return out.getvalue()
