"""The frame that codes come back in: stretched about the mean of the channel.

Levels are means of their cells, which is best for one element on its own: the error is small because what comes back
has less spread than what went in, by the share D of the variance that is lost. For attention that is the wrong bargain.
An output is a mean over many tokens: errors that do not know of each other average out, but a value that always comes
back too small, cov(v, v') = var(v') = (1 - D) var(v), stays too small after any averaging, layer after layer. With

    v' -> mean(v) + g (v' - mean(v')),    g = var(v) / cov(v, v') = 1 / (1 - D)

cov(v, v') = var(v): nothing but noise is left, D / (1 - D) of the variance instead of D. The codes stay what they are,
and channels that are rounded with error feedback still make up for each other's errors, so the mean is kept.

Values are read by averaging, so they get all of it. Keys are read by a softmax over products, where noise is a bias of
its own (the mean of exp is not exp of the mean), so they get half: best for SmolLM2 at 2.3 bits; at 4.5 bits, where
little is lost, the share made no difference that could be told.
(KVQuant's Q-Norm restores the spread instead, var(v') = var(v), which leaves half of the bias, by one factor a table.)
"""

import torch

from kvcalib.quant.spec import Tables

SHARE = {"key": 0.5, "value": 1.0}
_LIMITS = (0.5, 2.0)
"""A channel of few points, or one that error feedback uses for the others', must not run away."""


def with_read_frame(
    v: torch.Tensor, back: torch.Tensor, inlier: torch.Tensor | None, tables: Tables, *, static: bool, share: float
) -> Tables:
    """v and v as it comes back, inlier (None: all) [..., H, D] -> tables with read_zero and read_scale.

    Where ranges are measured at run time (static=False) v is relative to them and has no constant mean: it is
    stretched about the zero point of the frame.
    """
    v, back = (t.flatten(0, -3).double() for t in (v, back))
    weight = torch.ones_like(v) if inlier is None else inlier.flatten(0, -3).double()
    count = weight.sum(0).clamp_min(1)
    mean, mean_back = ((weight * t).sum(0) / count for t in (v, back))
    spread, both = ((weight * (v - mean) * t).sum(0) for t in (v - mean, back - mean_back))
    factor = torch.where(both > 0, spread / both.clamp_min(torch.finfo(torch.float64).tiny), 1.0).clamp(*_LIMITS)
    factor = 1 + share * (factor - 1)
    shift = mean - factor * mean_back if static else torch.zeros_like(mean)
    return tables._replace(
        read_zero=(tables.zero + tables.scale * shift).float(), read_scale=(tables.scale * factor).float()
    )
