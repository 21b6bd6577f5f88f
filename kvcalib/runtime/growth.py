"""Tensors with room for more than they hold."""

import torch


def with_capacity(tensor: torch.Tensor, capacity: int, dim: int, used: int) -> torch.Tensor:
    """Copy of `tensor` with room for `capacity` along dim; only the first `used` entries are defined."""
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_empty(shape)
    grown.narrow(dim, 0, used).copy_(tensor.narrow(dim, 0, used))
    return grown
