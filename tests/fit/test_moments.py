import numpy as np
import pytest

from kvcalib.fit import kmeans
from kvcalib.fit.moments import distortion, measure, pooled

LEVELS = np.array([-0.8, -0.1, 0.3, 0.9])


def _sample(n=3000, channels=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.6, (n, channels)), rng.exponential(size=(n, channels)) ** 2


def test_distortion_of_every_channel_is_that_of_its_points():
    v, weight = _sample()
    found = distortion(measure(v, weight, 512), LEVELS)
    for channel in range(v.shape[1]):
        error = v[:, channel] - LEVELS[kmeans.nearest(v[:, channel], LEVELS)]
        assert found[channel] == pytest.approx((weight[:, channel] * error**2).sum(), rel=1e-4)


def test_points_beyond_the_range_keep_their_value():
    found = distortion(measure(np.array([[7.0], [-5.0]]), np.ones((2, 1)), 64), LEVELS)
    assert found[0] == pytest.approx(6.1**2 + 4.2**2)


def test_pooled_channels_are_the_points_of_those_channels():
    v, weight = _sample()
    chosen = np.array([True, False, True, False])
    centres, mass = pooled(measure(v, weight, 512), chosen)
    own = np.average(v[:, chosen].ravel(), weights=weight[:, chosen].ravel())
    assert np.average(centres, weights=mass) == pytest.approx(own)
    assert (np.diff(centres) > 0).all()
    assert mass.mean() == pytest.approx(1)


def test_without_weight_every_bin_counts_alike():
    centres, mass = pooled(measure(np.zeros((5, 2)), np.zeros((5, 2)), 8), np.array([True, True]))
    assert len(centres) == 8
    assert (mass == 1).all()


def test_nan_is_an_error():
    with pytest.raises(ValueError, match="NaN"):
        measure(np.array([[np.nan]]), np.ones((1, 1)), 8)
