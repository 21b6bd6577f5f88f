"""The attention call of one decode step, alone: packed pages against full precision.

    kvcalib:<format>    the kernel over packed pages, `Packed` made beforehand
    sdpa_float32        torch's scaled_dot_product_attention with enable_gqa; sdpa_bfloat16 alike
    matmul_float32      two matrix products with the query heads of a kv head side by side, and a softmax: faster than
                        SDPA where heads are shared, because SDPA reads keys and values once per query head

All work on the same numbers: the full-precision ones are what the pages of the first format decode to. `error` is the
largest difference to SDPA in fp32 over the decoded pages of the same format, relative to the largest output.

Only a few pages are really quantised; they are repeated, each copy at its own position and in memory of its own.
`bound_ms` is the time in which a contender's bytes can be read at all, at the bandwidth measured for a buffer of that
size, with the same threads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcalib.artifact.schema import Artifact
from kvcalib.errors import ConfigError
from kvcalib.eval import timing
from kvcalib.eval.conditions import available_memory
from kvcalib.eval.synthetic import Shape, synthetic_layer
from kvcalib.kernels import dispatch
from kvcalib.quant.page import PageLayout
from kvcalib.quant.spec import PAGE, CacheSpec, TensorSpec
from kvcalib.runtime.store import LayerStore

FORMATS = {
    "group4": CacheSpec(
        TensorSpec(4, "uniform", "group", group=32, rope="pre", outliers=0.01),
        TensorSpec(4, "uniform", "token", scope="head", outliers=0.01),
        window=128,
        sink=4,
    ),
    "group2": CacheSpec(
        TensorSpec(2, "uniform", "group", group=32, rope="pre", outliers=0.01),
        TensorSpec(2, "uniform", "token", scope="head", outliers=0.01),
        window=128,
        sink=4,
    ),
    "post4": CacheSpec(
        TensorSpec(4, "uniform", "static", rope="post"),
        TensorSpec(4, "uniform", "token", scope="head"),
        window=128,
        sink=4,
    ),
}
"""Formats with a name of their own; "quant" is the one of the run."""
QUANTISED_PAGES = 32
DECODED_AT_ONCE = 64
"""Pages; bounds the memory of decoding."""


class Case(NamedTuple):
    shape: Shape
    batch: int
    tokens: int


def attention_speed(
    artifact: Artifact, cases: list[Case], formats: list[str], *, rounds: int, seed: int, ticker: Callable
) -> list[dict]:
    """One row per case and contender. Raises ConfigError for a format that is not there, or too long for a case."""
    rows = []
    for case in cases:
        needed, there = fp32_bytes(case) * 2, available_memory()
        if there is not None and needed > there:
            why = f"needs {needed / 2**30:.1f} GiB of memory, {there / 2**30:.1f} GiB are free"
            rows.append(_named(case, "all") | {"missing": why})
        else:
            rows += _rows(artifact, case, formats, rounds, seed)
        ticker(1)
    return rows


def fp32_bytes(case: Case) -> int:
    """Keys and values in fp32."""
    return 8 * case.batch * case.tokens * case.shape.heads * case.shape.dim


def _rows(artifact: Artifact, case: Case, formats: list[str], rounds: int, seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(case.batch, case.shape.query_heads, 1, case.shape.dim, generator=generator)
    scale = case.shape.dim**-0.5
    calls, sizes, errors = {}, {}, {}
    baseline = None
    for name in formats:
        store = packed_store(artifact, name, case, generator)
        packed = store.packed(None, 1)
        key, value = unpacked(store)
        calls[f"kvcalib:{name}"] = lambda packed=packed: dispatch.attend(query, packed, scale=scale)
        sizes[f"kvcalib:{name}"] = stored_bytes(store)
        errors[f"kvcalib:{name}"] = _error(dispatch.attend(query, packed, scale=scale), query, key, value)
        baseline = baseline or (key, value)
    calls |= full_precision(query, *baseline)
    sizes |= {name: baseline[0].numel() * (4 if "bfloat16" in name else 8) for name in calls if name not in sizes}
    bandwidths = {size: timing.read_bandwidth(size) for size in sorted(set(sizes.values()))}
    with torch.inference_mode():
        timed = timing.alternate(calls, rounds=rounds)
    rows = []
    for name, found in timed.items():
        size = sizes[name]
        speed = {"bytes": size, "gb_per_s": size / found["ms"] / 1e6, "bound_ms": 1000 * size / bandwidths[size]}
        rows.append(_named(case, name) | found | speed | {"error": errors.get(name)})
    return rows


def _named(case: Case, contender: str) -> dict:
    return {"shape": case.shape.name, "batch": case.batch, "tokens": case.tokens, "contender": contender}


def full_precision(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Callable]:
    """query [B, Hq, 1, D], key and value fp32 [B, H, T, D]."""
    half = [x.bfloat16() for x in (query, key, value)]
    return {
        "sdpa_float32": lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "sdpa_bfloat16": lambda: scaled_dot_product_attention(*half, enable_gqa=True),
        "matmul_float32": lambda: grouped_matmul(query, key, value),
    }


def grouped_matmul(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one query token with the heads that share keys as rows of one product -> [B, Hq, 1, D]."""
    grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[-1]) * query.shape[-1] ** -0.5
    return (torch.softmax(grouped @ key.mT, dim=-1) @ value).view(*query.shape[:3], value.shape[-1])


