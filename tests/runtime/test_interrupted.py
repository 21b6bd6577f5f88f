"""An error in the middle of a call, whoever raised it: the next call finds the cache as it was before."""

import _thread
import contextlib
import copy
import gc
import linecache
import sys
import threading
import weakref

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
        assert torch.equal(ours, theirs)


EVERYWHERE = ("/kvcalib/runtime/", "/kvcalib/kernels/")


def interrupted(call, at, files=EVERYWHERE):
    """Runs `call` until line `at` of the cache's own code would begin, where Ctrl-C comes; the lines there were."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if not any(part in frame.f_code.co_filename for part in files):
            return None
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with:  # traced once more at its end, where no signal can come
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


def test_an_interrupt_at_the_end_of_a_call_and_the_same_call_again(ids):
    """From the same place its frames have the addresses of the interrupted ones, as in a loop that decodes."""
    model, start = tiny("llama"), filled(tiny("llama"), ids)
    files = tuple(f"/kvcalib/runtime/{name}.py" for name in ("attention", "passes", "undo"))

    def call(cache, at):
        return interrupted(lambda: forward(model, cache, ids[:, 80:85]), at, files)

    start = filled(model, ids)
    lines = call(copy.deepcopy(start), 0)
    for at in range(lines - 60, lines + 1):
        cache = copy.deepcopy(start)
        call(cache, at)
        reached = cache.get_seq_length()
        call(cache, 0)
        assert (reached, cache.get_seq_length()) in ((80, 85), (85, 90)), at


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


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "granitemoehybrid"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_states_of_other_layers_go_back_too(family, error, ids):
    """Wherever it comes: before the first attention layer only states have changed."""
    model = tiny(family)
    layers = next(module for module in model.base_model.modules() if type(module) is torch.nn.ModuleList)

    def broken(*_):
        raise error

    for already in (0, 80):
        expected = goes_on(filled(model, ids, already), ids[:, 80:])
        for layer in layers:
            cache = filled(model, ids, already)
            for tokens in (1, 10):
                hook = layer.register_forward_hook(broken)
                with pytest.raises(error):
                    forward(model, cache, ids[:, 20 : 20 + tokens])
                hook.remove()
            assert all(map(torch.equal, goes_on(cache, ids[:, 80:]), expected))


def test_states_of_other_layers_and_an_interrupted_reorder(ids):
    model = tiny("qwen3_next")
    start, index = filled(model, ids), torch.tensor([1, 0])
    changed = copy.deepcopy(start)
    lines = interrupted(lambda: changed.reorder_cache(index), at=0)
    outcomes = [goes_on(each, ids[:, 80:]) for each in (copy.deepcopy(start), changed)]
    for at in range(1, lines + 1, max(1, lines // 30)):
        cache = copy.deepcopy(start)
        interrupted(lambda: cache.reorder_cache(index), at)  # noqa: B023
        found = goes_on(cache, ids[:, 80:])
        assert any(all(map(torch.equal, found, outcome)) for outcome in outcomes), at


def in_the_middle(model, act):
    """Calls `act` once, in the middle of the next pass."""
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: (hook.remove(), act())[0])


def test_looking_at_a_cache_in_the_middle_of_a_pass(ids):
    model = tiny("llama")
    cache, expected, seen = filled(model, ids), filled(model, ids), []
    in_the_middle(model, lambda: seen.append((cache.memory_report()["tokens"], cache.get_seq_length(), repr(cache))))
    assert all(map(torch.equal, goes_on(cache, ids[:, 80:]), goes_on(expected, ids[:, 80:])))
    assert seen[0][:2] == (81, 81)


@pytest.mark.parametrize(
    "act",
    [
        copy.deepcopy,
        lambda cache: cache.save("never"),
        lambda cache: cache.crop(-1),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache._model(torch.tensor([[5], [6]]), cache=cache),
    ],
)
def test_what_cannot_be_done_in_the_middle_of_a_pass_is_a_sentence(act, ids):
    model = tiny("llama")
    cache, expected = filled(model, ids), filled(model, ids)
    in_the_middle(model, lambda: act(cache))
    with pytest.raises(ConfigError, match="in the middle of a forward pass"):
        forward(model, cache, ids[:, 80:81])
    assert cache.get_seq_length() == 80
    assert all(map(torch.equal, goes_on(cache, ids[:, 80:]), goes_on(expected, ids[:, 80:])))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["before everything", "in a call inside", "deep in a call inside"])
def test_an_error_where_no_hook_of_ours_has_been_or_will_be(error, where, ids):
    """Hooks of others come first; and what they call may fail while the pass around it goes on."""
    model, broken = tiny("llama"), []

    def hook(*_):
        if broken:
            raise broken.pop()

    at = model.model.layers[1].mlp if where.startswith("deep") else model.base_model
    at.register_forward_pre_hook(hook)
    cache, other, expected = (filled(model, ids) for _ in range(3))

    def inner():
        broken.append(error)
        with pytest.raises(error):
            model(ids[:, :5], cache=other)

    with torch.no_grad():
        if "inside" in where:
            in_the_middle(model, inner)
        else:
            inner()
    assert all(map(torch.equal, goes_on(cache, ids[:, 80:]), goes_on(expected, ids[:, 80:])))
    assert other.get_seq_length() == 80


def test_an_error_in_the_head_of_the_model(ids):
    """The largest memory of a long prompt is that of its logits: who asks again in parts has every token once."""
    model = tiny("llama")
    cache, expected = filled(model, ids), filled(model, ids)

    def broken(*_):
        raise torch.OutOfMemoryError

    hook = model.lm_head.register_forward_hook(broken)
    with pytest.raises(torch.OutOfMemoryError):
        forward(model, cache, ids[:, 80:120])
    hook.remove()
    assert cache.get_seq_length() == 80
    assert all(map(torch.equal, goes_on(cache, ids[:, 80:]), goes_on(expected, ids[:, 80:])))


@pytest.mark.parametrize("part", ["whole", "base"])
def test_the_base_of_a_model_may_be_called_alone_or_by_a_hook(part, ids):
    model = tiny("llama")
    cache, other, expected = (filled(model, ids) for _ in range(3))
    called = model if part == "whole" else model.base_model
    in_the_middle(model, lambda: (called(ids[:, :5], cache=other), None)[1])
    with torch.no_grad():
        ours = [model.base_model(each, cache=cache)[0] for each in ids[:, 80:].split([1, 39], dim=1)]
        theirs = [
            model.base_model(each, cache=expected).last_hidden_state for each in ids[:, 80:].split([1, 39], dim=1)
        ]
    assert all(map(torch.equal, ours, theirs))
    assert (cache.get_seq_length(), other.get_seq_length()) == (120, 85)


def test_a_pass_that_died_with_its_thread_is_not_taken_for_that_of_the_next(ids):
    """The next thread gets the ident of the last, and its calls the same addresses."""
    model, dies = tiny("llama"), []
    cache, expected = filled(model, ids), filled(model, ids)

    def hook(*_):
        if dies:
            raise SystemExit(dies.pop())

    model.model.layers[1].register_forward_pre_hook(hook)

    def request(part, outputs):
        with torch.no_grad(), contextlib.suppress(SystemExit):
            outputs.append(model(part, cache=cache).logits)

    for step in range(80, 104, 2):
        outputs = []
        for attempt in ("dies", "lives"):
            dies += [0] * (attempt == "dies")
            thread = threading.Thread(target=request, args=(ids[:, step : step + 2], outputs))
            thread.start()
            thread.join()
        with torch.no_grad():
            assert torch.equal(outputs[0], model(ids[:, step : step + 2], cache=expected).logits)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_stays_alive_after_an_interrupt(error, ids):
    """Neither the model nor the cache, nor what the callers had at hand."""

    def broken(*_):
        raise error

    def caller(model, cache):
        at_hand = torch.zeros(3)
        seen.append(weakref.ref(at_hand))
        forward(model, cache, ids[:, 80:90])
        return at_hand

    seen, model = [], tiny("llama")
    cache = filled(model, ids)
    seen += [weakref.ref(model), weakref.ref(cache)]
    model.model.layers[1].mlp.register_forward_pre_hook(broken)
    with contextlib.suppress(error):
        caller(model, cache)
    assert seen[2]() is None
    del cache
    gc.collect()
    assert seen[1]() is None
    assert model.config._attn_implementation == "sdpa"
    del model
    gc.collect()
    assert seen[0]() is None


def test_a_copy_after_an_error_with_gradients_on(ids):
    model = tiny("llama")
    cache, expected = filled(model, ids), filled(model, ids)
    with pytest.raises(ConfigError, match="an attention mask of shape"):
        model(ids[:, 80:85], cache=cache, **REFUSED["a mask of other rows"])
    twin = copy.deepcopy(cache)
    assert all(map(torch.equal, goes_on(twin, ids[:, 80:]), goes_on(expected, ids[:, 80:])))


def test_an_interrupt_while_caches_come_and_go(ids, monkeypatch):
    """Python drops what is raised while it collects; yet nothing waits for ever, and nothing stays on the model."""
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    model = tiny("llama")
    artifact, expected = make_artifact(model, SPEC, ids[:1, :60]), goes_on(filled(model, ids), ids[:, 80:])
    gc.collect()
    found, hooks = [], hooks_of(model)

    def comes_and_goes():
        CalibratedCache(artifact, model)

    def works():
        cache = filled(model, ids)
        found.append(goes_on(cache, ids[:, 80:]))

    lines = interrupted(comes_and_goes, 0, ["attention.py"])
    assert lines > 30
    for turn, at in enumerate(range(1, lines + 1, 3), start=1):
        interrupted(comes_and_goes, at, ["attention.py"])
        thread = threading.Thread(target=works, daemon=True)
        thread.start()
        thread.join(60)
        assert len(found) == turn, "it waits for ever"
        assert all(map(torch.equal, found[-1], expected)), at
        gc.collect()
        assert model.config._attn_implementation == "sdpa", at
        assert hooks_of(model) == hooks, at


def hooks_of(model):
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def holding(cache, at, seen, reached, on, files):
    """A trace function that stops its thread at the line of that number, until `on` is set."""

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and not any(each._lock._is_owned() for each in cache._undos()):  # there others wait
            seen[0] += 1
            if seen[0] == at:
                reached.set()
                on.wait(60)
        return trace

    return trace


@pytest.mark.parametrize("stands", ["at its beginning", "in the middle"])
def test_a_thread_that_watches_while_a_pass_goes_on(stands, ids):
    """The thread that looks is held at each of its lines; meanwhile a pass begins, or ends, in another."""
    model = tiny("llama")
    start = filled(model, ids)
    expected = goes_on(filled(model, ids), ids[:, 80:])

    def held(at):
        cache, reached, on, seen, found = copy.deepcopy(start), threading.Event(), threading.Event(), [0], []

        trace = holding(cache, at, seen, reached, on, ("cache.py", "layer.py", "passes.py"))

        def watch():
            sys.settrace(trace)
            found.append((cache.memory_report()["tokens"], cache.get_seq_length()))
            sys.settrace(None)
            reached.set()

        thread = threading.Thread(target=watch)

        def meanwhile():
            if stands == "in the middle":
                thread.start()
                reached.wait(60)
                return
            on.set()
            thread.join(60)

        if stands == "at its beginning":
            thread.start()
            reached.wait(60)
        in_the_middle(model, meanwhile)
        outputs = goes_on(cache, ids[:, 80:])
        on.set()
        thread.join(60)
        assert len(found) == 1, at
        assert all(80 <= tokens <= 120 for tokens in found[0]), at
        assert all(map(torch.equal, outputs, expected)), at
        return seen[0]

    lines = held(at=0)
    for at in range(1, lines + 1, max(1, lines // 25)):
        held(at)


def test_a_thread_that_begins_with_a_generator(ids):
    """Its stack has no other end, however often it is read."""
    model, over = tiny("llama"), threading.Event()
    cache, broken = filled(model, ids), [KeyboardInterrupt]

    def hook(*_):
        if broken:
            raise broken.pop()

    def generator():
        with contextlib.suppress(KeyboardInterrupt):
            forward(model, cache, ids[:, 80:85])
        forward(model, cache, ids[:, 80:90])
        over.set()
        yield

    model.model.layers[1].register_forward_pre_hook(hook)
    held = generator()
    _thread.start_new_thread(held.__next__, ())
    assert over.wait(60)
    assert cache.get_seq_length() == 90


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_that_a_thread_makes_while_passes_go_on_is_whole_or_refused(way, ids, tmp_path):
    """The thread is held at one of its lines; meanwhile a pass begins and ends in another."""
    model = tiny("llama")
    artifact = make_artifact(model, SPEC, ids[:1, :60])
    refused, states = [], []

    def copied(cache):
        if way == "deepcopy":
            return copy.deepcopy(cache)
        return CalibratedCache.load(cache.save(tmp_path / "held"), artifact, model)

    def held(at):
        cache, reached, on, seen, found = filled(model, ids, 75), threading.Event(), threading.Event(), [0], []

        trace = holding(cache, at, seen, reached, on, ("cache.py", "layer.py", "store.py", "undo.py", "persist.py"))

        def work():
            sys.settrace(trace)
            try:
                found.append(copied(cache))
            except ConfigError as error:
                refused.append(str(error))
            finally:
                sys.settrace(None)
                reached.set()

        thread = threading.Thread(target=work)
        thread.start()
        reached.wait(60)
        forward(model, cache, ids[:, 75:95])
        on.set()
        thread.join(60)
        for each in found:
            assert each.get_seq_length() in (75, 95), at
            whole = filled(model, ids, 75)
            if each.get_seq_length() == 95:
                forward(model, whole, ids[:, 75:95])
            assert all(map(torch.equal, goes_on(each, ids[:, 80:]), goes_on(whole, ids[:, 80:]))), at
            states.append(each.get_seq_length())
        return seen[0]

    lines = held(at=0)
    for at in range(1, lines, max(1, lines // 30)):
        held(at)
    assert refused
    assert states
    assert all("in the middle of a forward pass" in text for text in refused)


def test_the_stack_of_another_thread_is_read_while_a_generator_rests(ids):
    """A generator between two turns has no caller: taken for the top of the stack, it says nothing of the pass."""
    model, resting = tiny("llama"), []

    def generator():
        resting.append(sys._getframe())
        yield

    next(suspended := generator())
    assert resting[0].f_back is None
    cache, read, tops = filled(model, ids), [], []
    frames = sys._current_frames

    def first_at_rest():
        tops.append(None)
        return {main: resting[0]} if len(tops) == 1 else frames()

    def look():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "_current_frames", first_at_rest)
            read.append(cache.get_seq_length())

    def watch():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)

    main = threading.get_ident()
    in_the_middle(model, watch)
    forward(model, cache, ids[:, 80:85])
    suspended.close()
    assert read == [85]
    assert len(tops) >= 2
