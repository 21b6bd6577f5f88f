import numpy as np
import pytest
import torch

from kvcalib.fit.kmeans import distortion, exact_kmeans, nearest
from kvcalib.fit.levels import q_norm, reassign, to_bf16_distinct


def is_bf16(levels) -> bool:
    return bool((torch.from_numpy(levels).to(torch.bfloat16).double().numpy() == levels).all())


def test_rounds_to_nearest_when_there_is_room():
    levels = np.array([-0.7, -0.1, 0.0, 1e-9, 0.3])
    expected = torch.from_numpy(levels).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(to_bf16_distinct(levels), expected)


@pytest.mark.parametrize(
    "levels",
    [
        np.full(5, 0.3),
        np.zeros(4),
        np.array([-1e-40, -0.0, 0.0, 1e-40]),
        np.array([0.999, 0.9991, 0.9992, 1.0, 1.0]),
        np.array([-1.0, -1.0, -0.9999]),
    ],
)
def test_equal_levels_are_pulled_apart(levels):
    rounded = to_bf16_distinct(levels)
    assert (np.diff(rounded) > 0).all()
    assert is_bf16(rounded)
    np.testing.assert_allclose(rounded, levels, atol=len(levels) * 2.0**-7)


@pytest.mark.parametrize("levels", [[0.0, np.nan], [1e39, 2e39], [1.0, 0.0]])
def test_bad_levels_are_refused(levels):
    with pytest.raises(ValueError, match="levels"):
        to_bf16_distinct(np.array(levels))


def test_reassign_never_loses_and_keeps_bfloat16():
    rng = np.random.default_rng(0)
    points, weights = np.clip(rng.normal(scale=0.3, size=4000), -1, 1), rng.exponential(size=4000)
    rounded = to_bf16_distinct(exact_kmeans(points, weights, 16))
    moved = reassign(points, weights, rounded)
    assert is_bf16(moved)
    assert distortion(points, weights, moved) <= distortion(points, weights, rounded)
    start = np.linspace(-1, 1, 16)
    assert distortion(points, weights, reassign(points, weights, start)) < 0.8 * distortion(points, weights, start)


def test_reassign_leaves_an_empty_cell_alone():
    levels = np.array([-1.0, 0.0, 1.0])
    points = np.array([-0.5625, -0.53125, 0.0])
    assert reassign(points, np.ones(3), levels)[2] == 1.0


def test_q_norm_restores_mean_and_spread():
    points = np.random.default_rng(1).normal(0.2, 0.4, 3000).astype(np.float32)
    levels = np.array([-1.0, -0.25, 0.25, 1.0])
    factor, offset = q_norm(points, levels)
    restored = levels[nearest(points, levels)] * factor + offset
    assert restored.mean() == pytest.approx(points.mean(dtype=np.float64))
    assert restored.std() == pytest.approx(points.std(dtype=np.float64))
    assert q_norm(np.full(3, 0.75), levels) == (1.0, -0.25), "no spread to restore"
