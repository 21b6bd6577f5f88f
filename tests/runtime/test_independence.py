"""With real bits, results depend on the tokens alone: not on batching, arrival, detours or threads.

Models compute in float64 here, so that a matrix product of another shape rounds far below a code's step and bits can
be compared as bits. Attention over pages is fp32 inside; its logits agree to that.
"""

import pytest
import torch

from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import FAMILIES, STATEFUL, tiny

TOKENS, PADS = 90, (0, 5, 17)
SHORT = ("llama-dynamic", "phi3-longrope")
"""Families whose frequencies hold for 32 tokens only: less than a page and its sink."""
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "jamba", "glm4_moe")
"""Their grouped product has no float64."""
LONG = [family for family in FAMILIES if family not in SHORT]


def wide(family: str):
    return tiny(family) if family in EXPERTS else tiny(family).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (3, TOKENS), generator=torch.Generator().manual_seed(3))


def artifact_of(model, ids, **options):
    return make_artifact(model, cache_spec(**{"window": 4, "sink": 2} | options), ids[:1, :30])


def stores(cache) -> list:
    return [layer.store for layer in cache.layers if hasattr(layer, "store")]


def pages(store, row: int = 0) -> torch.Tensor:
    return store.pages[row, : store.page_counts[row]]


def forward(model, ids, cache, sizes):
    with torch.no_grad():
        return torch.cat([model(part, cache=cache).logits for part in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("family", [family for family in LONG if family != "bamba"])  # its own padded steps differ
def test_rows_of_a_padded_batch_are_their_single_runs(family, ids):
    model, ids, mask = wide(family), ids.clone(), torch.ones_like(ids)
    for row, pad in enumerate(PADS):
        ids[row, :pad], mask[row, :pad] = 0, 0
    artifact, positions = artifact_of(model, ids), (mask.cumsum(1) - 1).clamp_min(0)
    both, logits = CalibratedCache(artifact, model), []
    with torch.no_grad():
        model(ids[:, :-2], attention_mask=mask[:, :-2], position_ids=positions[:, :-2], cache=both)
        for last in (TOKENS - 1, TOKENS):
            step = slice(last - 1, last)
            seen, place = mask[:, :last], positions[:, step]
            logits.append(model(ids[:, step], attention_mask=seen, position_ids=place, cache=both).logits)
    for row, pad in enumerate(PADS):
        single = CalibratedCache(artifact, model)
        alone = forward(model, ids[row : row + 1, pad:], single, [TOKENS - pad - 2, 1, 1])
        bound = 0.05 if family in EXPERTS else 2e-3  # in float32 a code may fall to the other side
        torch.testing.assert_close(torch.cat(logits, 1)[row], alone[0, -2:], rtol=0, atol=bound)
        for ours, theirs in zip(stores(both), stores(single), strict=True):
            assert ours.page_counts[row] == theirs.page_counts[0] > 0
            different = pages(ours, row) != pages(theirs)
            assert different.float().mean() < 0.03 if family in (*EXPERTS, *STATEFUL) else not different.any()
            assert ours.sink_counts[row] == 2
            torch.testing.assert_close(ours.sink_key[row], theirs.sink_key[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", [family for family in LONG if family not in (*EXPERTS, *STATEFUL)])
def test_the_first_layer_packs_the_same_bits_however_tokens_arrive(family, ids):
    """Deeper layers see what the attention before them saw, and that is the packed past only from the next call on."""
    model = wide(family)
    artifact, expected = artifact_of(model, ids), None
    for sizes in ([TOKENS], [7] * 12 + [6], [40, 1, 1, 48], [1] * TOKENS):
        cache = CalibratedCache(artifact, model)
        forward(model, ids[:1], cache, sizes)
        packed = pages(stores(cache)[0]).clone()
        expected = packed if expected is None else expected
        assert len(packed) > 0
        assert torch.equal(packed, expected[-len(packed) :])  # a sliding window forgets its first pages sooner or later


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "glm", "gpt_neox", "gpt2", "falcon", "phi3"])
def test_a_detour_within_the_window_leaves_no_trace(family, ids):
    model = wide(family)
    artifact = artifact_of(model, ids, window=20)
    straight, detour = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    expected = forward(model, ids[:1], straight, [60, 30])
    forward(model, ids[:1, :60], detour, [60])
    forward(model, ids[1:2, :13], detour, [5, 1, 7])
    detour.crop(-13)
    assert torch.equal(forward(model, ids[:1, 60:], detour, [30]), expected[:, 60:])
    for ours, theirs in zip(stores(detour), stores(straight), strict=True):
        assert torch.equal(pages(ours), pages(theirs))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "falcon", "gemma3_text"])
def test_a_trellis_connects_no_rows_and_no_calls(family, ids):
    """Paths run through the tokens of a page, whoever stands beside it and however they came."""
    model = wide(family)
    artifact = artifact_of(model, ids, key="trellis", value="trellis")
    packed = []
    for sizes in ([TOKENS], [7] * 12 + [6], [1] * TOKENS):
        cache = CalibratedCache(artifact, model)
        forward(model, ids[:1], cache, sizes)
        packed.append(pages(stores(cache)[0]).clone())
    rows = CalibratedCache(artifact, model)
    forward(model, ids, rows, [TOKENS])
    packed.append(pages(stores(rows)[0], 0))
    assert len(packed[0]) > 0
    assert all(torch.equal(those, packed[0][-len(those) :]) for those in packed[1:])


@pytest.mark.parametrize("key", ["static", "mixed", "trellis", "group"])
def test_a_detour_into_pages_keeps_what_was_packed_and_packs_the_rest_again_alike(key, ids):
    """Tokens of a page that is cut wait as precise as they were stored, and nearly always get their old codes again.

    A trellis may find a better path for what comes after them, and move them by a part of their error.
    """
    codes, moved = (0.3, 0.2) if key == "trellis" else (0.05, 0.02)
    model = wide("llama")
    artifact = artifact_of(model, ids, key=key, window=0)
    straight, detour = CalibratedCache(artifact, model), CalibratedCache(artifact, model)
    forward(model, ids[:1], straight, [TOKENS])
    forward(model, ids[:1], detour, [TOKENS])
    detour.crop(-40)
    assert stores(detour)[0].page_counts == [1]
    forward(model, ids[:1, 50:], detour, [40])
    ours, theirs = stores(detour)[0], stores(straight)[0]
    assert torch.equal(pages(ours)[:1], pages(theirs)[:1])
    layout = ours.layout
    for name in ("key_codes", "value_codes"):
        again, before = (layout.read(pages(store)[1:], name) for store in (ours, theirs))
        assert (again != before).float().mean() < codes
    a, b = ours.decode(pages(ours)[1:]), theirs.decode(pages(theirs)[1:])
    assert (a[0] - b[0]).abs().mean() < moved * b[0].abs().mean()


def test_the_number_of_threads_changes_nothing(ids):
    model = tiny("llama").double()
    artifact, results, before = artifact_of(model, ids), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = CalibratedCache(artifact, model)
            results.append((forward(model, ids, cache, [50, 40]), [store.pages.clone() for store in stores(cache)]))
    finally:
        torch.set_num_threads(before)
    for logits, packed in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=1e-5)
        assert all(torch.equal(a[:, :1], b[:, :1]) for a, b in zip(packed, results[0][1], strict=True))
