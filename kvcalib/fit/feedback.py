"""The sensitivity of a whole head, and the matrix that rounding with error feedback needs (see `quant.feedback`).

An error e [D] of one head of one token adds, to second order, 1/2 e^T F e to the loss, F = E[g g^T] with g the
gradient. The diagonal of F is what `fit.sensitivity` weighs with. The rest says which errors cancel: keys meet queries,
queries of a head have common directions, and errors across these directions cost nothing.

Tokens differ by orders of magnitude in the energy |g|^2, so a plain mean would be the opinion of a few. The model here
is F_t = |g_t|^2 * F for token t: one F per head for the directions, one number per token for the energy. F is the
mean of g g^T / |g|, between a plain mean and one of directions alone, scaled to the trace of the plain mean, and mixed
with a little of its own diagonal: what looks free on the sample must not look quite free.

With F = U D U^T, U unit upper triangular in coding order (most sensitive channel first, so that cheap channels make
up for dear ones), D_j is what an error of channel j costs once later channels have made up for what they can.
"""

from typing import NamedTuple

import torch

_DIAGONAL = 0.02
"""Share of the diagonal that is mixed in."""
_FLOOR = 1e-6
"""Share of the mean diagonal that every channel has at least, or a dead one would have to make up for all others."""


class Feedback(NamedTuple):
    """matrix fp32 [H, D, D]: row j holds U_ij, i < j, both in coding order, bfloat16-exact; order int16 [H, D]: the
    channel that is coded first, second, ...; weight fp32 [H, D]: D_j, by channel."""

    matrix: torch.Tensor
    order: torch.Tensor
    weight: torch.Tensor


def fit_feedback(grad: torch.Tensor) -> Feedback:
    """Signed gradients of u, [n, H, D]."""
    heads = [_of_head(head_fisher(head.double())) for head in grad.unbind(1)]
    return Feedback(*(torch.stack(parts) for parts in zip(*heads, strict=True)))


def energy(grad: torch.Tensor) -> torch.Tensor:
    """|g_t|^2 over its mean, float64 [n, H, 1]; ones where a head has no gradient."""
    power = grad.double().square().sum(-1, keepdim=True)
    mean = power.mean(0, keepdim=True)
    return torch.where(mean > 0, power / mean.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def head_fisher(grad: torch.Tensor) -> torch.Tensor:
    """Gradients float64 [n, D] -> F [D, D]."""
    length = grad.norm(dim=-1, keepdim=True)
    directions = grad / length.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    fisher = directions.T @ directions
    trace = fisher.diagonal().sum()
    if trace == 0:
        return torch.eye(grad.shape[1], dtype=torch.float64)
    fisher = fisher * (grad.square().sum() / len(grad) / trace)
    diagonal = _DIAGONAL * fisher.diagonal() + _FLOOR * fisher.diagonal().mean()
    return (1 - _DIAGONAL) * fisher + torch.diag(diagonal)


def _of_head(fisher: torch.Tensor) -> Feedback:
    order = fisher.diagonal().argsort(descending=True, stable=True)
    upper, cost = unit_factors(fisher[order][:, order])
    weight = torch.empty_like(cost).scatter_(0, order, cost)
    return Feedback(upper.T.tril(-1).bfloat16().float(), order.to(torch.int16), weight.float())


def unit_factors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric positive semidefinite F -> (U, D) with F = U diag(D) U^T, U unit upper triangular."""
    floor = torch.finfo(torch.float64).eps * matrix.diagonal().max()
    lower = torch.linalg.cholesky(matrix.flip(0, 1) + floor * torch.eye(len(matrix), dtype=matrix.dtype))
    diagonal = lower.diagonal()
    return (lower / diagonal).flip(0, 1), diagonal.square().flip(0)
