"""bench.json for reading: tables, sentences computed from them, figures.

    python -m kvcalib.report.speed runs/NAME/bench/bench.json      the same tables in Markdown

Ratios are of medians; a sentence that compares two contenders says so only where their quartiles do not overlap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcalib.report import plots, tables

LABELS = {
    "kvcalib": "kvcalib",
    "full": "DynamicCache",
    "bfloat16": "DynamicCache, all in bfloat16",
    "quanto4": "quanto, 4 bit",
    "quanto2": "quanto, 2 bit",
    "hqq4": "hqq, 4 bit",
    "hqq2": "hqq, 2 bit",
    "full:empty": "without a context",
    "bfloat16:empty": "without a context, in bfloat16",
    "none": "without a cache",
    "sdpa_float32": "SDPA, float32",
    "sdpa_bfloat16": "SDPA, bfloat16",
    "matmul_float32": "matrix products, float32",
}
FORMATS = {
    "group4": "4 bit, groups, 1% outliers",
    "group2": "2 bit, groups, 1% outliers",
    "post4": "4 bit, after RoPE, plain",
}
"""What `bench.formats` names; "quant" is the run's own."""
MIB = 2**20


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple]


def text(bench: dict) -> str:
    """What a terminal shows."""
    blocks = [conditions_line(bench)]
    for table in all_tables(bench):
        blocks.append(f"{table.title}\n{columns([table.header, *table.rows])}")
    return "\n\n".join([*blocks, "\n".join(sentences(bench))]).rstrip()


def markdown(bench: dict) -> str:
    """What a README shows."""
    blocks = [conditions_line(bench)]
    for table in all_tables(bench):
        blocks += [f"**{table.title}**", tables.markdown(table.header, table.rows)]
    return "\n\n".join([*blocks, *sentences(bench)]) + "\n"


def all_tables(bench: dict) -> Iterator[Table]:
    """The tables that have rows."""
    for make in (attention_table, decode_table, prefill_table, calibration_table, stage_table):
        table = make(bench)
        if table.rows:
            yield table


def conditions_line(bench: dict) -> str:
    """Machine and settings, and whether anything else was running."""
    c = bench["conditions"]
    line = (
        f"{c['cpu']}, {c['threads']} of {c['cores']} cores, kernel: {c['kernel']}; torch {c['torch']} "
        f"({c['torch_cpu']}), transformers {c['transformers']}; model in {c['dtype']}"
    )
    return f"{line}. {busy}" if (busy := busy_sentence(c)) else line


def busy_sentence(conditions: dict) -> str:
    """A warning where other programs took part; empty on an idle machine."""
    during, cores = conditions["others_during"], conditions["cores"]
    if during is None:
        return "How busy the machine was is not known."
    if not conditions["disturbed"]:
        return ""
    return (
        f"WARNING: other programs used {during:.1f} of {cores} cores meanwhile: contenders ran in alternation, "
        "so ratios tell something, but times do not."
    )


def attention_table(bench: dict) -> Table:
    """One row per case and format: our time, the others', and how many times faster that is."""
    others = ("sdpa_float32", "matmul_float32", "sdpa_bfloat16")
    header = ("heads/kv/channels", "rows", "tokens", "format", "MiB", "ms", *(f"{LABELS[name]} ms" for name in others))
    header += (*(f"x {LABELS[name]}" for name in others), "times its bound")
    rows = []
    for (shape, batch, tokens), found in _cases(bench["attention"], ("shape", "batch", "tokens")).items():
        if "all" in found:
            rows.append((shape, batch, f"{tokens:,}", found["all"]["missing"], *[""] * (len(header) - 4)))
        for name, ours in found.items():
            if not name.startswith("kvcalib:"):
                continue
            case = (shape, batch, f"{tokens:,}", FORMATS.get(name.split(":")[1], "of this run"))
            times = [spread(found[other]) for other in others]
            ratios = [f"{found[other]['ms'] / ours['ms']:.1f}" for other in others]
            bound = f"{ours['ms'] / ours['bound_ms']:.1f}"
            rows.append((*case, f"{ours['bytes'] / MIB:.1f}", spread(ours), *times, *ratios, bound))
    return Table("The attention call of one decode step", header, rows)


