"""Predictions of one window of text, twice: with a reference cache and with the cache under test.

Both caches are fed the same tokens in the same portions, so that nothing but what they store
differs: a cache that stores exactly what it gets scores KL 0, the same perplexity and top-1
agreement 1, to the last bit.

    chunk = window length    everything in one pass: for `SimulatedCache`
    chunk < window length    for `CalibratedCache`, whose later chunks read what earlier ones
                             packed; a single pass attends to the pass's own exact keys and values

A window of n tokens predicts n - 1: all but its first. Only one chunk's logits are in memory.
"""

import torch
from transformers.cache_utils import Cache

from kvcalib.eval.fidelity import Fidelity


def compare(model, window: torch.Tensor, reference: Cache, candidate: Cache, *, chunk: int) -> Fidelity:
    """window int64 [n]; both caches empty before, and filled with the whole window afterwards."""
    fidelity = Fidelity()
    for start in range(0, len(window), chunk):
        part = window[start : start + chunk]
        targets = window[start + 1 : start + chunk + 1]  # one less than `part` at the end
        expected, actual = (_logits(model, part, cache) for cache in (reference, candidate))
        fidelity.observe(expected[: len(targets)], actual[: len(targets)], targets)
    return fidelity


def _logits(model, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """ids [T] -> logits [T, V]."""
    return model(ids[None], cache=cache, use_cache=True).logits[0]
