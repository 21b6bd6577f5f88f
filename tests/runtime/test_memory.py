"""What the cache holds, counted without asking it, and what one more token costs."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcalib.kernels import dispatch
from kvcalib.kernels.cpu import attend as compiled
from kvcalib.kernels.cpu import pack as compiled_pack
from kvcalib.quant.spec import PAGE
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, make_artifact
from tests.models.zoo import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (3, 200), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, cache_spec("static", "token", window=8, sink=2), ids[:1])


def forward(model, ids, cache, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, cache=cache)


def reachable_bytes(thing, seen=None) -> int:
    """Bytes of all tensor storages that can be reached through attributes and containers."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        known = ("storage", storage.data_ptr()) in seen
        seen.add(("storage", storage.data_ptr()))
        return 0 if known else storage.nbytes()
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        children = list(thing)
    else:
        children = [] if isinstance(thing, torch.nn.Module | type) else list(getattr(thing, "__dict__", {}).values())
    return sum(reachable_bytes(child, seen) for child in children)


def held_bytes(cache):
    """Also what kernels hold because of it."""
    stores = [layer.store for layer in cache.layers if hasattr(layer, "store")]
    states = [layer for layer in cache.layers if not hasattr(layer, "store")]
    plans = [compiled.plans, compiled_pack.plans]
    return reachable_bytes(
        [stores, states, *(each[store.layout] for each in plans for store in stores if store.layout in each)]
    )


def left_padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :40], mask[2, :7] = 0, 0
    return mask


def one_row(model, artifact, ids):
    cache = CalibratedCache(artifact, model)
    forward(model, ids[:1], cache)
    return cache


def padded(model, artifact, ids):
    cache = CalibratedCache(artifact, model)
    forward(model, ids, cache, left_padded(ids))
    for step in range(40):
        forward(model, ids[:, step : step + 1], cache, torch.cat([left_padded(ids), torch.ones(3, step + 1).long()], 1))
    return cache


def cropped(model, artifact, ids):
    cache = padded(model, artifact, ids)
    cache.crop(-100)
    return cache


def repeated(model, artifact, ids):
    cache = one_row(model, artifact, ids)
    cache.batch_repeat_interleave(4)
    return cache


def copied(model, artifact, ids):
    return copy.deepcopy(padded(model, artifact, ids))


def reset(model, artifact, ids):
    cache = padded(model, artifact, ids)
    cache.reset()
    return cache


def in_the_window(model, artifact, ids):
    return one_row(model, artifact, ids[:, :5])


@pytest.mark.parametrize("make", [one_row, padded, cropped, repeated, copied, reset, in_the_window])
def test_every_reachable_byte_is_in_the_report(model, artifact, ids, make):
    cache = make(model, artifact, ids)
    assert cache.memory_report()["total_bytes"] == pytest.approx(held_bytes(cache), abs=1)


@pytest.mark.parametrize("name", ["trellis", "q-norm"])
def test_every_reachable_byte_of_formats_with_more_tables(model, ids, name):
    cache = one_row(model, make_artifact(model, cache_spec(name, name, window=8, sink=2), ids[:1]), ids)
    assert cache.memory_report()["total_bytes"] == pytest.approx(held_bytes(cache), abs=1)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mistral", "sliding"),
        ("gemma3_text", "mixed"),
        ("gpt2", "no rotary"),
        ("qwen3_next", "states"),
        ("lfm2", "too"),
    ],
)
def test_every_reachable_byte_of_other_families(family, kind, ids):
    model = tiny(family)
    artifact = make_artifact(model, cache_spec(window=4, sink=2), ids[:1, :50])
    cache = padded(model, artifact, ids[:, :100].repeat(1, 2))
    assert cache.memory_report()["total_bytes"] == pytest.approx(held_bytes(cache), abs=1)


