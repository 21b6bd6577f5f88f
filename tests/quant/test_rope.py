import pytest
import torch

from kvcalib.quant.rope import cos_sin, make_rope, pull_back, rotate, to_post_rope, to_pre_rope


def _inv_freq(pairs):
    return 1.0 / (10000 ** (torch.arange(pairs).float() / pairs))


@pytest.mark.parametrize("kind", ["half", "interleaved", "none"])
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (16, 4), (20, 5)])
def test_order_is_a_permutation_and_rotation_is_undone(kind, dim, pairs):
    rope = make_rope(dim, kind, _inv_freq(pairs), scaling=1.3)
    assert rope.order.sort().values.tolist() == list(range(dim))
    key, positions = torch.randn(7, 2, dim), torch.arange(100, 107)
    pre = to_pre_rope(key, positions, rope)
    torch.testing.assert_close(to_post_rope(pre, positions, rope), key[..., rope.order], rtol=1e-5, atol=1e-5)


def test_interleaved_pairs_rotate_as_complex_numbers():
    rope = make_rope(8, "interleaved", _inv_freq(4))
    key, position = torch.randn(1, 1, 8, dtype=torch.float64).float(), torch.tensor([5])
    as_complex = torch.view_as_complex(key.view(1, 1, 4, 2)) * torch.polar(torch.ones(4), 5 * _inv_freq(4))
    expected = torch.view_as_real(as_complex).flatten(-2)
    got = to_post_rope(key[..., rope.order], position, rope)
    torch.testing.assert_close(got, expected[..., rope.order])


def test_channels_beyond_the_rotary_dims_stay():
    dim, pairs = 12, 2
    rope = make_rope(dim, "half", _inv_freq(pairs), scaling=2.0)
    key = torch.randn(3, 1, dim)
    post = to_post_rope(key[..., rope.order], torch.tensor([1, 2, 3]), rope)
    still = rope.order.argsort()[2 * pairs :]
    torch.testing.assert_close(post[..., still], key[..., 2 * pairs :])


def test_pull_back_is_the_transposed_map():
    rope = make_rope(8, "half", _inv_freq(4), scaling=1.5)
    positions = torch.tensor([3, 9])
    pre = torch.randn(2, 1, 8, requires_grad=True)
    weights = torch.randn(2, 1, 8)
    (to_post_rope(pre, positions, rope) * weights[..., rope.order]).sum().backward()
    torch.testing.assert_close(pull_back(weights, positions, rope), pre.grad)


def test_gain_scales_cos_and_sin():
    rope = make_rope(8, "half", _inv_freq(4), scaling=3.0)
    cos, sin = cos_sin(torch.tensor([11]), rope)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((1, 4), 9.0))
    assert rotate(torch.ones(1, 8), cos, sin).norm().item() == pytest.approx(3 * 8**0.5, rel=1e-5)
