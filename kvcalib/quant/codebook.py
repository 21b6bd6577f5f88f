"""Nearest level of a sorted table, and back.

A value exactly between two levels takes the lower one. Values beyond the ends take the end level. With
`Tables.widths` every channel has the table of its own width.
"""

import torch

from kvcalib.quant.spec import Tables


def table_offset(width):
    """Where the table of one width starts among the tables of width 1, 2, 3, ... laid end to end."""
    return 2**width - 2


def table_of(levels: torch.Tensor, width: int) -> torch.Tensor:
    """The table of one width, [2**width], out of [1, tables end to end]."""
    return levels[0, table_offset(width) : table_offset(width + 1)]


def encode(v: torch.Tensor, tables: Tables) -> torch.Tensor:
    """v [..., H, D] -> uint8 codes [..., H, D]."""
    levels = tables.levels
    if tables.widths is not None:
        codes = torch.empty_like(v, dtype=torch.uint8)
        for width in tables.widths.unique().tolist():
            channels = tables.widths == width
            codes[..., channels] = _nearest(v[..., channels], table_of(levels, width))
        return codes
    if levels.shape[0] == 1:
        return _nearest(v, levels[0])
    return torch.stack([_nearest(v[..., h, :], levels[h]) for h in range(levels.shape[0])], dim=-2)


def decode(codes: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Inverse of `encode`: uint8 codes [..., H, D] -> levels fp32 [..., H, D]."""
    index, levels = codes.int(), tables.levels
    if tables.widths is not None:
        index = index + table_offset(tables.widths.int())
    elif levels.shape[0] > 1:
        index = index + levels.shape[1] * torch.arange(levels.shape[0], device=codes.device)[:, None].int()
    return levels.flatten().index_select(0, index.flatten()).view(codes.shape)


def _nearest(v: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(v.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
