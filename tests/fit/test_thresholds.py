"""Streamed tails against numpy's percentiles of the whole sample."""

import numpy as np
import pytest
import torch

from kvcalib.fit.thresholds import Tails, tail_quantile, tail_size, two_sided


def observed(x: torch.Tensor, k: int, batch: int) -> Tails:
    tails = Tails(k)
    for part in x.split(batch):
        tails.observe(part)
    return tails


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.01, 0.02, 0.05])
def test_quantiles_equal_numpy_whatever_the_batches(share, batch):
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) ** 3
    low, high, count = observed(x, tail_size(0.025, 500), batch).result()
    q_lo, q_hi = two_sided(share)
    found = tail_quantile(low, high, count=count, q_lo=q_lo, q_hi=q_hi)
    expected = np.percentile(x.double().numpy(), [100 * q_lo, 100 * q_hi], axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 399, 400, 401])
def test_short_streams(count):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    low, high, n = observed(x, tail_size(0.005, count), 100).result()
    found = tail_quantile(low, high, count=n, q_lo=0.005, q_hi=0.995)
    np.testing.assert_allclose(found, np.percentile(x.double().numpy(), [0.5, 99.5], axis=0), rtol=1e-9)


def test_half_of_the_share_lies_outside_on_each_side():
    x = torch.randn(10_000, 1, generator=torch.Generator().manual_seed(2))
    low, high, n = observed(x, tail_size(0.005, 10_000), 512).result()
    lo, hi = tail_quantile(low, high, count=n, q_lo=0.005, q_hi=0.995)
    assert (x.numpy() < lo).sum() == 50
    assert (x.numpy() > hi).sum() == 50


def test_ties_and_bfloat16():
    x = torch.tensor([[1.0], [1.0], [1.0], [2.0], [2.0]], dtype=torch.bfloat16)
    low, high, n = observed(x, 5, 2).result()
    assert tail_quantile(low, high, count=n, q_lo=0.25, q_hi=0.75)[1].item() == 2.0
    assert low.flatten().tolist() == [1, 1, 1, 2, 2]
    assert high.flatten().tolist() == [2, 2, 1, 1, 1]


def test_too_few_kept_is_refused():
    low, high, n = observed(torch.randn(1000, 1), 5, 100).result()
    with pytest.raises(ValueError, match="kept per side"):
        tail_quantile(low, high, count=n, q_lo=0.01, q_hi=0.99)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused(bad):
    x = torch.zeros(50, 2)
    x[20, 1] = bad
    with pytest.raises(ValueError, match="NaN"):
        Tails(3).observe(x)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_is_a_share(share):
    with pytest.raises(ValueError, match="share"):
        two_sided(share)


def test_reset_forgets():
    tails = Tails(2)
    tails.observe(torch.full((4, 1), 9.0))
    tails.reset()
    tails.observe(torch.zeros(3, 1))
    low, high, count = tails.result()
    assert count == 3
    assert high.max() == 0
