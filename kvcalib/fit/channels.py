"""Tables of levels per channel, grown out of a table that all channels share.

Lloyd's algorithm in one dimension for all channels at once: every level moves to the weighted mean of the points that
are nearest to it. A channel has few points, and few of them carry most of the weight, so each point also counts with a
part of the mean weight of its channel; a level without points stays where it was.
"""

import torch

from kvcalib.fit.levels import to_bf16_distinct
from kvcalib.quant.codebook import encode, table_offset
from kvcalib.quant.spec import Tables

_PRIOR = 0.1
_STEPS = 12


def refine(v: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, tables: Tables) -> torch.Tensor:
    """v, weight, kept [n, H, D]; tables with one book or one per channel -> levels fp32 [H * D, L], bfloat16-exact."""
    heads, dim = v.shape[1:]
    mass = (weight.double() + _PRIOR * weight.double().mean(0)) * kept
    mass = (mass / mass.amax().clamp_min(1e-300)).float()
    levels = tables.levels.expand(heads * dim, -1).clone()
    row = torch.arange(heads * dim).view(heads, dim) * levels.shape[1]
    offset = 0 if tables.widths is None else table_offset(tables.widths.long())
    for _ in range(_STEPS):
        index = (encode(v, tables._replace(levels=levels)).long() + offset + row).flatten()
        total = torch.zeros(levels.numel()).scatter_add_(0, index, mass.flatten())
        moment = torch.zeros(levels.numel()).scatter_add_(0, index, (mass * v).flatten())
        means = torch.where(total > 0, moment / total.clamp_min(torch.finfo(torch.float32).tiny), levels.flatten())
        levels = means.view_as(levels)
    return _rounded(levels, tables)


def _rounded(levels: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rows, or with widths the table of every width in a row, to distinct bfloat16 numbers."""
    if tables.widths is None:
        return torch.from_numpy(to_bf16_distinct(levels.double().numpy())).float()
    edges = [(table_offset(w), table_offset(w + 1)) for w in range(1, (levels.shape[1] + 2).bit_length() - 1)]
    parts = [to_bf16_distinct(levels[:, start:end].double().numpy()) for start, end in edges]
    return torch.cat([torch.from_numpy(part).float() for part in parts], dim=1)
