"""Nearest level of a sorted table, and back.

A value exactly between two levels takes the lower one. Values beyond the ends take the end level.
"""

import torch


def encode(v: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """v [..., H, D], levels [1 or H, L] increasing -> uint8 codes [..., H, D]."""
    between = (levels[:, 1:] + levels[:, :-1]) / 2
    if levels.shape[0] == 1:
        return torch.bucketize(v.contiguous(), between[0]).to(torch.uint8)
    per_head = [torch.bucketize(v[..., h, :].contiguous(), between[h]) for h in range(levels.shape[0])]
    return torch.stack(per_head, dim=-2).to(torch.uint8)


def decode(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Inverse of `encode`: uint8 codes [..., H, D] -> levels fp32 [..., H, D]."""
    index = codes.int()
    if levels.shape[0] > 1:
        index = index + levels.shape[1] * torch.arange(levels.shape[0], device=codes.device)[:, None].int()
    return levels.flatten().index_select(0, index.flatten()).view(codes.shape)
