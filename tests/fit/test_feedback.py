import torch

from kvcalib.fit.feedback import energy, fit_feedback, head_fisher, unit_factors


def _gradients(count=2000, heads=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(heads, dim, dim, generator=generator)
    return torch.einsum("nhc,hcd->nhd", torch.randn(count, heads, dim, generator=generator), mix)


def test_factors_multiply_back_to_the_matrix():
    fisher = head_fisher(_gradients()[:, 0].double())
    upper, cost = unit_factors(fisher)
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() == 1).all()
    assert (cost > 0).all()
    assert torch.allclose(upper @ torch.diag(cost) @ upper.T, fisher)


def test_channels_are_coded_from_the_dearest_on_and_cost_less_for_it():
    grad = _gradients()
    matrix, order, weight = fit_feedback(grad)
    for head in range(grad.shape[1]):
        fisher = head_fisher(grad[:, head].double())
        assert (fisher.diagonal()[order[head].long()].diff() <= 0).all()
        assert (weight[head].double() <= fisher.diagonal() * 1.0001).all()
    assert not matrix.triu().any()
    assert torch.equal(matrix, matrix.bfloat16().float())


def test_energy_of_a_few_tokens_does_not_decide_the_directions():
    grad = _gradients(heads=1)[:, 0].double()
    loud = grad.clone()
    loud[:2] = 1000 * torch.eye(8)[0]
    quiet, heard = head_fisher(grad), head_fisher(loud)
    plain = loud.T @ loud / len(loud)

    def correlation(fisher):
        spread = fisher.diagonal().sqrt()
        return fisher / spread / spread[:, None]

    apart = (correlation(heard) - correlation(quiet)).abs().max()
    assert apart < 0.5 * (correlation(plain) - correlation(quiet)).abs().max()
    assert torch.isclose(heard.diagonal().sum(), plain.diagonal().sum())


def test_energy_is_one_on_average():
    assert torch.allclose(energy(_gradients()).mean(0), torch.ones(2, 1, dtype=torch.float64))


def test_a_head_without_gradient_is_rounded_to_nearest():
    grad = torch.stack([_gradients()[:, 0], torch.zeros(2000, 8)], dim=1)
    matrix, order, weight = fit_feedback(grad)
    assert matrix[0].any()
    assert not matrix[1].any()
    assert (weight[1] == 1).all()
    assert sorted(order[1].tolist()) == list(range(8))
    assert (energy(grad)[:, 1] == 1).all()


def test_a_channel_that_hardly_matters_is_not_asked_to_make_up_for_all_others():
    grad = _gradients()
    grad[..., 2] = 1e-8 * grad[..., 0]
    assert fit_feedback(grad).matrix.abs().max() < 10


def test_dead_channels_and_few_tokens_give_finite_numbers():
    grad = _gradients(count=3)
    grad[..., 2] = 0
    assert all(t.isfinite().all() for t in fit_feedback(grad))
    assert all(t.isfinite().all() for t in fit_feedback(grad * 1e-25))