def _error(output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
    return float((output - expected).abs().max() / expected.abs().max())


def packed_store(artifact: Artifact, name: str, case: Case, generator: torch.Generator) -> LayerStore:
    """A store of case.batch equal rows with case.tokens tokens each."""
    spec = artifact.spec if name == "quant" else FORMATS[name]
    exact = spec.sink + spec.window
    if case.tokens < exact + PAGE:
        raise ConfigError(f"bench.lengths={case.tokens} must be at least {exact + PAGE}: {exact} tokens stay exact")
    layer = synthetic_layer(artifact, spec, case.shape, generator)
    pages = (case.tokens - exact) // PAGE
    real = min(pages, QUANTISED_PAGES)
    rest = case.tokens - exact - pages * PAGE
    store = LayerStore(spec, layer.key_tables, layer.value_tables, layer.rope)
    with torch.no_grad():
        store.append(*layer.tokens(exact + real * PAGE + rest, generator))
        store.flush()
        if spec.quantised:
            _repeat_pages(store, pages)
        store.select_rows(torch.zeros(case.batch, dtype=torch.int64))
    return store


def _repeat_pages(store: LayerStore, pages: int) -> None:
    """The written pages again and again, each where it would stand in a text."""
    real = store.page_counts[0]
    store.pages = store.pages[:, torch.arange(pages) % real].contiguous()
    first = store.spec.sink + PAGE * torch.arange(pages)
    store.layout.read(store.pages, "first_position")[..., 0] = first.int()
    store.page_counts = [pages]
    store.length += PAGE * (pages - real)


def unpacked(store: LayerStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys after rotary embedding and values of a whole store, fp32 [B, H, T, D], rows in memory of their own."""
    key, value = [store.sink_key[0]], [store.sink_value[0]]
    for part in store.pages[0, : store.page_counts[0]].split(DECODED_AT_ONCE):
        page_key, page_value, _ = store.decode(part)
        key.append(page_key.transpose(0, 1))
        value.append(page_value.transpose(0, 1))
    recent = [x[0] for x in store.recent()]
    whole = (torch.cat([*parts, last], dim=1) for parts, last in zip((key, value), recent, strict=True))
    return tuple(x[None].repeat(store.batch, 1, 1, 1) for x in whole)


def stored_bytes(store: LayerStore) -> int:
    """What one step reads: pages, sink and recent tokens of all rows."""
    layout: PageLayout = store.layout
    exact = store.sink_counts[0] + store.recent_length
    dims = layout.heads * (layout.key_dim + layout.value_dim)
    return store.batch * (store.page_counts[0] * layout.nbytes + exact * dims * store.recent_key.element_size())
