"""Gradients against finite differences, and the sample against what it says it is."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvcalib.calib import taps
from kvcalib.calib.files import Reader
from kvcalib.calib.fisher import file_name, fisher, label_noise, sampled_tokens
from kvcalib.data.windows import with_repeats
from kvcalib.errors import ConfigError
from kvcalib.models.rotary import rotary
from kvcalib.quant.rope import to_post_rope, to_pre_rope
from tests.calib.conftest import SINK, make_windows, quiet
from tests.models.zoo import tiny

STEP = 5e-3  # large against the float32 of the norms, small against keys of order one


def run_fisher(model, windows, out, *, tokens=1 << 20, **options):
    options = {"labels": "text", "repeat": 0.0, "seed": 0} | options
    summary = fisher(model, rotary(model), windows, sink=SINK, tokens=tokens, out=out, progress=quiet, **options)
    return summary, [Reader(path, "fisher") for path in sorted(out.glob("window_*"))]


def nudged_loss(model, ids, **nudge) -> float:
    logits = nudged_logits(model, ids, **nudge)
    return cross_entropy(logits[:-1].double(), ids[1:], reduction="sum").item()


def nudged_logits(model, ids, *, layer, name, at, step) -> torch.Tensor:
    """With one element [token, head, channel] of the stored tensor moved by `step`."""
    infos = rotary(model)

    def on_kv(index, key, value):
        if index != layer:
            return key, value
        if name == "value":
            moved = value.clone()
            moved[0, at[1], at[0], at[2]] += step
            return key, moved
        rope = taps.rope_of(infos[layer], key.shape[-1])
        positions = torch.arange(key.shape[2])
        delta = torch.zeros(key.shape[2], key.shape[1], key.shape[3])
        delta[at] = step
        delta = to_post_rope(delta, positions, rope)[..., rope.order.argsort()]
        return key + delta.transpose(0, 1)[None], value

    with torch.no_grad():
        return taps.run(model, ids, on_kv, infos, head=True).logits[0]


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen3", "gpt_neox", "cohere", "gemma2"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_gradient_is_a_finite_difference(family, name, tmp_path):
    model, windows = tiny(family).double(), make_windows(1, 40)
    _, (reader,) = run_fisher(model, windows, tmp_path)
    for layer in (0, 1):
        gradient = reader[f"layers.{layer}.{name}_grad"].double()
        token, head, channel = _largest(gradient)
        at = (SINK + token, head, channel)
        up, down = (
            nudged_loss(model, windows.ids[0], layer=layer, name=name, at=at, step=step) for step in (STEP, -STEP)
        )
        found = gradient[token, head, channel].item()
        assert (up - down) / (2 * STEP) == pytest.approx(found, rel=2**-7)


def _largest(gradient):
    flat = gradient.abs().argmax()
    return tuple(int(i) for i in torch.unravel_index(flat, gradient.shape))


def test_noise_has_the_moments_of_labels_drawn_from_the_model():
    logits = torch.tensor([[4.0, 3.0, 0.0, 1.0, -torch.inf], [0.0, 0.5, 0.0, -1.0, 0.0]])
    draws = label_noise(logits.repeat(50_000, 1), 0).unflatten(0, (-1, 2))
    for row, p in zip(draws.unbind(1), logits.softmax(-1), strict=True):
        torch.testing.assert_close(row.mean(0), torch.zeros(5), atol=0.01, rtol=0)
        torch.testing.assert_close(row.T @ row / len(row), p.diag() - p.outer(p), atol=0.01, rtol=0)
        assert (row.sum(-1).abs() < 1e-5).all()  # logits have no level
    first, second = draws.unbind(1)
    torch.testing.assert_close(first.T @ second / len(first), torch.zeros(5, 5), atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["key", "value"])
def test_squared_gradients_of_the_model_s_labels_are_what_errors_cost(name, tmp_path):
    model, windows = tiny("llama").double(), make_windows(1, 40)
    draws = SimpleNamespace(ids=windows.ids.expand(400, -1), hash="draws")
    _, readers = run_fisher(model, draws, tmp_path, labels="model")
    squares = torch.stack([reader[f"layers.0.{name}_grad"].double().square() for reader in readers]).mean(0)
    token, head, channel = _largest(squares)
    nudge = {"layer": 0, "name": name, "at": (SINK + token, head, channel)}
    exact, moved = (nudged_logits(model, windows.ids[0], **nudge, step=step).log_softmax(-1) for step in (0, 0.01))
    cost = (exact.exp() * (exact - moved)).sum().item()
    assert squares[token, head, channel].item() == pytest.approx(2 * cost / 0.01**2, rel=0.25)  # 400 draws: 7%


def test_draws_follow_the_seed(llama, tmp_path):
    def gradient(folder, seed):
        _, (reader,) = run_fisher(llama, make_windows(1), tmp_path / folder, labels="model", seed=seed)
        return reader["layers.1.key_grad"]

    first, again, other = gradient("a", 0), gradient("b", 0), gradient("c", 1)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_windows_that_repeat_are_sampled_as_they_are_run(llama, tmp_path):
    windows = make_windows(2)
    _, found = run_fisher(llama, windows, tmp_path / "a", repeat=0.5)
    told = SimpleNamespace(ids=with_repeats(windows.ids, 0.5)[0], hash=windows.hash)
    assert not torch.equal(told.ids, windows.ids)
    _, expected = run_fisher(llama, told, tmp_path / "b")
    for one, other in zip(found, expected, strict=True):
        for field in ("layers.1.key", "layers.1.value_grad"):
            assert torch.equal(one[field], other[field])


def test_repeats_are_among_the_windows_that_are_run(llama, tmp_path):
    for tokens, windows in [(64, 2), (128, 4), (1 << 20, 8)]:
        summary, _ = run_fisher(llama, make_windows(8), tmp_path / str(tokens), tokens=tokens, repeat=0.5)
        assert (summary["windows"], summary["repeated"]) == (windows, windows // 2)


def keeping(found: dict):
    def on_kv(layer, key, value):
        found[layer] = (key, value)
        return key, value

    return on_kv


def test_sampled_values_are_those_of_their_positions(llama, tmp_path):
    windows = make_windows()
    _, readers = run_fisher(llama, windows, tmp_path)
    infos = rotary(llama)
    for ids, reader in zip(windows.ids, readers, strict=True):
        found = {}
        with torch.no_grad():
            taps.run(llama, ids, keeping(found), infos, head=False)
        at = reader["positions"].long()
        assert at.tolist() == list(range(SINK, SINK + 96))
        for layer, (key, value) in found.items():
            rope = taps.rope_of(infos[layer], key.shape[-1])
            pre = to_pre_rope(taps.by_token(key), torch.arange(len(ids)), rope)
            torch.testing.assert_close(reader[f"layers.{layer}.key"], pre[at])
            torch.testing.assert_close(reader[f"layers.{layer}.value"], taps.by_token(value)[at])


def test_loss_is_the_mean_cross_entropy(llama, tmp_path):
    windows = make_windows(2)
    summary, _ = run_fisher(llama, windows, tmp_path)
    with torch.no_grad():
        logits = llama(windows.ids).logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(logits, windows.ids[:, 1:].flatten()).item()
    assert summary["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("setup", ["frozen", "trainable", "checkpointed", "input_grads", "no_grad"])
def test_gradients_whatever_state_the_model_is_in(setup, llama, tmp_path):
    model = tiny("llama")
    model.requires_grad_(setup == "trainable")
    if setup == "checkpointed":
        model.gradient_checkpointing_enable()
        model.train()
    if setup == "input_grads":
        model.enable_input_require_grads()
    flags = [p.requires_grad for p in model.parameters()]
    with torch.set_grad_enabled(setup != "no_grad"):
        _, (found,) = run_fisher(model, make_windows(1), tmp_path / "a")
    _, (expected,) = run_fisher(llama, make_windows(1), tmp_path / "b")
    for name in ("layers.0.key_grad", "layers.1.value_grad"):
        assert found[name].abs().max() > 0
        torch.testing.assert_close(found[name], expected[name])
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert model.training == (setup == "checkpointed")


def test_bfloat16_gradients_are_close(llama, tmp_path):
    _, (exact,) = run_fisher(llama, make_windows(1), tmp_path / "a")
    _, (rough,) = run_fisher(tiny("llama").bfloat16(), make_windows(1), tmp_path / "b")
    assert rough["layers.0.key"].dtype == torch.bfloat16
    a, b = (r["layers.1.value_grad"].float().flatten() for r in (exact, rough))
    assert torch.cosine_similarity(a, b, dim=0) > 0.9


def test_a_window_does_not_depend_on_the_others(llama, tmp_path):
    both, alone = make_windows(2), make_windows(2)
    alone.ids = alone.ids[1:]
    _, (_, second) = run_fisher(llama, both, tmp_path / "a")
    _, (only,) = run_fisher(llama, alone, tmp_path / "b")
    assert torch.equal(second["layers.0.key_grad"], only["layers.0.key_grad"])


def test_sample_is_whole_pages_evenly_spread():
    chosen = sampled_tokens(8, 1024, sink=4, tokens=4096)
    counts = [len(rows) for rows in chosen.values()]
    assert sum(counts) == 4096
    assert len(counts) == 8
    assert max(counts) - min(counts) <= 32
    for rows in chosen.values():
        pages = rows.view(-1, 32)
        assert ((pages[:, 0] - 4) % 32 == 0).all()
        assert (pages.diff(dim=1) == 1).all()
        assert rows.max() < 1024
        assert len(rows.unique()) == len(rows)


@pytest.mark.parametrize(("tokens", "kept"), [(1, 32), (33, 64), (1 << 30, 3 * 96)])
def test_size_of_the_sample(tokens, kept):
    chosen = sampled_tokens(3, 100, sink=2, tokens=tokens)
    assert sum(len(rows) for rows in chosen.values()) == kept


def test_windows_without_sampled_pages_are_not_run(llama, tmp_path):
    summary, readers = run_fisher(llama, make_windows(3), tmp_path, tokens=32)
    assert summary["windows"] == len(readers) == 1
    assert (tmp_path / file_name(1)).is_file()


def test_windows_shorter_than_a_page_are_refused():
    with pytest.raises(ConfigError, match="at least 36"):
        sampled_tokens(3, 35, sink=4, tokens=64)


@pytest.mark.parametrize("labels", ["text", "model"])
def test_gradients_that_are_not_finite_are_refused(labels, tmp_path):
    model = tiny("llama")
    model.lm_head.weight.data[5] = float("inf")
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        run_fisher(model, make_windows(1), tmp_path, labels=labels)
