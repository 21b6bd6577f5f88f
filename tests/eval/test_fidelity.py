import math

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.eval.fidelity import Fidelity, merged


def observed(reference, candidate, targets):
    fidelity = Fidelity()
    fidelity.observe(reference, candidate, targets)
    return fidelity


@pytest.fixture
def logits(generator):
    return 3 * torch.randn(150, 400, generator=generator)


@pytest.fixture
def targets(generator):
    return torch.randint(0, 400, (150,), generator=generator)


@pytest.mark.parametrize("noise", [1e-2, 1.0])
def test_agrees_with_the_definition_in_double_precision(logits, targets, noise):
    other = logits + noise * torch.randn_like(logits)
    fidelity = observed(logits, other, targets)
    log_p, log_q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert fidelity.mean_kl == pytest.approx(kl, rel=1e-3)
    nll = torch.nn.functional.cross_entropy(other, targets).item()
    assert fidelity.ppl == pytest.approx(math.exp(nll), rel=1e-5)
    assert fidelity.agreements == (logits.argmax(-1) == other.argmax(-1)).sum()
    assert fidelity.tokens == 150


def test_equal_logits_are_exactly_equal(logits, targets):
    fidelity = observed(logits, logits.clone(), targets)
    assert fidelity.kl == 0
    assert fidelity.top1 == 1
    assert fidelity.ppl == fidelity.ppl_reference


def test_a_shift_of_all_logits_is_no_divergence(logits, targets):
    assert observed(logits, logits + 100, targets).mean_kl < 1e-9


def test_a_token_that_both_rule_out_adds_nothing(logits, targets):
    ruled_out = logits.clone()
    ruled_out[:, 7] = -torch.inf
    assert observed(ruled_out, ruled_out, targets[targets != 7][:1].expand(150)).kl == 0


@pytest.mark.parametrize(("broken", "named"), [(0, "full precision"), (1, "quantised cache")])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_is_an_error_that_says_where(logits, targets, broken, named, value):
    pair = [logits, logits.clone()]
    pair[broken][149, 3] = value
    with pytest.raises(ConfigError, match=named):
        observed(*pair, targets)


def test_merged_windows_weigh_by_their_tokens(logits, targets):
    other = logits + torch.randn_like(logits)
    whole = observed(logits, other, targets)
    rows = slice(0, 20), slice(20, 150)
    parts = merged(observed(logits[r], other[r], targets[r]) for r in rows)
    assert parts.tokens == whole.tokens
    assert parts.ppl == pytest.approx(whole.ppl)
    assert parts.mean_kl == pytest.approx(whole.mean_kl)


def test_a_hopeless_model_has_an_infinite_perplexity():
    logits = torch.zeros(1, 2)
    logits[0, 0] = 1e6
    assert observed(logits, logits, torch.tensor([1])).ppl == math.inf
