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
    """The tables of one width, [books, 2**width], out of [books, tables end to end]."""
    return levels[:, table_offset(width) : table_offset(width + 1)]


def encode(v: torch.Tensor, tables: Tables) -> torch.Tensor:
    """v [..., H, D] -> uint8 codes [..., H, D]."""
    heads, dim = v.shape[-2:]
    levels = _per_channel(tables.levels, heads, dim)
    if tables.widths is None:
        return _nearest(v.flatten(-2), levels).view(v.shape)
    codes, widths = torch.empty_like(v, dtype=torch.uint8).flatten(-2), tables.widths.flatten()
    for width in widths.unique().tolist():
        channels = (widths == width).nonzero()[:, 0]
        own = levels if levels.shape[0] == 1 else levels[channels]
        codes[..., channels] = _nearest(v.flatten(-2)[..., channels], table_of(own, width))
    return codes.view(v.shape)


def decode(codes: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Inverse of `encode`: uint8 codes [..., H, D] -> levels fp32 [..., H, D]."""
    heads, dim = codes.shape[-2:]
    levels, index = tables.levels, codes.int()
    if levels.shape[0] > 1:
        book = torch.arange(heads * dim, device=codes.device) * levels.shape[0] // (heads * dim)
        index = index + (book * levels.shape[1]).view(heads, dim).int()
    if tables.widths is not None:
        index = index + table_offset(tables.widths.int())
    return levels.flatten().index_select(0, index.flatten()).view(codes.shape)


def _per_channel(levels: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[1, H or H * D books, L] -> [1 or H * D, L]."""
    return levels if levels.shape[0] == 1 else levels.repeat_interleave(heads * dim // levels.shape[0], dim=0)


def _nearest(v: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """v [..., n], levels [1 or n, L] -> uint8 [..., n]."""
    between = (levels[:, 1:] + levels[:, :-1]) / 2
    if levels.shape[0] == 1 and levels.shape[1] <= 16:  # comparing beats searching while levels are few
        codes = torch.zeros_like(v, dtype=torch.uint8)
        for edge in between[0]:
            codes += v > edge
        return codes
    if levels.shape[0] == 1:
        return torch.bucketize(v.contiguous(), between[0]).to(torch.uint8)
    by_channel = v.movedim(-1, 0).flatten(1).contiguous()
    codes = torch.searchsorted(between.contiguous(), by_channel).to(torch.uint8)
    return codes.view(v.shape[-1], *v.shape[:-1]).movedim(0, -1)
