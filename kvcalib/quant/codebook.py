"""Nearest level of a sorted table, and back.

A value exactly between two levels takes the lower one. Values beyond the ends take the end level. With
`Tables.widths` every channel has the table of its own width; with `Tables.edges` these decide, wherever the levels are.
"""

import torch

from kvcalib.quant.spec import Tables


def table_offset(width):
    """Where the table of one width starts among the tables of width 1, 2, 3, ... laid end to end."""
    return 2**width - 2


def table_of(levels: torch.Tensor, width: int) -> torch.Tensor:
    """The tables of one width, [books, 2**width], out of [books, tables end to end]."""
    return levels[:, table_offset(width) : table_offset(width + 1)]


def middles(levels: torch.Tensor) -> torch.Tensor:
    """[..., L] -> [..., L - 1]: where the nearest level changes."""
    return (levels[..., 1:] + levels[..., :-1]) / 2


def encode(v: torch.Tensor, tables: Tables) -> torch.Tensor:
    """v [..., H, D] -> uint8 codes [..., H, D]."""
    heads, dim = v.shape[-2:]
    if tables.widths is None:
        edges = middles(tables.levels) if tables.edges is None else tables.edges
        return _between(v.flatten(-2), _per_channel(edges, heads, dim)).view(v.shape)
    levels = _per_channel(tables.levels, heads, dim)
    codes, widths = torch.empty_like(v, dtype=torch.uint8).flatten(-2), tables.widths.flatten()
    for width in widths.unique().tolist():
        channels = (widths == width).nonzero()[:, 0]
        own = levels if levels.shape[0] == 1 else levels[channels]
        codes[..., channels] = _between(v.flatten(-2)[..., channels], middles(table_of(own, width)))
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


def _per_channel(rows: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[1, H or H * D books, n] -> [1 or H * D, n]."""
    return rows if rows.shape[0] == 1 else rows.repeat_interleave(heads * dim // rows.shape[0], dim=0)


def _between(v: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """v [..., n], edges [1 or n, L - 1] -> uint8 [..., n]: how many edges lie below."""
    if edges.shape[0] == 1 and edges.shape[1] < 16:  # comparing beats searching while levels are few
        codes = torch.zeros_like(v, dtype=torch.uint8)
        for edge in edges[0]:
            codes += v > edge
        return codes
    if edges.shape[0] == 1:
        return torch.bucketize(v.contiguous(), edges[0]).to(torch.uint8)
    by_channel = v.movedim(-1, 0).flatten(1).contiguous()
    codes = torch.searchsorted(edges.contiguous(), by_channel).to(torch.uint8)
    return codes.view(v.shape[-1], *v.shape[:-1]).movedim(0, -1)
