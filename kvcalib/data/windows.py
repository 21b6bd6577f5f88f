"""Text to token windows of one length, and the hash that says whether two runs used the same ones.

The text is tokenised once, as a whole, and cut into pieces that do not overlap:

    start    the first pieces, one after the other
    spread   the text in `count` equal parts, the first piece of each
    random   pieces drawn without repetition by `seed`, in text order

A tokenizer that starts texts with a BOS token gets exactly one at the start of every window, at the
price of one token of text: Gemma and Llama compute other keys without it, and a sink is learned for
it. Other special tokens are not added.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from kvcalib.errors import ConfigError


@dataclass(frozen=True)
class Windows:
    """ids int64 [count, length]; `source` says how they were made, ready for JSON."""

    ids: torch.Tensor
    hash: str
    source: dict


def make_windows(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    length: int,
    order: str,
    seed: int,
    max_length: int | None,
) -> Windows:
    """`count` windows of `length` tokens, BOS included.

    Raises ConfigError when the text has fewer or the model takes no such length.
    """
    _check(count, length, max_length)
    bos = leading_bos(tokenizer)
    tokens = _tokenise(text, tokenizer)
    span = length - (bos is not None)
    starts = ORDERS[order](len(tokens), span, _affordable(len(tokens), span, count, length), seed)
    ids = torch.stack([tokens[start : start + span] for start in starts])
    if bos is not None:
        ids = torch.cat([torch.full((count, 1), bos), ids], dim=1)
    source = {
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_tokens": len(tokens),
        "tokenizer": tokenizer_identity(tokenizer),
        "bos": bos,
        "count": count,
        "length": length,
        "order": order,
        "seed": seed if order == "random" else None,
    }
    return Windows(ids, _hash(ids, bos, source["tokenizer"]), source)


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the BOS token where the tokenizer starts a text with it by itself, else None."""
    bos = tokenizer.bos_token_id
    starts_with = tokenizer("a").input_ids[:1]
    return bos if bos is not None and starts_with == [bos] else None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything that decides which ids a text gets; equal in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else {}
    kept = {k: v for k, v in parts.items() if k not in ("truncation", "padding")}
    kept |= {"vocabulary": tokenizer.get_vocab(), "bos": leading_bos(tokenizer)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def with_repeats(ids: torch.Tensor, share: float) -> tuple[torch.Tensor, int]:
    """ids [count, length] -> (the same, some windows with their second half like their first; how many).

    They are the share, rounded half up, evenly spread. The first token, or two, are not repeated: there may be a BOS.
    """
    count, length = ids.shape
    chosen, half = int(share * count + 0.5), (length - 1) // 2
    repeated = ids.clone()
    for i in range(chosen):
        window = (2 * i + 1) * count // (2 * chosen)
        repeated[window, length - half :] = ids[window, length - 2 * half : length - half]
    return repeated, chosen


def _check(count: int, length: int, max_length: int | None) -> None:
    if count < 1 or length < 2:
        raise ConfigError(
            f"{count} windows of {length} tokens: at least one window of at least two tokens is"
            " needed (data.windows, data.length, eval.windows, eval.length)"
        )
    if max_length is not None and length > max_length:
        raise ConfigError(
            f"windows of {length} tokens are longer than the {max_length} that the model takes:"
            " lower data.length or eval.length"
        )


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """All tokens of the text, int64, without special ones; `verbose` would warn of the length."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return torch.tensor(encoded.input_ids, dtype=torch.int64)


def _affordable(tokens: int, span: int, count: int, length: int) -> int:
    available = tokens // span
    if count > available:
        raise ConfigError(
            f"{count} windows of {length} tokens were asked for, but the text has only {available}"
            f" ({tokens} tokens): lower data.windows or data.length (eval.windows, eval.length),"
            " or give more text with data.path (data.eval_path)"
        )
    return count


def _start(tokens: int, span: int, count: int, seed: int) -> list[int]:
    return [span * i for i in range(count)]


def _spread(tokens: int, span: int, count: int, seed: int) -> list[int]:
    return [tokens * i // count for i in range(count)]


def _random(tokens: int, span: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(tokens // span, generator=generator)[:count]
    return (drawn.sort().values * span).tolist()


ORDERS = {"start": _start, "spread": _spread, "random": _random}


def _hash(ids: torch.Tensor, bos: int | None, tokenizer: str) -> str:
    digest = hashlib.sha256(json.dumps([list(ids.shape), bos, tokenizer]).encode())
    digest.update(ids.contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()
