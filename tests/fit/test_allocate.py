from itertools import product

import numpy as np
import pytest

from kvcalib.fit.allocate import allocate


def total(distortion, widths):
    return distortion[np.arange(len(widths)), widths - 1].sum()


def test_close_to_the_best_of_all_allocations():
    random = np.random.default_rng(0)
    for _ in range(20):
        scale = 10.0 ** random.uniform(-3, 3, 6)
        distortion = scale[:, None] * 4.0 ** -np.arange(1, 5) * random.uniform(0.8, 1.2, (6, 4))
        price = random.choice([1.0, 2.0], 6)
        budget = price.sum() * 2.2
        widths = allocate(distortion, price, budget)
        assert (price * widths).sum() <= budget
        feasible = (np.array(w) for w in product(range(1, 5), repeat=6) if (price * np.array(w)).sum() <= budget)
        best = min(total(distortion, w) for w in feasible)
        assert total(distortion, widths) <= 1.3 * best


def test_sensitive_units_get_more_bits():
    distortion = np.array([[1.0], [100.0], [1e4]]) * 4.0 ** -np.arange(1, 6)
    assert allocate(distortion, np.ones(3), 9).tolist() == [1, 3, 5]


def test_equal_units_get_equal_bits_and_the_rest_is_spent():
    distortion = np.tile(4.0 ** -np.arange(1, 6), (8, 1))
    assert sorted(allocate(distortion, np.ones(8), 20).tolist()) == [2] * 4 + [3] * 4
    assert allocate(distortion, np.ones(8), 1000).tolist() == [5] * 8
    assert allocate(np.zeros((4, 5)), np.ones(4), 12).tolist() == [1] * 4


def test_too_small_a_budget():
    with pytest.raises(ValueError, match="less than one bit"):
        allocate(np.ones((4, 5)), np.ones(4), 3)
