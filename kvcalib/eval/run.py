"""Everything that is measured on held-out text: the content of metrics.json.

perplexity  simulated (a window in one pass) and through the real cache (in chunks), each beside the
            unchanged model fed in the same way. `ppl_fp` belongs to `ppl_cache`, `ppl_fp_whole` to
            `ppl_simulated`; the two differ by rounding only
memory      what the cache holds after a full window: true bits per element at that context
outliers    stored share, and the share of held-out elements beyond the calibrated range
needle      retrieval from packed pages
sample      one continuation, for the eye
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers.cache_utils import DynamicCache

from kvcalib.artifact.schema import Artifact
from kvcalib.errors import ConfigError
from kvcalib.eval.fidelity import Fidelity, merged
from kvcalib.eval.needle import needle
from kvcalib.eval.outliers import FrameHits, stored_rate
from kvcalib.eval.perplexity import compare
from kvcalib.eval.prompts import check_needles
from kvcalib.eval.sample import check_prompt, sample
from kvcalib.quant.spec import PAGE, CacheSpec
from kvcalib.runtime.cache import CalibratedCache
from kvcalib.runtime.simulate import SimulatedCache

_MEMORY = (
    "bits_per_element_key",
    "bits_per_element_value",
    "bytes_per_token",
    "bytes_per_token_fp16",
    "compression",
    "page_bits_key",
    "page_bits_value",
    "compression_pages",
)


def evaluate(
    model,
    tokenizer,
    artifact: Artifact,
    windows: torch.Tensor,
    *,
    chunk: int,
    needle_tasks: list[str],
    needle_lengths: list[int],
    needle_depths: list[float],
    needle_trials: int,
    sample_tokens: int,
    prompt: str | None,
    seed: int,
    progress: Callable[[Iterable, int, str], Iterable],
) -> dict:
    """windows int64 [n, length] of held-out text -> metrics, JSON types.

    chunk: tokens per pass through the real cache. Raises ConfigError for NaN logits, and before anything runs for
    settings under which nothing would be measured.
    """
    check_pages(artifact.spec, windows.shape[1], chunk)
    check_prompt(model, tokenizer, prompt)
    if needle_trials > 0:
        check_needles(tokenizer, needle_lengths, needle_depths, tasks=needle_tasks)
    windows, seconds = windows.to(model.device), {}
    with _evaluating(model), torch.no_grad():
        cache = CalibratedCache(artifact, model)
        simulated, hits = _simulated(model, artifact, windows, progress, seconds)
        real = _real(model, cache, windows, chunk, progress, seconds)
        memory = cache.memory_report()
        with _timed(seconds, "needle"):
            plan = {"tasks": needle_tasks, "lengths": needle_lengths, "depths": needle_depths, "trials": needle_trials}
            needles = needle(model, tokenizer, cache, artifact.spec, **plan, seed=seed, progress=progress)
        with _timed(seconds, "sample"):
            cache.reset()
            shown = sample(model, tokenizer, cache, windows[0], prompt=prompt, tokens=sample_tokens)
    return {
        **_predictions(simulated, real),
        **{name: memory.get(name) for name in _MEMORY},
        "outlier_rate_key": stored_rate(artifact, "key"),
        "outlier_rate_value": stored_rate(artifact, "value"),
        **hits,
        **needles,
        "window": windows.shape[1],
        "windows": windows.shape[0],
        "chunk": chunk,
        "memory": memory,
        "sample": shown,
        "seconds": seconds,
    }


def check_pages(spec: CacheSpec, length: int, chunk: int) -> None:
    """Raises ConfigError if the last chunk of a window would find no page to read."""
    needed = spec.sink + spec.window + PAGE
    if spec.quantised and (length - 1) // chunk * chunk < needed:
        remedies = [f"eval.length={-(-needed // chunk) * chunk + 1} or more"]
        remedies += [f"eval.chunk={length - 1 - needed} or less"] if length - 1 > needed else []
        remedies += ["a smaller quant.window"] if spec.window else []
        raise ConfigError(
            f"eval.length={length} measures nothing quantised: quant.sink={spec.sink} and quant.window={spec.window}"
            f" tokens stay exact, and a page of {PAGE} more must be full before the last eval.chunk={chunk} tokens"
            f" read it; use {', or '.join(remedies)}"
        )


def _simulated(model, artifact: Artifact, windows, progress, seconds) -> tuple[list[Fidelity], dict]:
    hits, results = FrameHits(artifact, model), []
    with _timed(seconds, "simulated"):
        for window in progress(windows, len(windows), "perplexity, simulated"):
            exact, cache = DynamicCache(config=model.config), SimulatedCache(artifact, model)
            results.append(compare(model, window, exact, cache, chunk=len(window)))
            hits.observe(exact, len(window))
    return results, hits.result()


def _real(model, cache, windows, chunk: int, progress, seconds) -> list[Fidelity]:
    results = []
    with _timed(seconds, "cache"):
        for window in progress(windows, len(windows), "perplexity, cache"):
            cache.reset()
            exact = DynamicCache(config=model.config)
            results.append(compare(model, window, exact, cache, chunk=chunk))
    return results


def _predictions(simulated: list[Fidelity], real: list[Fidelity]) -> dict:
    ideal, cached = merged(simulated), merged(real)
    return {
        "ppl_fp": cached.ppl_reference,
        "ppl_cache": cached.ppl,
        "kl_cache": cached.mean_kl,
        "top1_agreement": cached.top1,
        "ppl_fp_whole": ideal.ppl_reference,
        "ppl_simulated": ideal.ppl,
        "kl_simulated": ideal.mean_kl,
        "top1_simulated": ideal.top1,
        "tokens": cached.tokens,
        "per_window": {
            "ppl_fp": [f.ppl_reference for f in real],
            "ppl_cache": [f.ppl for f in real],
            "kl_cache": [f.mean_kl for f in real],
            "ppl_simulated": [f.ppl for f in simulated],
            "kl_simulated": [f.mean_kl for f in simulated],
        },
    }


@contextmanager
def _evaluating(model) -> Iterator[None]:
    """Dropout and the like off, as long as it lasts."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _timed(seconds: dict, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
