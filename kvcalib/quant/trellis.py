"""Trellis-coded levels: which level a code means depends on the codes of the tokens before it.

A channel of width w has 2**(w + h) levels in place of 2**w, of which w bits choose. Its codes are a bit stream, token
after token, and the level of a token is the entry of the table at

    window = the w bits of its code, above the h bits that the stream had just before

so that 2**h states connect the tokens, each leading to all levels that begin with its h bits. Encoding looks for the
path of least weighted squared error through the tokens of a page (Viterbi); decoding is a shift and a look-up, for all
tokens at once. At the same rate the error is 0.5 to 1.3 dB below that of the best separate levels for a normal
distribution, and more for one with long tails, because a path can spend its reach where it is needed.

(Trellis-coded quantisation: Marcellin and Fischer 1990; with overlapping windows of a stream, as in QTIP, arXiv
2406.11235, which codes weights.) A table has at most 64 entries, what kernels hold in registers, so the widest codes
have less history or none. The stream begins anew, with zeros, `TensorSpec.span` tokens.
"""

import torch

from kvcalib.quant.spec import Tables

WIDEST = 6
_HISTORY = (0, 2, 3, 2, 2, 1, 0)


def history(width: int) -> int:
    """h: bits before a code of some width that take part in choosing its level."""
    return _HISTORY[width]


def table_offset(width: int) -> int:
    """Where the table of one width starts among the tables of width 1, 2, 3, ... laid end to end."""
    return sum(2 ** (w + _HISTORY[w]) for w in range(1, width))


def table_of(levels: torch.Tensor, width: int) -> torch.Tensor:
    """The table of one width, [2**(w + h)], out of the tables end to end."""
    return levels[table_offset(width) : table_offset(width + 1)]


def decode(codes: torch.Tensor, tables: Tables, span: int) -> torch.Tensor:
    """codes uint8 [..., P, H, D] -> levels fp32 [..., P, H, D]."""
    starts = torch.tensor([table_offset(w) for w in range(WIDEST + 1)], device=codes.device)
    return tables.trellis[windows(codes, tables.widths, span) + starts[tables.widths.long()]]


def windows(codes: torch.Tensor, widths: torch.Tensor, span: int) -> torch.Tensor:
    """codes uint8 [..., P, H, D], widths [H, D] -> int64 index into the table of each channel's width."""
    width = widths.long()
    bits = torch.tensor(_HISTORY, device=codes.device)[width]
    spans = codes.long().unflatten(-3, (-1, span))
    padded = torch.nn.functional.pad(spans, (0, 0, 0, 0, 2, 0))
    stream = padded[..., :-2, :, :] | (padded[..., 1:-1, :, :] << width)
    return ((spans << bits) | (stream >> (2 * width - bits))).flatten(-4, -3)


def search(v: torch.Tensor, weight: torch.Tensor, levels: torch.Tensor, width: int) -> torch.Tensor:
    """v, weight fp32 [n, span] of one width -> int64 [n, span]: the window of each token on the best path.

    window = next state * 2**width + j, and its low h bits are the state before: what enters a state lies side by side.
    """
    states, table, count = 2 ** history(width), levels[:, None], len(v)
    first = torch.arange(states, device=v.device)[:, None] << width
    cost = torch.full((states, count), torch.inf, dtype=v.dtype, device=v.device)
    cost[0] = 0
    back = []
    for x, mass in zip(v.T.contiguous(), weight.T.contiguous(), strict=True):
        error = (x - table).square_().mul_(mass)
        error -= error.amin(0)  # one far token must not drown the others in float32
        through = error.view(len(table) // states, states, count).add_(cost)
        cost, choice = through.view(states, 2**width, count).min(1)
        back.append(choice.add_(first))
    state, path = cost.argmin(0, keepdim=True), []
    for choice in reversed(back):
        path.append(choice.gather(0, state))
        state = path[-1] & (states - 1)
    return torch.cat(path[::-1]).T.contiguous()
