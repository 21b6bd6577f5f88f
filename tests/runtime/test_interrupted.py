"""An error in the middle of a call, whoever raised it: the next call finds the cache as it was before."""

import copy
import sys

import pytest
import torch

from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import make_artifact
from tests.models.zoo import tiny

SPEC = CacheSpec(
    TensorSpec(8, "uniform", "group", group=8, rope="pre"), TensorSpec(8, "uniform", "token", scope="head"), 0, 2
)
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 290, (2, 120), generator=torch.Generator().manual_seed(11))


def filled(model, ids, tokens=80):
    cache = CalibratedCache(make_artifact(model, SPEC, ids[:1, :60]), model)
    if tokens:
        with torch.no_grad():
            model(ids[:, :tokens], cache=cache)
    return cache


def bias():
    mask = torch.zeros(1, 1, 5, 85).masked_fill(torch.arange(85) > torch.arange(80, 85)[:, None], LOWEST)
    mask[..., 10] = -1.0
    return mask


REFUSED = {
    "attention weights": {"output_attentions": True},
    "a bias": {"attention_mask": bias()},
    "a mask per head": {"attention_mask": torch.ones(1, 4, 5, 85, dtype=torch.bool)},
    "a mask of other rows": {"attention_mask": torch.ones(3, 1, 5, 85, dtype=torch.bool)},
    "a mask that is too short": {"attention_mask": torch.ones(1, 1, 5, 60, dtype=torch.bool)},
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_call_that_is_refused_and_then_made_right(ids, options):
    model = tiny("llama")
    cache, expected = filled(model, ids), filled(model, ids)
    with torch.no_grad():
        with pytest.raises((UnsupportedModel, ConfigError)):
            model(ids[:, 80:85], cache=cache, **REFUSED[options])
        assert cache.get_seq_length() == 80
        for part in ids[:, 80:].split([5, 1, 34], dim=1):
            assert torch.equal(model(part, cache=cache).logits, model(part, cache=expected).logits)


def test_numbers_that_are_refused_and_then_are_right(ids):
    """The second layer finds NaN when it packs: the first has packed already, and goes back."""
    model = tiny("llama")
    cache, expected = filled(model, ids), filled(model, ids)

    def spoil(_module, _args, output):
        return output * torch.nan

    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(spoil)
    with pytest.raises(UnsupportedModel, match="NaN"), torch.no_grad():
        model(ids[:, 80:120], cache=cache)
    hook.remove()
    with torch.no_grad():
        for part in ids[:, 80:].split([39, 1], dim=1):
            torch.testing.assert_close(
                model(part, cache=cache).logits, model(part, cache=expected).logits, rtol=0, atol=0.05
            )
    assert [layer.store.page_counts for layer in cache.layers] == [layer.store.page_counts for layer in expected.layers]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "falcon"])
@pytest.mark.parametrize("already", [0, 20, 80])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_of_anybody(family, already, error, ids, tmp_path):
    model = tiny(family)
    cache, expected = filled(model, ids, already), filled(model, ids, already)
    layers = next(module for module in model.base_model.modules() if type(module) is torch.nn.ModuleList)

    def broken(*_):
        raise error

    for act in (
        lambda cache: cache,
        lambda cache: cache.crop(-5) if already else None,
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])) if already else None,
        lambda cache: cache.save(tmp_path / "saved"),
        lambda cache: cache.memory_report(),
    ):
        hook = list(layers[1].children())[-1].register_forward_pre_hook(broken)
        with pytest.raises(error), torch.no_grad():
            model(ids[:, 80:90], cache=cache)
        hook.remove()
        assert cache.get_seq_length() == expected.get_seq_length()
        act(cache), act(expected)
        with torch.no_grad():
            ours, theirs = (model(ids[:, 90:92], cache=each).logits for each in (cache, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 if already else 1e-5)


def interrupted(call, at):
    """Runs `call` until line `at` of the cache's own code would begin, where Ctrl-C comes; the lines there were."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if not any(part in frame.f_code.co_filename for part in ("/kvcalib/runtime/", "/kvcalib/kernels/")):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def goes_on(cache, ids):
    with torch.no_grad():
        return [cache._model(part, cache=cache).logits for part in ids.split([1, 38, 1], dim=1)]


@pytest.mark.parametrize(("already", "tokens"), [(80, 1), (41, 39), (0, 60)])
def test_an_interrupt_at_any_line_of_a_call(already, tokens, ids):
    model = tiny("llama")
    new = torch.cat([ids, ids], dim=1)[:, 80 : 80 + tokens]
    whole = filled(model, ids, already)
    lines = interrupted(lambda: forward(model, whole, new), at=0)
    later = torch.cat([ids, ids], dim=1)[:, 100:140]
    expected = goes_on(filled(model, ids, already), later)
    for at in range(1, lines + 1, max(1, lines // 40)):
        cache = filled(model, ids, already)
        interrupted(lambda: forward(model, cache, new), at)  # noqa: B023
        if cache.get_seq_length() == already + tokens:  # it came when all layers were through
            assert lines - at < 20
        else:
            assert all(map(torch.equal, goes_on(cache, later), expected)), at


def forward(model, cache, ids):
    with torch.no_grad():
        model(ids, cache=cache)


CHANGES = {
    "crop into a page": lambda cache: cache.crop(-30),
    "crop of what waits": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_at_any_line_of_a_change(change, ids):
    model = tiny("llama")
    start = filled(model, ids, 107)
    changed = copy.deepcopy(start)
    lines = interrupted(lambda: CHANGES[change](changed), at=0)
    outcomes = [stored(start), stored(changed)]
    for at in range(1, lines + 1, max(1, lines // 60)):
        cache = copy.deepcopy(start)
        interrupted(lambda: CHANGES[change](cache), at)  # noqa: B023
        assert any(equal(stored(cache), outcome) for outcome in outcomes), at


def stored(cache):
    return [layer.store.state() for layer in cache.layers]


def equal(ours, theirs):
    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b

    names = ("length", "page_counts", "sink_counts", "waiting", "positions", "sink_positions", "forgotten")
    return all(same(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in names)


def test_states_that_cannot_go_back_are_a_sentence(ids):
    model = tiny("qwen3_next")
    cache = filled(model, ids)

    def broken(*_):
        raise ZeroDivisionError

    hook = model.model.norm.register_forward_pre_hook(broken)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(ids[:, 80:90], cache=cache)
    hook.remove()
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match=r"cache.reset\(\) and start again"):
                model(ids[:, 80:90], cache=cache)
        cache.reset()
        expected = CalibratedCache(cache._artifact, model)
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=expected).logits)
