import pytest
import torch

from kvcalib.quant.rotation import hadamard, rotate, unrotate


@pytest.mark.parametrize("dim", [64, 80, 96, 20, 7])
def test_rotation_is_orthonormal_and_its_own_inverse(dim):
    x = torch.randn(5, 2, dim)
    turned = rotate(x, "hadamard")
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(unrotate(turned, "hadamard"), x)
    assert rotate(x, "none") is x


def test_one_large_channel_is_spread_over_its_block():
    x = torch.zeros(1, 64)
    x[0, 5] = 8.0
    assert rotate(x, "hadamard").abs().tolist() == [[1.0] * 64]
    torch.testing.assert_close(hadamard(2) * 2**0.5, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
