import numpy as np
import pytest
import torch

from kvcalib.fit.frame import frame_from_bounds, symmetric_frame


def test_interval_maps_to_minus_one_and_one():
    lo, hi = np.array([[-3.0, 10.0]]), np.array([[1.0, 10.5]])
    zero, scale = frame_from_bounds(lo, hi)
    assert zero.dtype == scale.dtype == torch.float32
    np.testing.assert_allclose((lo - zero.numpy()) / scale.numpy(), -1)
    np.testing.assert_allclose((hi - zero.numpy()) / scale.numpy(), 1)


def test_constant_channel_returns_its_constant():
    lo = hi = np.array([100.0, 0.0, -1.0])
    zero, scale = frame_from_bounds(lo, hi)
    assert (scale > 0).all()
    u = (torch.tensor([100.0, 0.0, -1.0]) - zero) / scale
    assert u.abs().max() == 0
    worst = zero + scale  # the farthest level that the fit may offer
    np.testing.assert_allclose(worst.numpy(), [100.0, 0.0, -1.0], rtol=2e-6, atol=2e-4 * 1e-2)


def test_layer_of_zeros_has_a_finite_inverse():
    zero, scale = frame_from_bounds(np.zeros(4), np.zeros(4))
    assert torch.isfinite(1 / scale).all()
    assert (zero == 0).all()


def test_floor_follows_the_widest_channel():
    _, scale = frame_from_bounds(np.array([-1.0, 0.0]), np.array([1.0, 1e-20]))
    assert scale[1].item() == pytest.approx(1e-6)


def test_bounds_beyond_half_of_float32_do_not_overflow():
    _, scale = frame_from_bounds(np.array([-3e38]), np.array([3e38]))
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize(("lo", "hi"), [(0.0, np.nan), (0.0, np.inf), (1.0, 0.0), (-1e39, 1e39)])
def test_bad_bounds_are_refused(lo, hi):
    with pytest.raises(ValueError, match="frame"):
        frame_from_bounds(np.array([lo]), np.array([hi]))


def test_symmetric_frame():
    zero, scale = symmetric_frame(np.array([2.0, 0.5]))
    assert zero.tolist() == [0, 0]
    assert scale.tolist() == [2, 0.5]
