"""Families x batch x scenario x attention: identity, and real bits inside the window, equal DynamicCache.

Every family meets every scenario in the default run, in one of four combinations of batch and attention that rotate
so that each pair of them meets; the other three are marked exhaustive.
"""

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import FAMILIES, STATEFUL, tiny
from tests.runtime.scenarios import PROMPT, SCENARIOS, Run, possible, reference

WAYS = [(1, "sdpa"), (3, "eager"), (3, "sdpa"), (1, "eager")]
ONLY = {"gemma2": "eager", "falcon": "sdpa"}
"""Families that transformers gives one kind of attention."""
EXACT = {"identity": ("identity", "identity", 0), "in the window": ("static", "token", 100)}


def cells():
    for i, family in enumerate(FAMILIES):
        for j, scenario in enumerate(SCENARIOS):
            only = ONLY.get(family.split("-")[0])
            ways = [way for way in WAYS if possible(family, scenario, way[0]) and only in (None, way[1])]
            for k, (batch, attention) in enumerate(ways):
                marks = () if k == (i + j) % len(ways) else (pytest.mark.slow, pytest.mark.exhaustive)
                name = f"{family}-{scenario}-{batch}-{attention}"
                yield pytest.param(family, scenario, batch, attention, id=name, marks=marks)


@cache
def parts(family: str):
    """Model, a smaller draft of the same family, and the artifacts of EXACT."""
    model = tiny(family)
    ids = torch.randint(3, 290, (1, 30), generator=torch.Generator().manual_seed(7))
    artifacts = {
        name: make_artifact(model, cache_spec(key, value, window=window, sink=2 if window else 0), ids)
        for name, (key, value, window) in EXACT.items()
    }
    return model, artifacts


def make_run(family: str, batch: int, model) -> Run:
    generator = torch.Generator().manual_seed(3)
    ids, more = (torch.randint(3, 290, (batch, n), generator=generator) for n in (PROMPT, 12))
    mask = torch.ones_like(ids)
    for row, pad in zip(range(1, batch), (5, 11), strict=False):
        ids[row, :pad], mask[row, :pad] = 0, 0
    draft = tiny("llama", num_hidden_layers=1)
    return Run(model, draft, ids, mask, more)


@pytest.mark.parametrize(("family", "scenario", "batch", "attention"), cells())
def test_equal_to_dynamic_cache(family, scenario, batch, attention):
    model, artifacts = parts(family)
    gc.collect()
    model.set_attn_implementation(attention)
    run = make_run(family, batch, model)
    tokens, logits = reference(scenario, run, model=model)
    for name, artifact in artifacts.items():
        ours, close = SCENARIOS[scenario](run, lambda artifact=artifact: CalibratedCache(artifact, model))
        assert tokens is None or torch.equal(ours, tokens), name
        if logits is not None:
            bound = 1e-5 * max(1.0, logits.abs().max().item())
            torch.testing.assert_close(close, logits, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


EIGHT = CacheSpec(
    TensorSpec(8, "uniform", "group", group=8, rope="pre"), TensorSpec(8, "uniform", "token", scope="head"), 3, 1
)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_tokens_of_eight_bits_are_nearly_exact(family):
    """Positions, masks, windows, gains and padding of packed tokens, all at once: far from what 4 bits would excuse.

    Half of the tokens, because experts and sharp attention turn a small difference into a large one here and there.
    """
    spec = replace(EIGHT, key=replace(EIGHT.key, rope="post")) if family == "llama-dynamic" else EIGHT
    model, ids = tiny(family), torch.randint(3, 290, (2, 130), generator=torch.Generator().manual_seed(5))
    ours = CalibratedCache(make_artifact(model, spec, ids[:1, :30]), model)
    theirs, mask = DynamicCache(config=model.config), torch.ones_like(ids)
    mask[1, :23] = 0
    positions, errors, largest, start = (mask.cumsum(1) - 1).clamp_min(0), [], 0.0, 0
    with torch.no_grad():
        for size in (40, 1, 1, 40, 5, 1, 30, *[1] * 12):
            part, seen = slice(start, start + size), mask[:, : start + size]
            options = {"attention_mask": seen, "position_ids": positions[:, part]}
            a, b = (model(ids[:, part], cache=cache, **options).logits for cache in (ours, theirs))
            errors.append((a - b).abs().amax(-1)[mask[:, part].bool()])
            largest, start = max(largest, b.abs().max().item()), start + size
    packed = [layer.store.page_counts for layer in ours.layers if hasattr(layer, "store")]
    assert all(min(counts) >= 2 for counts in packed)
    assert torch.cat(errors).median() < 0.012 * largest


@pytest.mark.parametrize("scenario", ["crop", "repeat", "select"])
@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_cannot_go_back_and_says_so(family, scenario):
    model, artifacts = parts(family)
    run = make_run(family, 3, model)
    with pytest.raises((RuntimeError, AttributeError)):
        SCENARIOS[scenario](run, lambda: CalibratedCache(artifacts["identity"], model))
