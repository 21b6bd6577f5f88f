"""Rounding with error feedback: channels that are rounded later make up for the errors of earlier ones.

To second order an error e of one head of one token adds e^T F e to the loss, F the Fisher information of the head.
Rounding every channel to its nearest level looks at the diagonal of F only. With F = U D U^T, U unit upper triangular
in an order of the channels,

    e^T F e = sum_j D_j (e_j + sum_{i<j} U_ij e_i)^2

so that channel j, once the errors before it are known, is best rounded to the level nearest to

    wanted_j = u_j - sum_{i<j} U_ij e_i

With a trellis (see `trellis`) the levels of a channel are not the nearest ones but those of the best path through the
tokens. Every token counts alike in it, relative to its own range, for those with small values are often attended to
most; an outlier does not count.

An outlier takes what it wants exactly: its correction also absorbs the errors before it. Codes, levels and pages stay
what they are, so it takes no bits and costs nothing to read. (QuIP's LDLQ, arXiv 2307.13304, rounds weights this way
against the covariance of their inputs; here it rounds keys and values as they arrive, against Fisher information.)
"""

import torch

from kvcalib.quant import trellis
from kvcalib.quant.codebook import middles, table_offset
from kvcalib.quant.spec import Tables


def encode(
    u: torch.Tensor,
    step: torch.Tensor | float,
    base: torch.Tensor | float,
    inlier: torch.Tensor | None,
    tables: Tables,
    span: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """u, inlier [..., P, H, D]; step, base broadcast to u -> codes uint8, wanted fp32 [..., P, H, D].

    span: tokens that a trellis connects (see `trellis`); None for levels that stand alone.
    """
    order = tables.order.long()
    x, steps, bases = (_by_channel(torch.as_tensor(t).to(u).expand_as(u), order) for t in (u, step, base))
    divisors = torch.where(steps == 0, 1.0, steps)
    exact = None if inlier is None else _by_channel(~inlier, order)
    if span is None:
        levels, edges = _levels_by_channel(tables, order)
    else:
        widths = tables.widths.gather(1, order)
    codes, wanted, error = torch.empty_like(x, dtype=torch.int64), torch.empty_like(x), torch.empty_like(x)
    for j in range(x.shape[1]):
        made_up = (tables.feedback[:, j, None, :j].float() @ error[:, :j])[:, 0]
        wanted[:, j] = x[:, j] - made_up
        v = (wanted[:, j] - bases[:, j]) / divisors[:, j]
        if span is None:
            codes[:, j] = torch.searchsorted(edges[j], v)
            level = levels[j].gather(-1, codes[:, j])
        else:
            counts = torch.ones_like(v) if exact is None else (~exact[:, j]).float()
            codes[:, j], level = _along_tokens(v, counts, widths[:, j], tables.trellis, span)
        coded = level * steps[:, j] + bases[:, j]
        error[:, j] = (coded if exact is None else torch.where(exact[:, j], wanted[:, j], coded)) - x[:, j]
    back = order.argsort(-1)
    return _by_element(codes, back, u.shape).to(torch.uint8), _by_element(wanted, back, u.shape)


def _along_tokens(
    v: torch.Tensor, weight: torch.Tensor, widths: torch.Tensor, table: torch.Tensor, span: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One channel of every head, v and weight [H, elements], widths [H] -> codes int64, levels [H, elements]."""
    codes, levels = torch.empty_like(v, dtype=torch.int64), torch.empty_like(v)
    for width in widths.unique().tolist():
        own, heads = trellis.table_of(table, width), widths == width
        path = trellis.search(v[heads].view(-1, span), weight[heads].view(-1, span), own, width)
        codes[heads] = (path >> trellis.history(width)).view(-1, v.shape[1])
        levels[heads] = own[path].view(-1, v.shape[1])
    return codes, levels


def _by_channel(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[..., H, D] -> [H, D in coding order, elements]."""
    return _reorder(x.flatten(0, -3).permute(1, 2, 0), order)


def _by_element(x: torch.Tensor, back: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Inverse of `_by_channel`."""
    return _reorder(x, back).permute(2, 0, 1).reshape(shape)


def _reorder(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(1, order[..., None].expand(*order.shape, x.shape[-1]))


def _levels_by_channel(tables: Tables, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [D, H, L] in coding order and the edges between them [D, H, L - 1]; infinite beyond a channel's own."""
    heads, dim = order.shape
    rows = tables.levels.repeat_interleave(heads * dim // len(tables.levels), dim=0).view(heads, dim, -1)
    if tables.widths is not None:
        widths = tables.widths.long()[..., None]
        index = torch.arange(2 ** int(widths.max()), device=rows.device)
        own = rows.gather(-1, (table_offset(widths) + index).clamp_max(rows.shape[-1] - 1))
        rows = torch.where(index < 2**widths, own, torch.inf)
    levels = _reorder(rows, order).transpose(0, 1).contiguous()
    return levels, middles(levels)
