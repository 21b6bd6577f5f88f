import numpy as np
import pytest

from kvcalib.fit.histogram import compress


@pytest.fixture
def sample():
    rng = np.random.default_rng(0)
    return rng.uniform(-1.2, 1.2, 5000), rng.exponential(size=5000)


def test_weight_and_mean_survive(sample):
    points, weights = sample
    centres, totals = compress(points, weights, bins=64)
    assert len(centres) <= 64
    assert totals.sum() == pytest.approx(weights.sum())
    assert (centres * totals).sum() == pytest.approx((points * weights).sum())
    assert (np.diff(centres) > 0).all()


def test_points_move_by_less_than_a_bin(sample):
    points = sample[0][np.abs(sample[0]) <= 1]
    centres, _ = compress(points, np.ones_like(points), bins=256)
    assert np.abs(points[:, None] - centres).min(1).max() <= 2 / 256


def test_points_beyond_the_ends_keep_their_value():
    centres, _ = compress(np.array([-3.0, 0.1, 2.0]), np.ones(3), bins=8)
    np.testing.assert_allclose(centres, [-3, 0.1, 2])


def test_empty_and_weightless_bins_are_left_out():
    centres, weights = compress(np.array([-0.5, 0.5]), np.array([0.0, 2.0]), bins=16)
    assert centres.tolist() == [0.5]
    assert weights.tolist() == [2.0]


@pytest.mark.parametrize(("points", "weights"), [([np.nan], [1.0]), ([0.0], [np.inf]), ([0.0], [-1.0])])
def test_bad_numbers_are_refused(points, weights):
    with pytest.raises(ValueError, match="weights"):
        compress(np.array(points), np.array(weights))
