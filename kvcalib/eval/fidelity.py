"""How far the predictions with a quantised cache are from those of the unchanged model.

Per scored token, with p the reference's distribution over the vocabulary and q the candidate's:

    nll     -log p[target] and -log q[target]
    KL      sum p log(p / q), in nats
    top-1   the most likely token is the same

KL is computed as the sum of p (log p - log q - 1) + q. The extra terms cancel over the vocabulary
and make every summand non-negative, so a rounding error of the normalisers enters squared: float32
resolves a KL of 1e-6, and equal logits give exactly 0.
"""

from collections.abc import Iterable

import torch

from kvcalib.errors import ConfigError

_ROWS = 16
"""Positions of which the whole vocabulary is held in float32 at a time; few enough to stay near the processor."""


class Fidelity:
    """Sums over scored tokens; `merged` joins windows."""

    def __init__(self):
        self.tokens, self.agreements = 0, 0
        self.nll_reference, self.nll, self.kl = 0.0, 0.0, 0.0

    def observe(self, reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [N, V] of both, targets int64 [N]. Raises ConfigError when a logit is NaN."""
        for rows in zip(*(t.split(_ROWS) for t in (reference, candidate, targets)), strict=True):
            self._observe(*rows)

    def _observe(self, reference, candidate, targets) -> None:
        log_p = _log_softmax(reference, "the model in full precision")
        log_q = _log_softmax(candidate, "the model over the quantised cache")
        p, q = log_p.exp(), log_q.exp()
        kl = (log_p - log_q).sub_(1).mul_(p).masked_fill_(p == 0, 0).add_(q)
        self.kl += kl.sum(dtype=torch.float64).item()
        self.nll_reference -= _picked(log_p, targets)
        self.nll -= _picked(log_q, targets)
        self.agreements += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        self.tokens += len(targets)

    @property
    def ppl_reference(self) -> float:
        return _exp(self.nll_reference / self.tokens)

    @property
    def ppl(self) -> float:
        return _exp(self.nll / self.tokens)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.tokens

    @property
    def top1(self) -> float:
        return self.agreements / self.tokens


def merged(parts: Iterable[Fidelity]) -> Fidelity:
    total = Fidelity()
    for part in parts:
        for name, amount in vars(part).items():
            setattr(total, name, getattr(total, name) + amount)
    return total


def _log_softmax(logits: torch.Tensor, whose: str) -> torch.Tensor:
    log_p = logits.float().log_softmax(-1)
    if log_p[:, 0].isnan().any():  # one NaN makes the normaliser of its row NaN, and with it the whole row
        raise ConfigError(
            f"{whose} gives NaN logits on the evaluation text; try model.dtype=float32 or model.dtype=bfloat16"
        )
    return log_p


def _picked(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    return log_p.gather(-1, targets[:, None]).sum(dtype=torch.float64).item()


def _exp(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).exp().item()  # inf where math.exp would raise
