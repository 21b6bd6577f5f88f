"""Needle in a haystack: is one sentence, somewhere in a long text, still readable from the cache?

    haystack   sentences about a landscape, order by seed, cut at its start to the wanted length
    needle     a sentence with a pass key of five digits, at `depth` of the haystack (0 first)
    question   at the end, plain text that a base model can continue with the key

A trial is passed when the first digits of the greedy continuation are the key. The last
`QUESTION_TOKENS` tokens of the prompt are a pass of their own, see `sample`: they and the whole
answer read the needle from packed pages, provided that it lies before the exact window. `packed` in
a row of the grid is the share of trials where it does.
"""

import logging
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.errors import ConfigError
from kvcalib.eval.sample import continue_both
from kvcalib.models.families import context_length
from kvcalib.quant.spec import PAGE, CacheSpec

log = logging.getLogger(__name__)

QUESTION_TOKENS = 8
_INTRO = "Somewhere in the long text below there is a pass key. Find it and memorize it."
_FILLER = (
    "The grass on the hill is green and soft.",
    "The sky over the lake is wide and blue.",
    "A slow river runs past the old mill.",
    "White clouds drift above the quiet fields.",
    "The path leads down to the village and back again.",
    "Birds sing in the trees along the road.",
)
_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
_QUESTION = "What is the pass key? The pass key is"


class Prompt(NamedTuple):
    """ids: the tokens; needle_end: index of the first token behind the needle."""

    ids: list[int]
    needle_end: int


def build_prompt(tokenizer, length_tokens: int, depth: float, key: str, seed: int) -> Prompt:
    """At most `length_tokens` tokens, and less by no more than a word of filler takes.

    Raises ConfigError if needle and question alone are longer.
    """
    words = _haystack(seed, length_tokens)
    check_needles(tokenizer, [length_tokens], [depth], key=key)

    def size(count: int) -> int:
        return len(_encode(tokenizer, "".join(_assemble(words[len(words) - count :], depth, key))))

    count = bisect_right(range(len(words) + 1), length_tokens, key=size) - 1
    before, after = _assemble(words[len(words) - count :], depth, key)
    return Prompt(_encode(tokenizer, before + after), len(_encode(tokenizer, before)))


def check_needles(tokenizer, lengths: list[int], depths: list[float], *, key: str = "55555") -> None:
    """Raises ConfigError if needle and question alone are longer than one of `lengths`."""
    if not lengths:
        return
    frame = max((len(_encode(tokenizer, "".join(_assemble([], depth, key)))) for depth in depths), default=0)
    if frame > min(lengths):
        raise ConfigError(
            f"eval.needle_lengths={min(lengths)} is too short: needle and question alone take {frame} tokens,"
            f" so type a length of {frame} or more, or eval.needle_lengths=[]"
        )


def found(text: str, key: str) -> bool:
    """Are the first digits of the continuation the key?"""
    digits = re.search(r"\d+", text)
    return digits is not None and digits[0].startswith(key)


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
    progress: Callable[[Iterable, int, str], Iterable],
) -> dict:
    """needle_fp, needle_cache: share of passed trials, None without any; needle: rows of the grid;
    needle_skipped: lengths that the model does not take.

    cache: a CalibratedCache, reset before every trial.
    """
    fitting = [n for n in lengths if _fits(model, n)]
    jobs = [(n, d, t) for n in fitting for d in depths for t in range(trials)]
    cells: dict[tuple, list[dict]] = {}
    for length, depth, trial in progress(jobs, len(jobs), "needle") if jobs else ():
        outcome = _trial(model, tokenizer, cache, spec, length, depth, f"{seed}/{length}/{depth}/{trial}")
        cells.setdefault((length, depth), []).append(outcome)
    rows = [{"length": n, "depth": d, **_mean(outcomes)} for (n, d), outcomes in cells.items()]
    overall = _mean([o for outcomes in cells.values() for o in outcomes])
    return {
        "needle_fp": overall.get("fp"),
        "needle_cache": overall.get("cache"),
        "needle": rows,
        "needle_skipped": [n for n in lengths if n not in fitting],
    }


def _trial(model, tokenizer, cache: Cache, spec: CacheSpec, length: int, depth: float, seed: str) -> dict:
    random_ = random.Random(seed)
    key = str(random_.randint(10000, 99999))
    prompt = build_prompt(tokenizer, length, depth, key, random_.getrandbits(32))
    ids = torch.tensor(prompt.ids, device=model.device)
    cache.reset()
    tokens = len(tokenizer(f" {key}.", add_special_tokens=False).input_ids) + 1
    exact = DynamicCache(config=model.config)
    answers = continue_both(model, ids, exact, cache, tokens=tokens, last=QUESTION_TOKENS)
    stored = spec.sink + PAGE * ((len(ids) - QUESTION_TOKENS - spec.sink - spec.window) // PAGE)
    packed = spec.quantised and prompt.needle_end <= stored
    fp, cached = (found(tokenizer.decode(answer), key) for answer in answers)
    return {"fp": fp, "cache": cached, "packed": packed}


def _fits(model, length: int) -> bool:
    limit = context_length(model)
    if limit is None or length + 2 * QUESTION_TOKENS <= limit:
        return True
    log.info("needle: no trials at %d tokens, the model takes %d", length, limit)
    return False


def _mean(outcomes: list[dict]) -> dict:
    return {name: sum(o[name] for o in outcomes) / len(outcomes) for name in (outcomes[0] if outcomes else ())}


def _haystack(seed: int, words: int) -> list[str]:
    """At least `words` words; every word is at least one token."""
    random_ = random.Random(seed)
    result: list[str] = []
    while len(result) < words:
        sentences = list(_FILLER)
        random_.shuffle(sentences)
        result += " ".join(sentences).split()
    return result


def _assemble(words: list[str], depth: float, key: str) -> tuple[str, str]:
    """The text up to the end of the needle, and the rest."""
    starts = [i for i in range(len(words) + 1) if i in (0, len(words)) or words[i - 1].endswith(".")]
    place = min(starts, key=lambda i: abs(i - depth * len(words)))
    before = [_INTRO, " ".join(words[:place]), _NEEDLE.format(key=key)]
    after = [" ".join(words[place:]), _QUESTION]
    return " ".join(filter(None, before)), "".join(" " + part for part in after if part)


def _encode(tokenizer, text: str) -> list[int]:
    """Tokens with the BOS that the tokenizer puts there by itself, but without an EOS."""
    ids = tokenizer(text).input_ids
    ended = len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ended else ids
