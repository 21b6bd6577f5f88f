"""An orthonormal transform of the channels of a head before quantisation.

"hadamard" mixes channels with the Sylvester-Hadamard matrix of the largest power of two that divides the head
dimension, block by block. It spreads a token's few large values over the block, so that the token's range fits all
its channels. The matrix is symmetric and its own inverse, takes no numbers from calibration, and costs nothing where
values are concerned: attention is linear in them, so a kernel turns the output back instead of every value.
"""

from functools import cache

import torch


def rotate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x fp32 [..., D], kind "none" or "hadamard"."""
    if kind == "none":
        return x
    block = hadamard(largest_power_of_two(x.shape[-1])).to(x.device)
    return (x.unflatten(-1, (-1, block.shape[0])) @ block).flatten(-2)


unrotate = rotate
"""Inverse of `rotate`: both kinds are their own."""


def largest_power_of_two(dim: int) -> int:
    """The largest power of two that divides dim."""
    return dim & -dim


@cache
def hadamard(size: int) -> torch.Tensor:
    """Orthonormal Sylvester-Hadamard matrix fp32 [size, size], size a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
