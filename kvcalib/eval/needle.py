"""Needle in a haystack: is a sentence, somewhere in a long text, still readable from the cache?

Prompts come from `prompts`. A trial is passed when the first number (or word) of the greedy continuation is the
answer. The last `QUESTION_TOKENS` tokens of the prompt are a pass of their own, see `sample`: they and the whole
answer read the needle from packed pages, provided that it lies before the exact window. `packed` in a row of the grid
is the share of trials where it does.
"""

import logging
import random
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.eval.prompts import Prompt, build_prompt
from kvcalib.eval.sample import continue_both, continue_greedily
from kvcalib.models.families import context_length
from kvcalib.quant.spec import PAGE, CacheSpec

log = logging.getLogger(__name__)

QUESTION_TOKENS = 8
Progress = Callable[[Iterable, int, str], Iterable]


class Trial(NamedTuple):
    """One prompt of the grid; together with the seed of the run it is the same text everywhere."""

    task: str
    length: int
    depth: float
    number: int


def trials_of(tasks: list[str], lengths: list[int], depths: list[float], count: int) -> list[Trial]:
    return [Trial(t, n, d, i) for t in tasks for n in lengths for d in depths for i in range(count)]


def found(text: str, key: str) -> bool:
    """Are the first digits of the continuation the key, or its first word, where the key is one?"""
    first = re.search(r"\d+" if key.isdigit() else r"\w+", text)
    return first is not None and first[0].startswith(key)


def needle(
    model,
    tokenizer,
    cache: Cache,
    spec: CacheSpec,
    *,
    lengths: list[int],
    depths: list[float],
    trials: int,
    seed: int,
    progress: Progress,
    tasks: list[str] | tuple = ("passkey",),
) -> dict:
    """needle_fp, needle_cache: share of passed trials, None without any; needle: rows of the grid;
    needle_skipped: lengths that the model does not take.

    cache: a CalibratedCache, reset before every trial.
    """
    fitting = [n for n in lengths if fits(model, n)]
    jobs, outcomes = trials_of(list(tasks), fitting, depths, trials), []
    for trial in progress(jobs, len(jobs), "needle") if jobs else ():
        prompt, ids, tokens = _posed(model, tokenizer, trial, seed)
        cache.reset()
        exact = DynamicCache(config=model.config)
        answers = continue_both(model, ids, exact, cache, tokens=tokens, last=QUESTION_TOKENS)
        fp, cached = (found(tokenizer.decode(answer), prompt.answer) for answer in answers)
        packed = prompt.needle_end <= packed_tokens(spec, len(ids))
        outcomes.append({"fp": fp, "cache": cached, "packed": packed})
    return {**grid(jobs, outcomes), "needle_skipped": [n for n in lengths if n not in fitting]}


def answered(model, tokenizer, cache: Cache, trial: Trial, seed: int, multiple: int = 1) -> tuple[bool, int, int]:
    """(passed, tokens of the prompt, end of its needle) with one empty cache alone.

    multiple: of how many tokens the first pass has a multiple.
    """
    prompt, ids, tokens = _posed(model, tokenizer, trial, seed)
    last = QUESTION_TOKENS + (len(ids) - QUESTION_TOKENS) % multiple
    answer = continue_greedily(model, ids, cache, tokens=tokens, last=last)
    return found(tokenizer.decode(answer), prompt.answer), len(ids), prompt.needle_end


def _posed(model, tokenizer, trial: Trial, seed: int) -> tuple[Prompt, torch.Tensor, int]:
    """The prompt, its ids on the model's device, and how many tokens the answer may take."""
    random_ = random.Random(_seed_of(trial, seed))
    key = str(random_.randint(10000, 99999))
    prompt = build_prompt(tokenizer, trial.length, trial.depth, key, random_.getrandbits(32), trial.task)
    tokens = len(tokenizer(f" {key}.", add_special_tokens=False).input_ids) + 1
    return prompt, torch.tensor(prompt.ids, device=model.device), tokens


def _seed_of(trial: Trial, seed: int) -> str:
    place = f"{seed}/{trial.length}/{trial.depth}/{trial.number}"
    return place if trial.task == "passkey" else f"{trial.task}/{place}"


def packed_tokens(spec: CacheSpec, length: int) -> int:
    """Tokens of a prompt that the answer reads from pages (or from the sink)."""
    if not spec.quantised:
        return -1
    return spec.sink + PAGE * ((length - QUESTION_TOKENS - spec.sink - spec.window) // PAGE)


def grid(jobs: list[Trial], outcomes: list[dict]) -> dict:
    """Outcomes {fp, cache, packed} of trials -> shares over all, and per task, length and depth.

    needle_kept: share of passed trials among those that the unchanged model passes; None if there are none.
    """
    cells: dict[tuple, list[dict]] = {}
    for trial, outcome in zip(jobs, outcomes, strict=True):
        cells.setdefault(trial[:3], []).append(outcome)
    overall = _mean(outcomes)
    return {
        "needle_fp": overall.get("fp"),
        "needle_cache": overall.get("cache"),
        "needle_kept": _mean([outcome for outcome in outcomes if outcome["fp"]]).get("cache"),
        "needle": [{"task": t, "length": n, "depth": d, **_mean(cell)} for (t, n, d), cell in cells.items()],
    }


def fits(model, length: int) -> bool:
    """Whether the model takes a prompt of `length` tokens and the answer."""
    limit = context_length(model)
    if limit is None or length + 2 * QUESTION_TOKENS <= limit:
        return True
    log.info("needle: no trials at %d tokens: with the answer that is more than the model takes, %d", length, limit)
    return False


def _mean(outcomes: list[dict]) -> dict:
    return {name: sum(o[name] for o in outcomes) / len(outcomes) for name in (outcomes[0] if outcomes else ())}
