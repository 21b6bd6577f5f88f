"""Whether what a file holds of one layer fits together: all that a kernel, which checks no bounds, takes on trust.

A checksum finds damage. It does not find a file that was made by other means than `save_cache`.
"""

from collections.abc import Iterator

import torch

from kvcalib.quant.page import PageLayout
from kvcalib.quant.spec import PAGE, CacheSpec
from kvcalib.runtime.store import COUNTS

_TENSORS = {"pages", "sink_key", "sink_value", "sink_positions", "recent_key", "recent_value", "waiting", "positions"}


def problems(spec: CacheSpec, layout: PageLayout, held: dict[str, torch.Tensor], counts: dict) -> Iterator[str]:
    """held: tensors by the names of `LayerStore.tensors`; counts: length, is_long and per row page_counts and so on.

    Later checks stand on earlier ones: take the first and leave the rest.
    """
    yield from _count_problems(spec, held, counts)
    expected = _expected(spec, layout, held, counts)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    if wrong := [name for name in found if found[name] != expected[name]]:
        yield f"{', '.join(wrong)} of another shape or dtype"
    for row in range(len(held["waiting"])):
        yield from _row_problems(layout, held, counts, row)
    yield from _page_problems(layout, held["pages"], counts["page_counts"])


def _count_problems(spec: CacheSpec, held: dict, counts: dict) -> Iterator[str]:
    if held.keys() - {"real"} != _TENSORS or held["waiting"].dim() != 2 or held["sink_key"].dim() != 4:
        yield "its tensors are not those of a cache"
    if not held["recent_key"].is_floating_point():
        yield f"keys in {held['recent_key'].dtype}"
    if counts.keys() != {"length", "is_long", *COUNTS} or type(counts["is_long"]) is not bool:
        yield "its counts are not those of a cache"
    batch = len(held["waiting"])
    for name in COUNTS:
        if not _is_list(counts[name]) or len(counts[name]) != batch or not batch:
            yield f"{name} is {counts[name]} for {batch} rows"
    if not _is_list([counts["length"]]) or {*counts["sink_counts"]} - {0, spec.sink}:
        yield f"length is {counts['length']} and sink_counts {counts['sink_counts']}"


def _is_list(numbers) -> bool:
    return type(numbers) is list and all(type(n) is int and n >= 0 for n in numbers)


def _expected(spec: CacheSpec, layout: PageLayout, held: dict, counts: dict) -> dict[str, tuple]:
    """(shape, dtype) of every tensor."""
    (batch, recent), floating = held["waiting"].shape, held["recent_key"].dtype
    sink = spec.sink if max(counts["sink_counts"]) else held["sink_key"].shape[2] and spec.sink
    shapes = {
        "pages": ((batch, max(counts["page_counts"]), layout.nbytes), torch.uint8),
        "waiting": ((batch, recent), torch.bool),
        "positions": ((batch, recent), torch.int64),
        "sink_positions": ((batch, sink), torch.int64),
        "real": ((batch, counts["length"]), torch.bool),
    }
    for name, dim in (("key", layout.key_dim), ("value", layout.value_dim)):
        shapes[f"sink_{name}"] = ((batch, layout.heads, sink, dim), floating)
        shapes[f"recent_{name}"] = ((batch, layout.heads, recent, dim), floating)
    return shapes


def _row_problems(layout: PageLayout, held: dict, counts: dict, row: int) -> Iterator[str]:
    """Every real column of a row is in its sink, forgotten, in a page, or waits."""
    waiting, length = held["waiting"][row], counts["length"]
    real = held["real"][row] if "real" in held else torch.ones(length, dtype=torch.bool)
    if len(waiting) > length or (waiting & ~real[length - len(waiting) :]).any():
        yield f"row {row} waits for columns that it does not have"
    sizes = layout.read(held["pages"][row, : counts["page_counts"][row]], "tokens")
    placed = counts["sink_counts"][row] + counts["forgotten"][row] + int(sizes.sum()) + int(waiting.sum())
    if placed != int(real.sum()):
        yield f"row {row} holds {placed} of {int(real.sum())} tokens"


def _page_problems(layout: PageLayout, pages: torch.Tensor, page_counts: list[int]) -> Iterator[str]:
    used = torch.cat([pages[row, :count] for row, count in enumerate(page_counts)])
    tokens, first = layout.read(used, "tokens"), layout.read(used, "first_position")
    nowhere = (first < 0) if layout.spec.key.rope == "pre" else torch.zeros_like(first, dtype=torch.bool)
    if ((tokens < 1) | (tokens > PAGE) | nowhere).any():
        yield f"a page of fewer than 1 or more than {PAGE} tokens, or at no position"
    for name, dim in (("key", layout.key_dim), ("value", layout.value_dim)):
        places, rows = layout.read(used, f"{name}_positions"), layout.read(used, f"{name}_rows")
        if places is None:
            continue
        places, rows = places.long() & 0xFFFF, rows.long() & 0xFFFF
        ends = (rows[:, 0] != 0) | (rows[:, -1] != places.shape[1])
        if (places >= dim * PAGE).any() or ends.any() or (rows.diff() < 0).any():
            yield f"{name} outliers that lie outside of their page"
