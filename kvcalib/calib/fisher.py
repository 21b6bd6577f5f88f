"""Stage fisher: a sample of keys and values with the gradient of the loss, or of predictions, at the same elements.

One forward and one backward pass per window; nothing else has a gradient but K and V. Gradients
are kept signed, in bfloat16 (float32's exponents), and squared where they are used: squares of 1e-6
vanish in float16. Taken at what `cache.update` returns, a gradient already sums over the query heads
that share a kv head, and is turned back to before rotary embedding along with its key. Of what:

    labels="text"    the SUM over tokens of the cross entropy of the text's next token, as KVQuant takes it
                     (squared, the "empirical Fisher")
    labels="model"   the scalar product of all logits with one random draw of `label_noise`

What an error e of the cache does to the predictions is, to second order, KL = e^T F e / 2, F = J^T (diag(p) - p p^T) J
the Fisher information, J the derivatives of the logits by the cache. The mean of squares and products of gradients is
F where labels are drawn from the model, each token's on its own, so that what different tokens want does not mix; with
those of the text it is something else (Kunstner et al., arXiv 1905.12558), louder where the model happens to be wrong.

Ordinary text hardly asks for what stands far back, so nothing would tell the heads that look it up from others. In a
share of the windows (`repeat`) the second half is therefore the first once more, for the sampled values as for the
gradients. (KVzip, arXiv 2505.23416, finds what to keep of a cache by having the model repeat its context.)

Kept are whole pages (32 tokens, counted after the sink, as run time cuts them), evenly spaced over
all windows, so that ranges over tokens can be measured on the sample as run time measures them.

window_00000.safetensors, ... one per window that holds sampled pages; n tokens, n a multiple of 32:

    layers.{i}.key         [n, H, D]  before rotary, order of `Rope`     .key_grad    bf16
    layers.{i}.value       [n, H, D]                                     .value_grad  bf16
    layers.{i}.rope.{order|inv_freq|gain}      positions  int32 [n]
    header  {layers, sink, windows (hash)}
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from kvcalib.calib import files, taps
from kvcalib.data.windows import with_repeats
from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.quant.rope import pull_back, to_pre_rope
from kvcalib.quant.spec import PAGE

if TYPE_CHECKING:
    from kvcalib.data.windows import Windows

_ROWS = 64
"""Tokens whose probabilities are held in float32 at a time."""


def file_name(window: int) -> str:
    return f"window_{window:05d}.safetensors"


def fisher(
    model: PreTrainedModel,
    rotary: taps.Rotary,
    windows: Windows,
    *,
    sink: int,
    tokens: int,
    out: Path,
    labels: str,
    repeat: float,
    seed: int,
    progress: taps.Progress = taps.progress_bar,
) -> dict:
    """Keeps `tokens` per layer. Writes one file per window into `out`, returns the summary.

    labels: "text" or "model"; repeat: share of the windows whose second half repeats the first; seed: of the draws.
    The loss in the summary is per token, with the text's own labels, of the windows as they are run.

    Raises UnsupportedModel for layers without keys or without influence on the loss, ConfigError
    for windows shorter than a page and for gradients that are not finite.
    """
    number, length = windows.ids.shape
    taps.check_length(rotary, length)
    chosen = sampled_tokens(number, length, sink=sink, tokens=tokens)
    assert labels in ("text", "model"), labels
    texts, repeated = with_repeats(windows.ids[list(chosen)], repeat)
    power: dict[str, float] = {}
    loss_sum = 0.0
    with taps.frozen(model):
        for window, ids in progress(list(zip(chosen, texts, strict=True)), len(chosen), "fisher"):
            noise_seed = None if labels == "text" else seed << 20 | window
            loss, leaves = _backward(model, ids, rotary, noise_seed)
            loss_sum += loss
            tensors = _sample(leaves, rotary, chosen[window])
            _add_power(power, tensors)
            header = {"layers": sorted(leaves), "sink": sink, "windows": windows.hash}
            files.save(Path(out) / file_name(window), tensors, header)
    kept = sum(len(rows) for rows in chosen.values())
    per_token = loss_sum / (len(chosen) * (length - 1))
    layers = {i: {t: power[f"layers.{i}.{t}"] / len(chosen) for t in ("key", "value")} for i in sorted(rotary)}
    return {
        "windows": len(chosen),
        "repeated": repeated,
        "tokens": kept,
        "loss": per_token,
        "mean_square_gradient": layers,
    }


def sampled_tokens(windows: int, length: int, *, sink: int, tokens: int) -> dict[int, torch.Tensor]:
    """{window: positions int64 of its sampled pages}; windows without any are left out.

    The pages are evenly spaced. Raises ConfigError if no page fits into a window.
    """
    pages = (length - sink) // PAGE
    if pages < 1:
        raise ConfigError(
            f"data.length={length} leaves no whole page of {PAGE} tokens after quant.sink={sink}; "
            f"use at least {sink + PAGE}"
        )
    total = windows * pages
    wanted = min(max(1, -(-tokens // PAGE)), total)
    page = ((torch.arange(wanted) + 0.5) * total / wanted).long()
    chosen = {}
    for window in (page // pages).unique().tolist():
        first = sink + PAGE * (page[page // pages == window] % pages)
        chosen[window] = (first[:, None] + torch.arange(PAGE)).flatten()
    return chosen


def label_noise(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Logits [T, V] -> [T, V], random: mean 0, covariance diag(p) - p p^T in every row, nothing between rows.

    p - onehot(y) with a label y drawn from p has the same first two moments, but where the model is sure it is next to
    nothing almost always, and large now and then.
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(logits)
    for rows, out in zip(logits.split(_ROWS), noise.split(_ROWS), strict=True):
        p = rows.float().softmax(-1)
        normal = p.sqrt() * torch.randn(p.shape, generator=generator, device=p.device)
        out.copy_(normal - p * normal.sum(-1, keepdim=True))
    return noise


def _backward(model, ids: torch.Tensor, rotary: taps.Rotary, noise_seed: int | None) -> tuple[float, dict]:
    """Loss of one window and {layer: (key, value, key gradient, value gradient)}, [1, H, T, D].

    noise_seed: None takes the text's own labels.
    """
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_kv(layer: int, key: torch.Tensor, value: torch.Tensor):
        # The first layer of a frozen model has nothing to differentiate: its K and V become leaves.
        # Later ones must stay in the graph, earlier layers act on the loss through them.
        inputs[layer] = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in (key, value))
        return inputs[layer]

    with torch.enable_grad():
        logits = taps.run(model, ids, on_kv, rotary, head=True).logits[0]
        target = ids[1:].to(logits.device)
        judged = logits if noise_seed is None else logits.detach()
        loss = cross_entropy(judged[:-1].float(), target, reduction="sum")
        flat = [x for pair in inputs.values() for x in pair]
        if noise_seed is None:
            grads = torch.autograd.grad(loss, flat, allow_unused=True)
        else:
            grads = torch.autograd.grad(logits, flat, label_noise(judged, noise_seed), allow_unused=True)
    deaf = sorted({layer for layer, g in zip(_twice(inputs), grads, strict=True) if g is None})
    if deaf:
        raise UnsupportedModel(f"keys or values of layers {deaf} have no influence on the loss")
    pairs = zip(grads[::2], grads[1::2], strict=True)
    return loss.item(), {i: (*kv, *g) for (i, kv), g in zip(inputs.items(), pairs, strict=True)}


def _twice(items) -> list:
    return [item for item in items for _ in range(2)]


def _sample(leaves: dict, rotary, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named tensors of the sampled tokens of one window."""
    tensors = {"positions": rows.int()}
    for layer, kept in leaves.items():
        at = rows.to(kept[0].device)
        key, value, key_grad, value_grad = (taps.by_token(x.detach())[at] for x in kept)
        rope = taps.rope_of(rotary[layer], key.shape[-1]).to(key.device)
        if not (torch.isfinite(key_grad).all() and torch.isfinite(value_grad).all()):
            raise ConfigError(f"layer {layer}: gradient is NaN or infinite; use model.dtype=float32 or bfloat16")
        name = f"layers.{layer}"
        tensors[f"{name}.key"] = to_pre_rope(key, at, rope).to(key.dtype)
        tensors[f"{name}.key_grad"] = pull_back(key_grad, at, rope).bfloat16()
        tensors[f"{name}.value"], tensors[f"{name}.value_grad"] = value, value_grad.bfloat16()
        tensors |= files.rope_tensors(layer, rope)
    return tensors


def _add_power(power: dict[str, float], tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_grad"):
            owner = name.removesuffix("_grad")
            power[owner] = power.get(owner, 0.0) + float(tensor.float().square().mean())
