"""A whole prompt in one pass: time until the first token, and the memory that it takes at most.

`none` computes the same without any cache. Memory is the highest resident size during the pass above the size before
it, counted by the kernel (Linux): weights are not in it, activations are. `packing_seconds` is the share that packing
alone takes, measured by handing the finished keys and values to the store. A bfloat16 model is left out, it is another
computation; so are caches of few bits that pack as one of more bits does.
"""

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.cache_utils import Cache

from kvcalib.eval import timing
from kvcalib.eval.contenders import Contender, States, filled, held_bytes

COMPARED = ("kvcalib", "full", "quanto4", "hqq4")
STATUS = Path("/proc/self/status")
_WARM = 256
"""Tokens of the pass that is not counted."""


def prefill_speed(
    contenders: list[Contender],
    states: States,
    ids: torch.Tensor,
    lengths: list[int],
    *,
    rounds: int,
    ticker: Callable,
) -> list[dict]:
    """ids int64 [T]. One row per length and contender, batch 1."""
    rows, contenders = [], compared(contenders)
    for length in lengths:
        rows += [_named(length, each.name) | {"missing": each.missing} for each in contenders if each.missing]
        there = {each.name: each for each in contenders if not each.missing}
        found = {name: Passes(each, ids[:length]) for name, each in ({"none": _without(there)} | there).items()}
        for passes in found.values():
            passes.warm_up()
        for _ in range(rounds):
            for passes in found.values():
                passes.once()
            ticker(work(length, 1, len(contenders)))
        packing = {"kvcalib": {"packing_seconds": _packing(there["kvcalib"], states, length)}}
        rows += [_named(length, name) | each.result() | packing.get(name, {}) for name, each in found.items()]
    return rows


def compared(contenders: list[Contender]) -> list[Contender]:
    """Those whose prompts are timed."""
    return [each for each in contenders if each.name in COMPARED]


def _without(there: dict[str, Contender]) -> Contender:
    """The model without a cache; the attention setting of one with a CalibratedCache does not matter then."""
    return Contender("none", there.get("full", there["kvcalib"]).model, lambda: None)


class Passes:
    """Prompts of one contender, each with a new cache."""

    def __init__(self, contender: Contender, ids: torch.Tensor):
        self.contender, self.ids = contender, ids
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.peaks: list[int] = []
        self.held = 0

    def warm_up(self) -> None:
        """Weights come from disk with the first pass, and libraries take what they keep: neither is the prompt's."""
        self._forward(self.ids[:_WARM], self.contender.make())

    def _forward(self, ids: torch.Tensor, cache: Cache | None) -> None:
        use = {} if cache is None else {"cache": cache}
        with torch.inference_mode():
            self.contender.model(ids[None], use_cache=cache is not None, logits_to_keep=1, **use)

    def once(self) -> None:
        cache = self.contender.make()
        before = reset_peak()
        cpu, start = time.process_time(), time.perf_counter()
        self._forward(self.ids, cache)
        self.wall.append(1000 * (time.perf_counter() - start))
        self.cpu.append(1000 * (time.process_time() - cpu))
        if before is not None:
            self.peaks.append(peak() - before)
        self.held = 0 if cache is None else held_bytes(cache)

    def result(self) -> dict:
        peaks = timing.quartiles(self.peaks)[1] if self.peaks else None
        return timing.summary(self.wall, self.cpu) | {"peak_bytes": peaks, "bytes": self.held}


def _packing(contender: Contender, states: States, length: int) -> float:
    """Seconds to store a prompt, attention and everything else left out."""
    start = time.perf_counter()
    with torch.no_grad():
        filled(contender, states, length, 1)
    return time.perf_counter() - start


def reset_peak() -> int | None:
    """Resident bytes now, from which on the kernel counts the peak anew; None where it cannot."""
    gc.collect()
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def peak() -> int:
    """Highest resident bytes since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    return int(STATUS.read_text().split(f"{field}:")[1].split()[0]) * 1024


def _give_back() -> None:
    """Memory that the C library keeps for later would hide what the next pass needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATUS.exists() else None
    if trim is not None:
        trim(0)


def _named(length: int, contender: str) -> dict:
    return {"tokens": length, "contender": contender}


def work(length: int, rounds: int, contenders: int) -> int:
    """How long a length takes, in the units of decode_speed.work."""
    return rounds * (contenders + 1) * (length * (8192 + length) // 2**20 + 1)