def decode_table(bench: dict) -> Table:
    """One row per contender and case."""
    header = ("rows", "context", "cache", "ms per step", "CPU ms", "tokens/s", "MiB held")
    header += ("ms due to the cache", "x DynamicCache")
    rows = []
    for (batch, context), found in _cases(bench["decode"], ("batch", "context")).items():
        for name, row in found.items():
            case = (batch, f"{context:,}", label(name, bench))
            if "missing" in row:
                rows.append((*case, row["missing"], *[""] * 5))
                continue
            due, times = cache_part(found, name), ratio(found, "full", name)
            rows.append(
                (
                    *case,
                    spread(row),
                    f"{row['cpu_ms']:.1f}",
                    f"{row['tokens_per_second']:.1f}",
                    f"{row['bytes'] / MIB:.1f}",
                    "" if due is None else f"{due:.1f}",
                    "" if times is None or name.endswith(":empty") else f"{times:.2f}",
                )
            )
    return Table("Whole decode steps inside generate()", header, rows)


def prefill_table(bench: dict) -> Table:
    header = ("tokens", "cache", "seconds", "peak MiB above the model", "MiB held", "seconds of packing")
    rows = []
    for row in bench["prefill"]:
        case = (f"{row['tokens']:,}", label(row["contender"], bench))
        if "missing" in row:
            rows.append((*case, row["missing"], "", "", ""))
            continue
        peak, packing = row["peak_bytes"], row.get("packing_seconds")
        rows.append(
            (
                *case,
                spread(row, 1000),
                "" if peak is None else f"{peak / MIB:.0f}",
                f"{row['bytes'] / MIB:.1f}",
                "" if packing is None else f"{packing:.2f}",
            )
        )
    return Table("A prompt in one pass", header, rows)


def calibration_table(bench: dict) -> Table:
    found = bench.get("calibration")
    if not found:
        return Table("Calibration", (), [])
    size = f"{found['windows']} windows of {found['length']:,} tokens"
    rows = [
        (f"plain forward and backward, {size}", spread(found["plain"], 1000)),
        ("collect and fisher over the same", spread(found["measured"], 1000)),
        ("ratio", f"{found['ratio']:.2f}"),
    ]
    return Table("Calibration", ("what", "seconds"), rows)


def stage_table(bench: dict) -> Table:
    rows = [
        (name, f"{found['seconds']:.1f}", f"{found['peak_memory_bytes'] / MIB:,.0f}", "yes" if found["reused"] else "")
        for name, found in bench["stages"].items()
    ]
    return Table("Stages of this run", ("stage", "seconds", "peak MiB", "taken from another run"), rows)


def sentences(bench: dict) -> Iterator[str]:
    """What the numbers say, where they say it clearly."""
    cases = _cases(bench["decode"], ("batch", "context"))
    against = {
        case: (found["kvcalib"], found["full"]) for case, found in cases.items() if {"kvcalib", "full"} <= {*found}
    }
    if against:
        yield full_precision_sentence(against)
    yield from _cache_sentences(cases, bench)


def _cache_sentences(cases: dict, bench: dict) -> Iterator[str]:
    """What the caches themselves cost, at the longest context of every batch: there it is far above the noise."""
    longest = {batch: context for batch, context in sorted(cases)}
    for (batch, context), found in cases.items():
        ours = cache_part(found, "kvcalib")
        due = {name: cache_part(found, name) for name in found if name != "kvcalib"}
        due = {name: ms for name, ms in due.items() if ms is not None}
        if context != longest[batch] or ours is None or not due or min(ours, *due.values()) <= 0:
            continue
        listed = ", ".join(f"{ms:.1f} ms in {label(name, bench)} ({ms / ours:.1f} x)" for name, ms in due.items())
        where = f"{context:,} tokens with {_rows(batch)}"
        yield f"At {where} the cache costs {ours:.1f} ms of a step in kvcalib, {listed}."


