"""Whole decode steps inside `generate()`, cache against cache at the same context.

Every cache is filled with the same prefill. Blocks of `steps` new tokens are then generated from each in turn, round
after round, so that the context grows alike for all and ends at the one that the row names. A step is the time from
one call of a logits processor to the next: the forward pass, the choice of the token and all of generate's
bookkeeping. A block's mean counts as one sample, so a page or a residual that is packed inside a block is in it.

`<name>:empty` is the same model with a DynamicCache of a few tokens: the part of a step that no cache can save.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import LogitsProcessor
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.eval import timing
from kvcalib.eval.conditions import available_memory
from kvcalib.eval.contenders import Contender, States, filled, held_bytes

EMPTY = 8
"""Tokens in the cache of an `:empty` row."""
MULTIPLE = 4
"""hqq along its documented axis cannot pack an odd number of groups; caches start with a multiple of this."""
COPIES = 3
"""Fp32 caches' worth of memory that a comparison may take at most: those compared, and what a step unpacks."""


class Case(NamedTuple):
    batch: int
    context: int


class Stamps(LogitsProcessor):
    """Notes the time whenever `generate` asks what to make of the scores."""

    def __init__(self):
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, input_ids, scores):
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return scores


class Decoding:
    """A cache that generates on and on from where it is."""

    def __init__(self, contender: Contender, cache: Cache, ids: torch.Tensor):
        self.model, self.cache, self.ids = contender.model, cache, ids
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def block(self, steps: int) -> None:
        """`steps` timed tokens after one that is not timed; appends their mean times in ms."""
        stamps = Stamps()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            cache=self.cache,
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            logits_processor=[stamps],
        )
        for kept, found in ((self.wall, stamps.wall), (self.cpu, stamps.cpu)):
            kept.append(1000 * sum(timing.differences(found)) / steps)


def decode_speed(
    contenders: list[Contender],
    states: States,
    ids: torch.Tensor,
    cases: list[Case],
    *,
    steps: int,
    rounds: int,
    ticker: Callable,
) -> list[dict]:
    """ids int64 [T]: the text of the states. One row per case and contender."""
    rows = []
    for case in cases:
        needed, there = COPIES * _state_bytes(states, case), available_memory()
        if there is not None and needed > there:
            why = f"needs {needed / 2**30:.1f} GiB of memory, {there / 2**30:.1f} GiB are free"
            rows.append(_named(case, "all") | {"missing": why})
        else:
            rows += _rows(contenders, states, ids, case, steps, rounds, ticker)
    return rows


def _state_bytes(states: States, case: Case) -> int:
    """A full-precision cache of the case in fp32."""
    return sum(4 * case.batch * case.context * x.shape[1] * x.shape[3] for pair in states.values() for x in pair)


def _rows(contenders, states, ids, case: Case, steps: int, rounds: int, ticker: Callable) -> list[dict]:
    start = case.context - rounds * (steps + 1) - 1
    start -= start % MULTIPLE
    rows = [_named(case, each.name) | {"missing": each.missing} for each in contenders if each.missing]
    there = [each for each in contenders if not each.missing]
    running, made = {}, {}
    for each in there:
        clock = time.perf_counter()
        cache = filled(each, states, start, case.batch)
        made[each.name] = time.perf_counter() - clock
        running[each.name] = Decoding(each, cache, ids[: start + 1].repeat(case.batch, 1))
    running |= _empty(there, ids, case.batch)
    with torch.inference_mode():
        for _ in range(rounds):
            for decoding in running.values():
                decoding.block(steps)
            ticker(work(case, 1, len(contenders)))
    for name, decoding in running.items():
        row = _named(case, name) | _speed(decoding, case.batch, steps)
        rows.append(row | {"bytes": held_bytes(decoding.cache), "fill_seconds": made.get(name)})
    return rows


def _empty(there: list[Contender], ids: torch.Tensor, batch: int) -> dict[str, Decoding]:
    """One for every model that is not the same in another object."""
    found = {}
    for each in there:
        if each.name in ("full", "bfloat16"):
            cache = DynamicCache(config=each.model.config)
            found[f"{each.name}:empty"] = Decoding(each, cache, ids[:EMPTY].repeat(batch, 1))
    return found


def _speed(decoding: Decoding, batch: int, steps: int) -> dict:
    """Tokens per second count all rows of the batch."""
    found = timing.summary(decoding.wall, decoding.cpu)
    return found | {"steps": steps, "tokens_per_second": 1000 * batch / found["ms"]}


def _named(case: Case, contender: str) -> dict:
    return {"batch": case.batch, "context": case.context, "contender": contender}


def work(case: Case, rounds: int, contenders: int) -> int:
    """How long a case takes, in units that progress bars count in."""
    return rounds * contenders * (2048 + case.batch * case.context) // 1024


def shortest_context(steps: int, rounds: int) -> int:
    """The shortest context whose cache is not empty when the first round begins."""
    return rounds * (steps + 1) + 1 + 2 * MULTIPLE
