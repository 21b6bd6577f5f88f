import torch

from kvcalib.fit.channels import refine
from kvcalib.quant.codebook import decode, encode
from kvcalib.quant.spec import Tables


def weighted_error(v, weight, tables):
    return ((decode(encode(v, tables), tables) - v).square() * weight).sum().item()


def frame(heads, dim):
    return torch.zeros(heads, dim), torch.ones(heads, dim)


def test_channels_of_different_shape_gain_from_tables_of_their_own(generator):
    v = torch.rand(400, 2, 4, generator=generator) * 2 - 1
    v[:, 0] = v[:, 0] ** 3  # crowded around zero
    weight = torch.rand(400, 2, 4, generator=generator)
    shared = Tables(*frame(2, 4), torch.linspace(-1, 1, 4).bfloat16().float()[None])
    levels = refine(v, weight, torch.ones_like(v, dtype=torch.bool), shared)
    assert levels.shape == (8, 4)
    assert torch.equal(levels, levels.bfloat16().float())
    assert (levels.diff(dim=1) > 0).all()
    assert weighted_error(v, weight, shared._replace(levels=levels)) < 0.7 * weighted_error(v, weight, shared)


def test_outliers_and_levels_without_points_change_nothing():
    v = torch.full((32, 1, 2), 0.3)
    v[5] = 90.0
    kept = v < 1
    shared = Tables(*frame(1, 2), torch.tensor([[-1.0, -0.5, 0.5, 1.0]]))
    levels = refine(v, torch.ones_like(v), kept, shared)
    assert levels[:, [0, 1, 3]].tolist() == [[-1.0, -0.5, 1.0]] * 2
    torch.testing.assert_close(levels[:, 2], torch.full((2,), 0.3), rtol=0.01, atol=0)


def test_with_widths_only_the_table_of_the_own_width_moves(generator):
    v = torch.rand(200, 1, 2, generator=generator)
    rows = torch.cat([torch.linspace(-1, 1, 2**w) for w in range(1, 4)]).bfloat16().float()[None]
    shared = Tables(*frame(1, 2), rows, None, torch.tensor([[1, 3]], dtype=torch.uint8))
    levels = refine(v, torch.ones_like(v), torch.ones_like(v, dtype=torch.bool), shared)
    moved = (levels != rows).any(0)
    assert levels[0, 2:].equal(rows[0, 2:])
    assert levels[1, :6].equal(rows[0, :6])
    assert moved[1]
    assert moved[6:].any()
