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
    ("compression", "times smaller than fp16", "{:.2f}"),
    ("outlier_rate_key", "outliers among keys", "{:.2%}"),
    ("outlier_rate_value", "outliers among values", "{:.2%}"),
    ("needle_fp", "needle found, full precision", "{:.0%}"),
    ("needle_cache", "needle found, quantised cache", "{:.0%}"),
    ("tokens", "tokens measured", "{:,.0f}"),
    ("window", "tokens per window", "{:,.0f}"),
)
EVERYDAY = tuple(key for key, *_ in METRICS if not key.startswith(("outlier", "page", "tokens", "window")))
SHIPPED = {"export": ("artifact", "kvcalib.safetensors"), "report": ("report", "report.html")}


def metric_rows(metrics: dict, keys: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """(what, value) of every metric that is there, in the order of `METRICS`."""
    wanted = {key for key, *_ in METRICS} if keys is None else set(keys)
    return [
        (label, form.format(metrics[key]))
        for key, label, form in METRICS
        if key in wanted and metrics.get(key) is not None
    ]


def overview(metrics: dict, stages: dict[str, tuple[str, str]]) -> str:
    """What a run prints at its end. stages: name -> (folder of the outputs, time or reason)."""
    blocks = [aligned(metric_rows(metrics, EVERYDAY)), sample_text(metrics.get("sample"))]
    shipped = [(SHIPPED[s][0], f"{stages[s][0]}/{SHIPPED[s][1]}") for s in SHIPPED if s in stages]
    blocks.append(aligned(shipped))
    blocks.append("stages   " + ", ".join(f"{name} {how}" for name, (_, how) in stages.items()))
    return "\n\n".join(block for block in blocks if block)


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