def test_pages_that_grow_in_a_pass_are_not_there_twice(model, artifact, ids):
    """The way back to before the pass needs no memory of its own: what has grown begins with what was there."""
    cache, seen = CalibratedCache(artifact, model), []
    forward(model, ids[:1], cache)

    def look(*_):
        layers = [(layer.store.pages, layer.undo._ahead[1]) for layer in cache.layers]
        held = {tensor.data_ptr() for pages, state in layers for tensor in (pages, state["_pages"][0])}
        seen.append((len(held), sum(pages.shape[1] for pages, _ in layers)))

    hook = model.model.norm.register_forward_hook(look)
    for _ in range(100):
        forward(model, ids[:1, :1], cache)
    hook.remove()
    assert seen[-1][1] > seen[0][1]
    assert {count for count, _ in seen} == {len(cache.layers)}


@pytest.mark.parametrize("left", [30, 5, 0])
def test_a_crop_gives_back_what_pages_took(model, artifact, left):
    ids = torch.randint(3, 290, (1, 2000), generator=torch.Generator().manual_seed(6))
    cache, fresh = (CalibratedCache(artifact, model) for _ in range(2))
    forward(model, ids, cache)
    cache.crop(left - 2000)
    forward(model, ids[:, left:200], cache), forward(model, ids[:, :200], fresh)
    ours, theirs = (each.memory_report()["total_bytes"] for each in (cache, fresh))
    assert ours < 1.05 * theirs


def test_nothing_that_a_step_made_stays_behind(model, artifact, ids):
    """The whole cache, not only its stores: no mask, query or output is kept from call to call."""
    cache = padded(model, artifact, ids)
    stores = reachable_bytes([layer.store for layer in cache.layers])
    assert reachable_bytes(cache.layers) <= stores + 8 * ids.shape[0] * 2  # the position ids of the last call


class CopiedBytes(TorchDispatchMode):
    """Bytes of all tensors that operations write."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor) and not function.is_view:
                self.count += tensor.numel() * tensor.element_size()
        return out


@pytest.mark.parametrize("pads", [False, True])
def test_a_token_costs_the_same_whatever_is_cached(model, artifact, pads):
    """Bytes written by arrival and packing, mean over 20 pages: with 500 and with 8,000 tokens before."""
    costs = []
    for past in (500, 8000):
        store = CalibratedCache(artifact, model).layers[0].store
        key = torch.randn(1, 2, past, 16, generator=torch.Generator().manual_seed(0))
        store.append(key, key, torch.arange(past)[None])
        if pads:
            store.drop_padding(torch.arange(past)[None] > 2)
        store.flush()
        with CopiedBytes() as counter:
            for step in range(20 * PAGE):
                one = key[:, :, step % past :][:, :, :1]
                store.append(one, one, torch.tensor([[past + step]]))
                store.flush()
        costs.append(counter.count / (20 * PAGE))
    growth = store.pages[0].numel() / (20 * PAGE)  # the pages' own capacity, copied once when it is full
    assert costs[1] < 1.2 * costs[0] + growth


def test_every_token_is_quantised_once(model, artifact, ids, monkeypatch):
    seen, pack = [], dispatch.pack
    monkeypatch.setattr(dispatch, "pack", lambda *args, **named: seen.append(args[2].numel()) or pack(*args, **named))
    cache = CalibratedCache(artifact, model)
    for part in ids[:1].split([100, 1, 1, 30, 1, 67], dim=1):
        forward(model, part, cache)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    copy.deepcopy(cache)
    cache.crop(-3)
    packed = sum(layer.store.page_counts[0] * PAGE for layer in cache.layers)
    assert sum(seen) == packed > 0


def test_a_row_grows_by_the_stated_bits(model, artifact):
    """Two caches that differ in 40 full pages differ by 40 pages of bytes, up to the capacity in reserve."""
    spare = 1 / 8
    sizes = []
    for pages in (20, 60):
        cache = CalibratedCache(artifact, model)
        forward(model, torch.randint(3, 290, (1, 32 * pages + 10)), cache)
        sizes.append(cache.memory_report())
    layout = cache.layers[0].store.layout
    grown = sum(sizes[1][f"{n}_bytes"] - sizes[0][f"{n}_bytes"] for n in ("key", "value"))
    assert 2 * 40 * layout.nbytes <= grown <= 2 * 40 * layout.nbytes * (1 + spare)
    bits = 8 * layout.nbytes / (PAGE * 2 * 16) / 2
    assert sizes[1]["page_bits_key"] / 2 + sizes[1]["page_bits_value"] / 2 == pytest.approx(bits)
