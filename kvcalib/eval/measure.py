"""One member of a comparison: bits, predictions and retrieval, against a finished `reference`.

Predictions are those of the ideal protocol: a window in one pass, every token past the sink read as it comes back
from its page. Retrieval goes through the real cache.

    bits_key, bits_value   per element inside pages: codes, ranges, outliers, pointers
    bits                   per element of a whole window, its exact first and last tokens included
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.artifact.schema import Artifact
from kvcalib.eval.fidelity import Fidelity, merged
from kvcalib.eval.needle import answered, grid, packed_tokens
from kvcalib.eval.outliers import FrameHits
from kvcalib.eval.peers import MULTIPLE, IdealPeer, Peer, check_peer, real_peer
from kvcalib.eval.reference import FACTS, head, read_hidden, read_trials
from kvcalib.quant.page import PageLayout
from kvcalib.quant.spec import PAGE
from kvcalib.runtime.cache import CalibratedCache
from kvcalib.runtime.simulate import SimulatedCache

_SPARSE_BITS = 32
"""Of one outlier: fp16 and a position of 16 bits."""
Progress = Callable[[Iterable, int, str], Iterable]


class Member(Protocol):
    """What is compared: fresh caches, and bits per element once an ideal one has seen a window.

    multiple: of how many tokens a prompt must be; packed: how many of them the answer reads from pages; exact: tokens
    of a window that are not quantised.
    """

    multiple: int
    exact: int

    def ideal(self) -> Cache: ...

    def real(self) -> Cache: ...

    def packed(self, length: int) -> int: ...

    def bits(self, exact: Callable[[], DynamicCache], tokens: int) -> dict: ...


class Calibrated:
    """An artifact of ours."""

    multiple = 1

    def __init__(self, artifact: Artifact, model):
        self.artifact, self.model = artifact, model
        self.exact = artifact.spec.sink + artifact.spec.window

    def ideal(self) -> Cache:
        return SimulatedCache(self.artifact, self.model)

    def real(self) -> Cache:
        return CalibratedCache(self.artifact, self.model)

    def packed(self, length: int) -> int:
        return packed_tokens(self.artifact.spec, length)

    def bits(self, exact: Callable[[], DynamicCache], tokens: int) -> dict:
        """Of a page; outliers beyond thresholds by their number, as rows of changing length would store them."""
        hits = FrameHits(self.artifact, self.model)
        if any(getattr(self.artifact.spec, name).range == "static" for name in ("key", "value")):
            hits.observe(exact(), tokens)
        rates = hits.result()
        return {**{f"bits_{n}": self._page_bits(n, rates) for n in ("key", "value")}, **rates}

    def _page_bits(self, name: str, rates: dict) -> float:
        spec, bits, elements = getattr(self.artifact.spec, name), 0, 0
        for tables in self.artifact.layers.values():
            layout = PageLayout(self.artifact.spec, tables.key, tables.value)
            shape = getattr(tables, name).zero.shape
            count = PAGE * shape[0] * shape[1]
            bits += 8 * (layout.tensor_bytes(name) + layout.common_bytes / 2)
            if spec.rank == "threshold":
                bits += _SPARSE_BITS * (rates[f"outlier_hit_rate_{name}"] * count - spec.outliers_per_page(*shape))
            elements += count
        return bits / elements


class Foreign:
    """A cache of another library."""

    multiple = MULTIPLE

    def __init__(self, peer: Peer, model, sink: int):
        self.peer, self.model, self.sink, self.exact, self.seen = peer, model, sink, sink, None
        check_peer(peer, model)  # refused before anything runs

    def ideal(self) -> Cache:
        self.seen = IdealPeer(self.peer, self.model, self.sink)
        return self.seen

    def real(self) -> Cache:
        return real_peer(self.peer, self.model)

    def packed(self, length: int) -> int:
        return length

    def bits(self, exact: Callable[[], DynamicCache], tokens: int) -> dict:
        return {f"bits_{name}": sum(found) / len(found) for name, found in self.seen.bits.items()}


def measure(
    model, tokenizer, member: Member, windows: torch.Tensor, reference: Path, *, seed: int, progress: Progress
) -> dict:
    """windows int64 [n, T] and the folder of their `reference` -> metrics of the member, JSON types."""
    windows = windows.to(model.device)
    with torch.no_grad():
        pairs = zip(windows, read_hidden(reference), strict=True)
        parts = [_compare(model, member.ideal(), *pair) for pair in progress(pairs, len(windows), "perplexity")]
        bits = member.bits(lambda: _exact(model, windows[0]), windows.shape[1])
        needles = _needles(model, tokenizer, member, reference, seed, progress)
    total = merged(parts)
    facts = json.loads((Path(reference) / FACTS).read_text(encoding="utf-8"))
    return {
        "bits": _stored(bits, member.exact, windows.shape[1]),
        **bits,
        "ppl_fp": facts["ppl_fp"],
        "ppl": total.ppl,
        "rise": total.ppl / facts["ppl_fp"] - 1,
        "kl": total.mean_kl,
        "top1": total.top1,
        "kl_windows": [part.mean_kl for part in parts],
        "tokens": total.tokens,
        **needles,
    }


def _stored(bits: dict, exact: int, tokens: int) -> float:
    """Bits per element at `tokens` tokens, those kept exact counted with 16."""
    exact = min(exact, tokens)
    return (16 * exact + (tokens - exact) * (bits["bits_key"] + bits["bits_value"]) / 2) / tokens


def _compare(model, cache: Cache, window: torch.Tensor, hidden: torch.Tensor) -> Fidelity:
    part = Fidelity()
    logits = model(window[None], cache=cache, use_cache=True).logits[0]
    part.observe(head(model, hidden)[:-1], logits[:-1], window[1:])
    return part


def _exact(model, window: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model.base_model(window[None], cache=cache, use_cache=True)
    return cache


def _needles(model, tokenizer, member: Member, reference: Path, seed: int, progress: Progress) -> dict:
    known, outcomes = read_trials(reference), []
    for trial, fp in progress(known, len(known), "needles") if known else ():
        passed, length, end = answered(model, tokenizer, member.real(), trial, seed, member.multiple)
        outcomes.append({"fp": fp, "cache": passed, "packed": end <= member.packed(length)})
    return grid([trial for trial, _ in known], outcomes)