def full_precision_sentence(against: dict) -> str:
    """Where DynamicCache is faster, slower, and where the measurement cannot tell."""
    faster = [case for case, (ours, full) in against.items() if full["ms_q3"] < ours["ms_q1"]]
    slower = [case for case, (ours, full) in against.items() if ours["ms_q3"] < full["ms_q1"]]
    open_ = [case for case in against if case not in faster + slower]
    parts = [f"The full-precision cache is still faster at {_listed(faster)}" if faster else ""]
    parts.append(f"kvcalib is faster at {_listed(slower)}" if slower else "")
    parts.append(f"the spread leaves it open at {_listed(open_)}" if open_ else "")
    joined = "; ".join(part for part in parts if part)
    return ("" if faster else "The full-precision cache is nowhere clearly faster; ") + joined + "."


def _listed(cases: list[tuple[int, int]]) -> str:
    rows: dict[int, list[int]] = {}
    for batch, context in cases:
        rows.setdefault(batch, []).append(context)
    return " and ".join(
        f"{', '.join(f'{context:,}' for context in contexts)} tokens with {_rows(batch)}"
        for batch, contexts in rows.items()
    )


def _rows(batch: int) -> str:
    return f"{batch} rows" if batch > 1 else "1 row"


def cache_part(found: dict[str, dict], name: str) -> float | None:
    """ms of a step beyond the same model's step without a context."""
    empty = found.get("bfloat16:empty" if name == "bfloat16" else "full:empty")
    if empty is None or name.endswith(":empty") or "ms" not in found.get(name, {}):
        return None
    return found[name]["ms"] - empty["ms"]


def ratio(found: dict[str, dict], slow: str, fast: str) -> float | None:
    if "ms" not in found.get(slow, {}) or "ms" not in found.get(fast, {}):
        return None
    return found[slow]["ms"] / found[fast]["ms"]


def figures(bench: dict) -> Iterator[bytes]:
    """Tokens per second and bytes against context, one pair of figures per batch."""
    rows = [row for row in bench["decode"] if "ms" in row and ":" not in row["contender"]]
    for batch in sorted({row["batch"] for row in rows}):
        own = [row for row in rows if row["batch"] == batch]
        where = f"batch {batch}"
        speed = _series(own, bench, lambda row: row["tokens_per_second"])
        yield plots.by_context(speed, title=f"Decoding, {where}", unit="tokens per second")
        size = _series(own, bench, lambda row: row["bytes"] / MIB)
        yield plots.by_context(size, title=f"Cache, everything stored, {where}", unit="MiB", logarithmic=True)


def _series(rows: list[dict], bench: dict, value) -> dict[str, list[tuple[int, float]]]:
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(label(row["contender"], bench), []).append((row["context"], value(row)))
    return series


def label(contender: str, bench: dict) -> str:
    name = LABELS.get(contender, contender)
    return f"{name}, {bench['conditions']['dtype']}" if contender == "full" else name


def spread(row: dict, per: float = 1.0) -> str:
    """Median and quartiles, with as many digits as they deserve."""
    digits = 3 if row["ms_q3"] / per < 0.1 else 2 if row["ms_q3"] / per < 10 else 1
    middle, low, high = (f"{row[key] / per:.{digits}f}" for key in ("ms", "ms_q1", "ms_q3"))
    return f"{middle} ({low}-{high})"


def columns(lines: list[tuple]) -> str:
    """Plain text columns."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cases(rows: list[dict], keys: tuple[str, ...]) -> dict[tuple, dict[str, dict]]:
    """Rows by case, and in a case by contender."""
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in keys), {})[row["contender"]] = row
    return cases


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
