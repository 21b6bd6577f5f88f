import pytest
import torch

from kvcalib.fit.sensitivity import weights


def test_squared_gradient_times_squared_range():
    grad, scale = torch.tensor([[[-3.0, 0.5]]]), torch.tensor([[2.0, 4.0]])
    assert weights(grad, scale, use_fisher=True, use_range=True).flatten().tolist() == [36, 4]
    assert weights(grad, scale, use_fisher=True, use_range=False).flatten().tolist() == [9, 0.25]
    assert weights(grad, scale, use_fisher=False, use_range=True).flatten().tolist() == [4, 16]
    assert weights(grad, scale, use_fisher=False, use_range=False).flatten().tolist() == [1, 1]


def test_small_bfloat16_gradients_do_not_underflow():
    grad = torch.tensor([[[1e-25]]], dtype=torch.bfloat16)
    found = weights(grad, torch.ones(1, 1), use_fisher=True, use_range=True)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(1e-50, rel=0.01)


def test_no_sensitivity_falls_back_to_equal_weights():
    with pytest.warns(UserWarning, match="sensitivity"):
        found = weights(torch.zeros(2, 1, 3), torch.ones(1, 3), use_fisher=True, use_range=True)
    assert (found == 1).all()


def test_not_finite_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        weights(torch.tensor([[[float("nan")]]]), torch.ones(1, 1), use_fisher=True, use_range=True)
