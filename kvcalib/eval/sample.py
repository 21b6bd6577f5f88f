"""Greedy continuation of a text, token by token, from any cache; and the one that a report shows.

The prompt goes in as two passes. What a cache packs after the first, the second reads, and with it
every token that follows: the first new token already depends on the quantised prompt. In one pass
it would not, because a prompt attends to its own exact keys and values.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.errors import ConfigError
from kvcalib.models.families import attention_modules, context_length

log = logging.getLogger(__name__)


def continue_greedily(
    model,
    ids: torch.Tensor,
    cache: Cache,
    *,
    tokens: int,
    last: int = 1,
    stop: frozenset = frozenset(),
) -> list[int]:
    """ids int64 [T], cache empty -> at most `tokens` new ids, ending before an id in `stop`.

    last: how many tokens of the prompt form its second pass.
    """
    if len(ids) > last:
        model.base_model(ids[None, :-last], cache=cache, use_cache=True)
    return _greedy(model, ids[-last:], cache, tokens, stop)


def continue_both(
    model,
    ids: torch.Tensor,
    exact: Cache,
    cache: Cache,
    *,
    tokens: int,
    last: int = 1,
    stop: frozenset = frozenset(),
) -> tuple[list[int], list[int]]:
    """`continue_greedily` from both caches, with one first pass where that fills both.

    It does when every layer caches keys and values: nothing is packed before the pass ends, so either cache is given
    the same ones.
    """
    if len(attention_modules(model)) < len(cache.layers):
        return tuple(
            continue_greedily(model, ids, each, tokens=tokens, last=last, stop=stop) for each in (exact, cache)
        )
    if len(ids) > last:
        with _copying(cache, exact):
            model.base_model(ids[None, :-last], cache=cache, use_cache=True)
    return tuple(_greedy(model, ids[-last:], each, tokens, stop) for each in (exact, cache))


@contextmanager
def _copying(cache: Cache, other: Cache) -> Iterator[None]:
    """What is stored in `cache` is stored in `other` too."""
    update = cache.update

    def both(key, value, layer_idx, *args, **kwargs):
        other.update(key, value, layer_idx, *args, **kwargs)
        return update(key, value, layer_idx, *args, **kwargs)

    cache.update = both
    try:
        yield
    finally:
        del cache.update


def _greedy(model, part: torch.Tensor, cache: Cache, tokens: int, stop: frozenset) -> list[int]:
    new: list[int] = []
    while len(new) < tokens:
        logits = model(part[None], cache=cache, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        if token in stop:
            break
        new.append(token)
        part = part.new_tensor([token])
    return new


def stop_ids(model, tokenizer) -> frozenset[int]:
    """The ids that end a text: the model's own and the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def check_prompt(model, tokenizer, prompt: str | None) -> None:
    """Raises ConfigError for a prompt that has no tokens, or more than the model takes."""
    if prompt is None:
        return
    tokens = len(tokenizer(prompt).input_ids) if prompt else 0
    if tokens == 0:
        raise ConfigError(f"eval.prompt={prompt!r} has no tokens; use eval.prompt=null for held-out text")
    _fitting(model, tokens, 1)


def sample(model, tokenizer, cache: Cache, window: torch.Tensor, *, prompt: str | None, tokens: int) -> dict | None:
    """{prompt, fp, cache} as text; None for no tokens.

    Without a prompt, the first half of `window` is continued.
    """
    if tokens == 0:
        return None
    check_prompt(model, tokenizer, prompt)
    ids = window[: max(len(window) // 2, 1)] if prompt is None else window.new_tensor(tokenizer(prompt).input_ids)
    tokens = _fitting(model, len(ids), tokens)
    stop = stop_ids(model, tokenizer)
    exact = DynamicCache(config=model.config)
    fp, cached = continue_both(model, ids, exact, cache, tokens=tokens, stop=stop)
    texts = {"fp": tokenizer.decode(fp), "cache": tokenizer.decode(cached)}
    return {"prompt": tokenizer.decode(ids.tolist(), skip_special_tokens=True), **texts}


def _fitting(model, prompt_tokens: int, tokens: int) -> int:
    limit = context_length(model)
    if limit is None or prompt_tokens + tokens <= limit:
        return tokens
    if prompt_tokens >= limit:
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens and the model takes {limit}; shorten eval.prompt or eval.length"
        )
    log.info("sample: %d tokens instead of %d, the model takes %d", limit - prompt_tokens, tokens, limit)
    return limit - prompt_tokens
