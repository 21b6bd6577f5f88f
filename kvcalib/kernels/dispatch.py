"""Chooses the kernels that attend over packed pages and that pack them.

The environment variable KVCALIB_KERNEL names it:

    auto        (or not set) the compiled CPU kernel with the best instruction set of this processor; the torch
                reference where no compiler is found, with one line in the log that says why, and on other devices
                (but pages with a trellis are packed on the CPU)
    reference   plain torch, everywhere
    avx512, avx2, portable       the compiled CPU kernel with that instruction set, or an error
"""

import logging
import operator
import os
import weakref
from functools import cache

import torch

from kvcalib.errors import ConfigError
from kvcalib.kernels import reference
from kvcalib.kernels.cpu import attend as compiled
from kvcalib.kernels.cpu import pack as compiled_pack
from kvcalib.kernels.cpu.build import CannotBuild
from kvcalib.kernels.packed import Packed
from kvcalib.quant.page import PageLayout

log = logging.getLogger(__name__)

VARIABLE = "KVCALIB_KERNEL"
_copies: "weakref.WeakKeyDictionary[PageLayout, tuple[tuple, tuple]]" = weakref.WeakKeyDictionary()


def attend(query: torch.Tensor, packed: Packed, *, scale: float, softcap: float | None = None) -> torch.Tensor:
    """query [B, Hq, T, D] post-RoPE, model channel order -> attention output [B, T, Hq, Dv] in query's dtype."""
    name = kernel_name(query.device.type, os.environ.get(VARIABLE) or "auto")
    if name == "reference":
        return reference.attend(query, packed, scale=scale, softcap=softcap)
    return compiled.attend(query, packed, scale=scale, softcap=softcap, isa=name)


def pack(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    layout: PageLayout,
    *tables,
) -> torch.Tensor:
    """See `reference.pack`, which also packs what the compiled kernel cannot: outliers chosen as KVQuant does."""
    wanted, device = os.environ.get(VARIABLE) or "auto", key.device
    if packs_on_cpu(device.type, wanted, layout):
        key, value, columns, positions, counts = (t.cpu() for t in (key, value, columns, positions, counts))
        tables = tables_on_cpu(layout, tables)
    name = kernel_name(key.device.type, wanted)
    if name == "reference" or not compiled_pack.covers(layout):
        return reference.pack(key, value, columns, positions, counts, layout, *tables)
    return compiled_pack.pack(key, value, columns, positions, counts, layout, *tables, isa=name).to(device)


def packs_on_cpu(device: str, wanted: str, layout: PageLayout) -> bool:
    """Whether pages of another device are better packed here: in torch, the search of a trellis is thousands of tiny
    operations for every page."""
    searches = any(spec.rounding == "trellis" for spec in (layout.spec.key, layout.spec.value))
    if device == "cpu" or not searches or not compiled_pack.covers(layout):
        return False
    return kernel_name("cpu", wanted) != "reference"


def tables_on_cpu(layout: PageLayout, tables: tuple) -> tuple:
    """Copies of a layer's tables, made once: what is prepared from them is found again by their identity."""
    known = _copies.get(layout)
    if known is None or not all(map(operator.is_, known[0], tables)):
        known = _copies[layout] = tables, tuple(t.to("cpu") for t in tables)
    return known[1]


def prepared(layout: PageLayout) -> list[torch.Tensor]:
    """What kernels have prepared for a layer and keep as long as its layout."""
    plans = [plans[layout] for plans in (compiled.plans, compiled_pack.plans) if layout in plans]
    held = [buffer for plan in plans for buffer in plan.tensors()]
    copies = [t for tables in _copies.get(layout, ((), ()))[1] for t in tables if isinstance(t, torch.Tensor)]
    return held + copies


@cache
def kernel_name(device: str, wanted: str) -> str:
    """What `wanted` comes to on a kind of device: "reference" or an instruction set."""
    if wanted not in ("auto", "reference", *compiled.ISAS):
        raise ConfigError(f"{VARIABLE}={wanted} must be auto, reference or one of {', '.join(compiled.ISAS)}")
    if wanted == "reference" or device != "cpu":
        return "reference"
    try:
        supported = compiled.supported()
    except CannotBuild as error:
        if wanted != "auto":
            raise ConfigError(f"{VARIABLE}={wanted} cannot be had: {error}") from error
        log.warning("attention over packed pages runs in plain torch, which is slower: %s", error)
        return "reference"
    if wanted not in (*supported, "auto"):
        raise ConfigError(f"{VARIABLE}={wanted} is not in this processor; it has {', '.join(supported)}")
    return supported[-1] if wanted == "auto" else wanted
