"""Everything that is timed: the content of bench.json.

conditions   machine, threads, kernel, and how busy other programs were
attention    the attention call alone, see attention_speed.py
decode       whole steps inside generate(), see decode_speed.py
prefill      a prompt in one pass, time and memory, see prefill_speed.py
calibration  collect and fisher against plain passes, see calibration_speed.py
stages       seconds of the run's stages, as recorded
"""

import logging
import time
from collections.abc import Callable, Iterable

import torch

from kvcalib.artifact.schema import Artifact
from kvcalib.errors import ConfigError
from kvcalib.eval import attention_speed, decode_speed, prefill_speed
from kvcalib.eval.calibration_speed import calibration_speed
from kvcalib.eval.conditions import BUSY_CORES, Watch, conditions, others_now
from kvcalib.eval.contenders import check_layers, contenders, prefilled
from kvcalib.eval.synthetic import Shape
from kvcalib.eval.timing import Ticker
from kvcalib.models.families import layer_shapes

log = logging.getLogger(__name__)

Progress = Callable[[Iterable, int, str], Iterable]


def bench(
    model,
    artifact: Artifact,
    ids: torch.Tensor,
    *,
    shapes: list[str],
    formats: list[str],
    lengths: list[int],
    batches: list[int],
    contexts: list[int],
    peers: list[str],
    prefill: list[int],
    steps: int,
    rounds: int,
    longest: int,
    calibration: tuple[torch.Tensor, Callable[[], object]] | None,
    stages: dict[str, dict],
    seed: int,
    progress: Progress,
) -> dict:
    """ids int64 [T] of some text, repeated where it is too short. longest: tokens that the model takes.

    calibration: windows and what measures them, or None. Raises ConfigError before anything is timed.
    """
    for name, counts in (("contexts", contexts), ("prefill", prefill)):
        if over := [count for count in counts if count > longest]:
            log.warning("bench.%s: the model takes %d tokens, so these are cut to it: %s", name, longest, over)
    contexts, prefill = (capped(counts, longest) for counts in (contexts, prefill))
    check_speed(model, contexts, prefill, steps=steps, rounds=rounds)
    watch, before = Watch(), others_now()
    found = conditions(model) | {"others_before": before}
    if before is not None and before > BUSY_CORES:
        log.warning("bench: other programs are using %.1f of %d cores; timings will say so", before, found["cores"])
    training, start = model.training, time.perf_counter()
    model.eval()
    try:
        sections = {
            "attention": _attention(model, artifact, shapes, formats, lengths, batches, rounds, seed, progress),
            **_caches(model, artifact, ids, peers, contexts, batches, prefill, steps, rounds, progress),
            "calibration": _calibration(model, calibration, rounds, progress),
        }
    finally:
        model.train(training)
    during = watch.others()
    found |= {"others_during": during, "disturbed": during is not None and during > BUSY_CORES}
    found |= {"seconds": time.perf_counter() - start}
    return {"conditions": found, "format": artifact.spec.to_dict(), **sections, "stages": stages}


def capped(counts: list[int], longest: int) -> list[int]:
    """Sorted, each at most `longest`, none twice."""
    return sorted({min(count, longest) for count in counts})


def check_speed(model, contexts: list[int], prefill: list[int], *, steps: int, rounds: int) -> None:
    """Raises ConfigError for contexts that are over before the last round is, and for models without a plain cache."""
    shortest = decode_speed.shortest_context(steps, rounds)
    if contexts and contexts[0] < shortest:
        raise ConfigError(
            f"bench.contexts={contexts[0]} is too short for bench.rounds={rounds} of bench.steps={steps} tokens:"
            f" use {shortest} or more, or fewer of these"
        )
    if contexts or prefill:
        check_layers(model)


def parse_shapes(model, shapes: list[str]) -> list[Shape]:
    """ "model", or query heads / heads / channels -> shapes, none twice."""
    first = next(iter(layer_shapes(model).values()))
    own = Shape(first.query_heads, first.heads, first.key_dim)
    return list(dict.fromkeys(own if text == "model" else Shape(*map(int, text.split("/"))) for text in shapes))


def _attention(model, artifact, shapes, formats, lengths, batches, rounds, seed, progress) -> list[dict]:
    cases = [
        attention_speed.Case(shape, batch, tokens)
        for shape in parse_shapes(model, shapes)
        for tokens in sorted(lengths)
        for batch in batches
    ]
    ticker = Ticker(progress, sum(map(_attention_work, cases)), "bench, attention")
    rows = []
    for case in cases:
        one = [case]
        rows += attention_speed.attention_speed(artifact, one, formats, rounds=rounds, seed=seed, ticker=lambda _: None)
        ticker(_attention_work(case))
    ticker.close()
    return rows


def _attention_work(case: attention_speed.Case) -> int:
    return 1 + attention_speed.fp32_bytes(case) // 2**23


def _caches(model, artifact, ids, peers, contexts, batches, prefill, steps, rounds, progress) -> dict[str, list[dict]]:
    """What needs caches with a real text in them."""
    needed = max([*contexts, *prefill], default=0)
    if not needed:
        return {"decode": [], "prefill": []}
    ids = ids.repeat(-(-needed // len(ids)))[:needed].to(model.device)
    with torch.no_grad():
        against = contenders(model, artifact, peers)
        bar = Ticker(progress, needed, "bench, filling caches")
        full = next((each.model for each in against if each.name == "full"), model)
        states = prefilled(full, ids, tick=bar)
        bar.close()
    cases = [decode_speed.Case(batch, context) for context in contexts for batch in batches]
    total = sum(decode_speed.work(case, rounds, len(against)) for case in cases)
    bar = Ticker(progress, total, "bench, decoding")
    decode = decode_speed.decode_speed(against, states, ids, cases, steps=steps, rounds=rounds, ticker=bar)
    bar.close()
    total = sum(prefill_speed.work(length, rounds, len(prefill_speed.compared(against))) for length in prefill)
    bar = Ticker(progress, total, "bench, prompts")
    prompts = prefill_speed.prefill_speed(against, states, ids, prefill, rounds=rounds, ticker=bar)
    bar.close()
    return {"decode": decode, "prefill": prompts}


def _calibration(model, calibration, rounds: int, progress: Progress) -> dict | None:
    if calibration is None:
        return None
    windows, measure = calibration
    bar = Ticker(progress, rounds, "bench, calibration")
    found = calibration_speed(model, windows, measure, rounds=rounds, ticker=bar)
    bar.close()
    return found
