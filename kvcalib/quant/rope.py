"""Rotary position embedding as a rotation of channel pairs, in one canonical channel order for every family.

Families differ in which channels form a pair and in how many channels rotate:

    half         (i, i + r/2)    Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX ...   r = rotary dims <= D
    interleaved  (2i, 2i + 1)    GLM, Cohere, GPT-J ...
    none         no rotation

`Rope.order` permutes the channels of a head so that pair i is always (i, i + D/2); channels that do not rotate pair
up at the end with frequency 0. Queries get the same permutation, so q.k does not change, and everything below the
cache (pages, kernels, calibration) knows a single layout. YaRN and longrope multiply cos and sin by a factor; it is
the gain of a rotated pair, and un-rotating divides by it.

The key before RoPE is obtained by un-rotating the key that the model hands to its cache. That needs no knowledge of
projections, biases, norms or fused weights, and rotate(unrotate(k)) returns k to fp32 rounding.
"""

from typing import NamedTuple

import torch


class Rope(NamedTuple):
    """order int64 [D]; inv_freq fp32 [D/2], 0 where a pair does not rotate; gain fp32 [D/2]."""

    order: torch.Tensor
    inv_freq: torch.Tensor
    gain: torch.Tensor

    def to(self, device) -> "Rope":
        return Rope(*(t.to(device) for t in self))


def make_rope(head_dim: int, kind: str, inv_freq: torch.Tensor, scaling: float = 1.0) -> Rope:
    """kind "half", "interleaved" or "none"; inv_freq fp32 [rotary dims / 2] as the model computed it."""
    assert head_dim % 2 == 0, f"odd head_dim {head_dim}"
    pairs = 0 if kind == "none" else inv_freq.numel()
    channels = torch.arange(2 * pairs).view(2, pairs) if kind == "half" else torch.arange(2 * pairs).view(pairs, 2).T
    tail = torch.arange(2 * pairs, head_dim).view(2, -1)
    order = torch.cat([channels, tail], dim=1).reshape(-1)
    still = head_dim // 2 - pairs
    frequencies = torch.cat([inv_freq.detach().float().cpu()[:pairs], torch.zeros(still, dtype=torch.float32)])
    gain = torch.cat(
        [torch.full((pairs,), float(scaling), dtype=torch.float32), torch.ones(still, dtype=torch.float32)]
    )
    return Rope(order, frequencies, gain)


def cos_sin(positions: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [...] -> cos, sin fp32 [..., D/2], gain included (as transformers multiplies it in).

    Angles are exact, as kernels have them when they turn keys again: in float32, at positions in the millions, they are
    off by whole radians.
    """
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    angle = positions[..., None].to(wide) * rope.inv_freq.to(wide)
    return angle.cos().float() * rope.gain, angle.sin().float() * rope.gain


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., D] in canonical order; cos, sin broadcast to [..., D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def unrotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Inverse of `rotate`: turns back by the same angle and divides by the gain."""
    norm = cos.square() + sin.square()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([(a * cos + b * sin) / norm, (b * cos - a * sin) / norm], dim=-1)


def to_pre_rope(key: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Key as the model cached it [..., T, H, D] at positions [..., T] -> fp32 key before RoPE, canonical order."""
    cos, sin = cos_sin(positions, rope)
    return unrotate(key[..., rope.order].float(), cos.unsqueeze(-2), sin.unsqueeze(-2))


def to_post_rope(key: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Inverse of `to_pre_rope`, but the channels stay in canonical order."""
    cos, sin = cos_sin(positions, rope)
    return rotate(key, cos.unsqueeze(-2), sin.unsqueeze(-2))


def pull_back(gradient: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Gradient with respect to the cached key -> gradient with respect to the key before RoPE, canonical order.

    k_post = gain * R k_pre, hence the gradient is gain * R^T g: turn back and multiply by the gain, not divide.
    """
    cos, sin = cos_sin(positions, rope)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return rotate(gradient[..., rope.order].float(), cos, -sin)
