"""What a CalibratedCache holds, byte by byte.

Bits per element count everything that is stored because tokens are cached: codes, scales, sparse values and
indices, page headers, sink and window (capacity, not just what is filled), and the bookkeeping of columns. Frames and
levels do not grow with the tokens; they are listed as `tables`, with the rotary frequencies, and what the kernels
prepare from them as `kernel`. Nor do the `states` of linear-attention layers, which are not quantised.
"""

from kvcalib.kernels import dispatch
from kvcalib.quant.spec import PAGE


def memory_report(layers: list, states: list) -> dict:
    """layers: CalibratedLayers; states: tensors of other layers.

    Bytes over all layers and rows; `tokens` columns per row (padding included).
    """
    seen = [layer.store.seen() for layer in layers]  # another thread may be using them
    stores = [store for store in seen if store.layout is not None]
    constants = [tensor for store in seen for tensor in store.constants()]
    prepared = [tensor for store in stores for tensor in dispatch.prepared(store.layout)]
    tables = _bytes_of_all(constants)
    kernel, beside = _bytes_of_all(constants + prepared) - tables, _bytes_of_all(states)
    apart = {"tables_bytes": tables, "kernel_bytes": kernel, "states_bytes": beside}
    if not stores:
        return {"tokens": 0, "total_bytes": sum(apart.values()), **apart}
    parts = [_parts(store) for store in stores]
    report = {name: sum(part[name] for part in parts) for name in parts[0]}
    cached = report["key_bytes"] + report["value_bytes"]
    tokens, batch = stores[0].length, stores[0].batch
    fp16 = 2 * (report["key_elements"] + report["value_elements"])
    return report | {
        "tokens": tokens,
        "batch": batch,
        **apart,
        "total_bytes": round(cached) + sum(apart.values()),
        "bytes_per_token": cached / max(tokens * batch, 1),
        "bytes_per_token_fp16": fp16 / max(tokens * batch, 1),
        "bits_per_element_key": 8 * report["key_bytes"] / max(report["key_elements"], 1),
        "bits_per_element_value": 8 * report["value_bytes"] / max(report["value_elements"], 1),
        "compression": fp16 / max(cached, 1),
        "saved_bytes": fp16 - cached,
        "page_bits_key": _page_bits(stores, "key"),
        "page_bits_value": _page_bits(stores, "value"),
        "compression_pages": _page_compression(stores),
    }


def _parts(store) -> dict:
    layout = store.layout
    common = layout.common_bytes
    pages = store.pages.shape[0] * store.pages.shape[1]
    columns = _bytes(store.waiting) + _bytes(store.positions) + _bytes(store.sink_positions)
    columns += 0 if store.real is None else _bytes(store.real)
    sizes = {}
    for name, dim in (("key", layout.key_dim), ("value", layout.value_dim)):
        exact = _bytes(getattr(store, f"sink_{name}")) + _bytes(getattr(store, f"recent_{name}"))
        sizes[f"{name}_pages_bytes"] = pages * layout.tensor_bytes(name)
        sizes[f"{name}_exact_bytes"] = exact
        sizes[f"{name}_bytes"] = pages * (layout.tensor_bytes(name) + common / 2) + exact + columns / 2
        sizes[f"{name}_elements"] = store.length * store.batch * layout.heads * dim
    return sizes | {"bookkeeping_bytes": columns + pages * common}


def _page_bits(stores, name: str) -> float:
    """Bits per element inside pages: what the context tends to when it grows."""
    layouts = [store.layout for store in stores]
    used = sum(layout.tensor_bytes(name) + layout.common_bytes / 2 for layout in layouts)
    return 8 * used / sum(PAGE * layout.heads * getattr(layout, f"{name}_dim") for layout in layouts)


def _page_compression(stores) -> float:
    """Times smaller than fp16 inside pages: what `compression` tends to when the context grows."""
    layouts = [store.layout for store in stores]
    fp16 = sum(2 * PAGE * layout.heads * (layout.key_dim + layout.value_dim) for layout in layouts)
    return fp16 / sum(layout.nbytes for layout in layouts)


def _bytes_of_all(tensors) -> int:
    """Memory that several of them share counts once."""
    return sum({tensor.untyped_storage().data_ptr(): _bytes(tensor) for tensor in tensors}.values())


def _bytes(tensor) -> int:
    return tensor.untyped_storage().nbytes()
