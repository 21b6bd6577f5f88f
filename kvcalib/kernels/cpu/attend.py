"""Attention over packed pages by the compiled kernel: the same signature and meaning as `kernels.reference.attend`."""

import ctypes
import operator
import weakref
from functools import cache

import torch

from kvcalib.kernels.cpu.build import library
from kvcalib.kernels.cpu.plan import CCall, CExact, CLayer, CSide, Plan
from kvcalib.kernels.packed import Packed
from kvcalib.quant.page import PageLayout

ISAS = {"portable": 0, "avx2": 1, "avx512": 2}
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
plans: "weakref.WeakKeyDictionary[object, Plan]" = weakref.WeakKeyDictionary()


def supported() -> list[str]:
    """Instruction sets that this processor runs, the slowest first. Raises CannotBuild."""
    return [name for name, number in ISAS.items() if native().kv_supports(number)]


def attend(
    query: torch.Tensor, packed: Packed, *, scale: float, softcap: float | None = None, isa: str | None = None
) -> torch.Tensor:
    """query [B, Hq, T, D] post-RoPE, model channel order -> attention output [B, T, Hq, Dv] in query's dtype.

    isa: one of `supported()`; None: the fastest. Rows of queries that see nothing come out as zeros.
    """
    batch, query_heads, tokens, _ = query.shape
    plan = plan_of(packed)
    output = torch.empty(batch, tokens, query_heads, packed.layout.value_dim, dtype=torch.float32)
    if output.numel() == 0:
        return output.to(query.dtype)
    call, _alive = call_struct(query, packed, output, scale, softcap)
    number = ISAS[isa or fastest()]
    if native().kv_attend(ctypes.byref(plan.struct), ctypes.byref(call), number):
        raise MemoryError("the attention kernel could not allocate its scratch memory")
    return output.to(query.dtype)


def plan_of(packed: Packed) -> Plan:
    """The constants of a layer, made at its first call."""
    return plan_for(packed.layout, packed.key_tables, packed.value_tables, packed.rope)


def plan_for(layout: PageLayout, *made_from) -> Plan:
    plan = plans.get(layout)
    if plan is None or not all(map(operator.is_, plan.made_from, made_from)):
        plan = plans[layout] = Plan(layout, *made_from)
    return plan


def call_struct(query: torch.Tensor, packed: Packed, output: torch.Tensor, scale: float, softcap: float | None):
    """The call as the kernel reads it, and the tensors that it points to."""
    exact = (packed.sink_key, packed.sink_value, packed.recent_key, packed.recent_value)
    if exact[0].dtype not in FLOAT_TYPES:
        exact = tuple(t.float() for t in exact)
    exact = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in exact)
    query = query if query.dtype == torch.float32 and query.stride(-1) == 1 else query.float().contiguous()
    recent, moved = _dense(packed.recent_visible), packed.moved_visible
    moved = None if moved is None else _dense(moved)
    pages = packed.pages
    call = CCall(
        *(query.shape[0], query.shape[1], query.shape[2]),
        *(query.data_ptr(), *query.stride()[:3]),
        *(output.data_ptr(), pages.data_ptr(), pages.stride(0)),
        *(packed.page_counts.data_ptr(), packed.sink_counts.data_ptr()),
        *(_exact(*exact[:2]), _exact(*exact[2:])),
        *(exact[0].shape[2], exact[2].shape[2], FLOAT_TYPES[exact[0].dtype], torch.get_num_threads()),
        *(recent.data_ptr(), *recent.stride()[:2]),
        *((moved.data_ptr(), *moved.stride()[:2]) if moved is not None else (None, 0, 0)),
        *(scale, softcap or 0.0),
    )
    return call, (query, exact, recent, moved)


def _exact(key: torch.Tensor, value: torch.Tensor) -> CExact:
    return CExact(key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3])


def _dense(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.stride(-1) == 1 or mask.shape[-1] == 1 else mask.contiguous()


@cache
def native() -> ctypes.CDLL:
    """The library, after a check that both sides see the same structs."""
    lib = library()
    lib.kv_sizes.restype = ctypes.c_int64
    found = [lib.kv_sizes(which) for which in range(3)]
    assert found == [ctypes.sizeof(kind) for kind in (CLayer, CCall, CSide)], f"structs of {found} bytes"
    return lib


@cache
def fastest() -> str:
    return supported()[-1]
