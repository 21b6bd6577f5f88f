"""k-means against all partitions of small samples, and the inputs on which scikit-learn fails."""

from itertools import combinations

import numpy as np
import pytest

from kvcalib.fit.kmeans import distortion, exact_kmeans, nearest, pad_levels, weighted_kmeans


def brute_force(points, weights, k) -> float:
    """Least total cost over every way to cut the sorted points into k intervals."""
    order = np.argsort(points)
    points, weights = points[order], weights[order]
    best = np.inf
    for cuts in combinations(range(1, len(points)), k - 1):
        cells = zip(np.split(points, cuts), np.split(weights, cuts), strict=True)
        cost = sum((w * (x - np.average(x, weights=w)) ** 2).sum() for x, w in cells)
        best = min(best, cost)
    return best / weights.sum()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_exact_equals_brute_force(seed, k):
    rng = np.random.default_rng(seed)
    points, weights = rng.normal(size=10), rng.exponential(size=10) + 0.01
    levels = exact_kmeans(points, weights, k)
    assert len(levels) == k
    assert distortion(points, weights, levels) == pytest.approx(brute_force(points, weights, k), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [2, 4, 8, 16])
def test_sklearn_is_never_better_and_not_far_off(seed, k):
    rng = np.random.default_rng(seed)
    points, weights = rng.normal(size=1500), rng.exponential(size=1500)
    exact = distortion(points, weights, exact_kmeans(points, weights, k))
    fitted = distortion(points, weights, weighted_kmeans(points, weights, k, seed=seed))
    assert exact * (1 - 1e-9) <= fitted <= 1.3 * exact


@pytest.mark.parametrize("solve", [exact_kmeans, lambda p, w, k: weighted_kmeans(p, w, k, seed=0)])
class TestBothSolvers:
    def test_weights_are_repetitions(self, solve):
        rng = np.random.default_rng(3)
        points, counts = rng.normal(size=40), rng.integers(1, 6, 40)
        repeated = np.repeat(points, counts)
        weighted = solve(points, counts.astype(float), 4)
        np.testing.assert_allclose(weighted, solve(repeated, np.ones(len(repeated)), 4), rtol=1e-9)

    def test_sorted_and_a_fixed_point_of_lloyd(self, solve):
        rng = np.random.default_rng(4)
        points, weights = rng.uniform(-1, 1, 300), rng.uniform(size=300)
        levels = solve(points, weights, 8)
        cell = nearest(points, levels)
        means = np.bincount(cell, weights * points) / np.bincount(cell, weights)
        assert (np.diff(levels) > 0).all()
        np.testing.assert_allclose(levels, means, atol=1e-3)

    @pytest.mark.parametrize("factor", [1e-40, 1e-300, 1e30])
    def test_weights_of_any_size(self, solve, factor):
        rng = np.random.default_rng(5)
        points, weights = rng.uniform(-1, 1, 200), rng.uniform(0.5, 1, 200)
        levels = solve(points, weights * factor, 4)
        np.testing.assert_allclose(levels, solve(points, weights, 4), rtol=1e-6)

    @pytest.mark.parametrize("points", [[0.5], [1.0, 1.0, 1.0], [-1.0, 0.0, 1.0], [0.0, 2.0]])
    def test_fewer_distinct_points_than_levels(self, solve, points):
        levels = solve(np.array(points), np.ones(len(points)), 16)
        assert len(levels) == 16
        assert np.isfinite(levels).all()
        assert (np.diff(levels) > 0).all()
        assert set(points) <= set(levels.tolist())

    def test_no_weight_at_all(self, solve):
        points = np.linspace(-1, 1, 64)
        with pytest.warns(UserWarning, match="zero"):
            levels = solve(points, np.zeros(64), 4)
        np.testing.assert_allclose(levels, [-0.75, -0.25, 0.25, 0.75], atol=0.12)

    def test_points_without_weight_do_not_count(self, solve):
        points = np.array([-1.0, -0.9, 0.9, 1.0, 50.0])
        levels = solve(points, np.array([1.0, 1, 1, 1, 0]), 2)
        np.testing.assert_allclose(levels, [-0.95, 0.95])

    def test_not_finite_is_refused(self, solve):
        with pytest.raises(ValueError, match="NaN"):
            solve(np.array([0.0, np.nan]), np.ones(2), 1)
        with pytest.raises(ValueError, match="no points"):
            solve(np.array([]), np.array([]), 1)


def test_large_offset_costs_no_precision():
    points = 1e6 + np.array([0.0, 0.001, 1.0, 1.001])
    np.testing.assert_allclose(exact_kmeans(points, np.ones(4), 2) - 1e6, [0.0005, 1.0005], atol=1e-8)


def test_a_tie_takes_the_lower_level():
    assert nearest(np.array([-0.5, 0.5, 0.51]), np.array([-1.0, 0.0, 1.0])).tolist() == [0, 1, 2]


def test_padding_adds_the_ends_and_then_halves_gaps():
    assert pad_levels(np.array([-1.0, 1.0]), 3).tolist() == [-1, 0, 1]
    assert pad_levels(np.array([0.5]), 4).tolist() == [-1, -0.25, 0.5, 1]
    assert pad_levels(np.array([3.0]), 3).tolist() == [-1, 1, 3]
