"""Measuring a model for calibration against the least that any such measurement takes.

The least is one forward and one backward pass over the same windows in which no weight has a gradient, only the
activations: next-token loss, derived with respect to the input embeddings.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from kvcalib.eval import timing


def calibration_speed(model, windows: torch.Tensor, measure: Callable[[], object], *, rounds: int, ticker) -> dict:
    """windows int64 [n, length]; measure: collects and differentiates over the same windows."""
    contenders = {"plain": lambda: plain_passes(model, windows), "measured": measure}
    timed = timing.alternate(contenders, rounds=rounds, tick=lambda: ticker(1))
    return timed | {
        "windows": windows.shape[0],
        "length": windows.shape[1],
        "ratio": timed["measured"]["ms"] / timed["plain"]["ms"],
    }


def plain_passes(model, windows: torch.Tensor) -> None:
    """Forward and backward over every window, nothing kept."""
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        for ids in windows.to(model.device):
            embedded = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
            torch.autograd.grad(cross_entropy(logits.float(), ids[1:], reduction="sum"), embedded)
    finally:
        for parameter, before in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(before)
