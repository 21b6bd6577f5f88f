from dataclasses import replace

import pytest
import torch

from kvcalib.quant import codebook, ranges
from kvcalib.quant.codec import dequantise, normalise, quantise, simulate
from kvcalib.quant.spec import PAGE, Tables, TensorSpec


def _tables(heads, dim, levels, scale=1.0, zero=0.0, books=1):
    frame = torch.full((heads, dim), zero), torch.full((heads, dim), scale)
    return Tables(*frame, torch.as_tensor(levels).float().expand(books, -1))


def _uniform(bits):
    return torch.arange(2**bits)


def test_a_tie_takes_the_lower_level():
    tables = _tables(1, 4, [0.0, 1.0, 2.0])
    codes = codebook.encode(torch.tensor([[0.5, 0.51, -3.0, 9.0]]), tables)
    assert codes.tolist() == [[0, 1, 0, 2]]


def test_every_head_can_have_its_own_levels():
    tables = _tables(2, 2, [0.0, 1.0])._replace(levels=torch.tensor([[0.0, 1.0], [10.0, 20.0]]))
    v = torch.tensor([[[0.9, 0.1], [19.0, 11.0]]])
    codes = codebook.encode(v, tables)
    assert codebook.decode(codes, tables).tolist() == [[[1.0, 0.0], [20.0, 10.0]]]


@pytest.mark.parametrize("books", [1, 2])
@pytest.mark.parametrize("bits", [2, 5])
def test_edges_choose_the_codes_and_levels_say_what_they_mean(bits, books):
    plain = _tables(2, 8, torch.linspace(-1, 1, 2**bits).bfloat16(), books=books)
    moved = plain._replace(levels=1.5 * plain.levels + 0.25, edges=codebook.middles(plain.levels))
    spec, x = TensorSpec(bits, "nuq", "static", books="head" if books == 2 else "layer"), torch.randn(PAGE, 2, 8)
    codes = quantise(x, spec, plain).codes
    assert torch.equal(quantise(x, replace(spec, q_norm=True), moved).codes, codes)
    assert not torch.equal(quantise(x, spec, moved._replace(edges=None)).codes, codes), "the nearest are others"
    torch.testing.assert_close(simulate(x, spec, moved), 1.5 * simulate(x, spec, plain) + 0.25)


def test_outliers_are_those_that_moved_levels_miss_most():
    """And their corrections are what is missing from the moved levels."""
    tables = _tables(1, 2, [0.0, 4.0])._replace(edges=torch.tensor([[1.0]]), weight=torch.ones(1, 2))
    spec = TensorSpec(1, "nuq", "static", outliers=1 / (PAGE * 2), rank="error", q_norm=True)
    x = torch.zeros(PAGE, 1, 2)
    x[5, 0, 1], x[6, 0, 1] = 1.25, 0.75
    coded = quantise(x, spec, tables)
    assert (coded.positions.tolist(), coded.corrections.tolist()) == ([PAGE + 5], [-2.75])
    assert coded.codes.sum() == 1
    assert dequantise(coded, spec, tables)[5:7, 0, 1].tolist() == [1.25, 0.0]


@pytest.mark.parametrize("rounding", ["nearest", "feedback"])
def test_a_read_frame_changes_what_codes_mean_and_leaves_outliers_exact(rounding):
    plain = _tables(1, 8, torch.linspace(-1, 1, 4).bfloat16())._replace(weight=torch.ones(1, 8))
    if rounding == "feedback":
        plain = plain._replace(feedback=torch.zeros(1, 8, 8), order=torch.arange(8, dtype=torch.int16)[None])
    stretched = plain._replace(read_zero=plain.zero + 0.5, read_scale=1.25 * plain.scale)
    spec = TensorSpec(2, "nuq", "static", outliers=8 / (PAGE * 8), rank="error", rounding=rounding)
    x = torch.randn(PAGE, 1, 8, generator=torch.Generator().manual_seed(0))
    before, after = quantise(x, spec, plain), quantise(x, replace(spec, unbiased=True), stretched)
    assert torch.equal(before.codes, after.codes)
    assert torch.equal(before.positions, after.positions)
    dense = before._replace(positions=None, corrections=None)
    levels = (dequantise(dense, spec, plain) - plain.zero) / plain.scale
    back = dequantise(after, spec, stretched)
    exact = torch.zeros(8 * PAGE, dtype=torch.bool).index_fill(0, after.positions, True).view(8, PAGE).T.unsqueeze(1)
    torch.testing.assert_close(back[exact], x[exact], atol=5e-3, rtol=0)
    torch.testing.assert_close(back[~exact], (levels * stretched.read_scale + stretched.read_zero)[~exact])


@pytest.mark.parametrize("scope", ["layer", "head", "channels"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_uniform_per_token_is_round_to_nearest_of_min_max(scope, bits):
    x = torch.randn(PAGE, 2, 8)
    spec = TensorSpec(bits, "uniform", "token", scope, group=4)
    back = dequantise(quantise(x, spec, _tables(2, 8, _uniform(bits))), spec, _tables(2, 8, _uniform(bits)))
    cell = {"layer": x.flatten(1), "head": x, "channels": x.unflatten(-1, (-1, 4))}[scope]
    step = (cell.amax(-1) - cell.amin(-1)) / (2**bits - 1)
    error = (back - x).abs().view(cell.shape)
    assert (error <= 0.5 * step[..., None] * 1.01 + 2e-3 * cell.abs().amax(-1, keepdim=True)).all()


def test_group_range_is_per_channel_and_group_of_tokens():
    x = torch.randn(PAGE, 1, 4)
    x[8:16, 0, 2] += 1000
    spec = TensorSpec(8, "uniform", "group", group=8)
    tables = _tables(1, 4, _uniform(8))
    error = (dequantise(quantise(x, spec, tables), spec, tables) - x).abs()
    assert error[:8].max() < 0.02
    assert error[16:].max() < 0.02


def test_outliers_are_chosen_by_rank_and_come_back():
    x = torch.rand(PAGE, 1, 16) * 2 - 1
    x[3, 0, 5], x[20, 0, 1] = 40.0, -70.0
    spec = TensorSpec(3, "nf", "static", outliers=2 / (PAGE * 16))
    tables = _tables(1, 16, torch.linspace(-1, 1, 8).bfloat16())
    coded = quantise(x, spec, tables)
    assert coded.positions.tolist() == [1 * PAGE + 20, 5 * PAGE + 3]
    back = dequantise(coded, spec, tables)
    torch.testing.assert_close(back[3, 0, 5], x[3, 0, 5], rtol=1e-3, atol=0)
    torch.testing.assert_close(back[20, 0, 1], x[20, 0, 1], rtol=1e-3, atol=0)


def test_ties_never_over_select():
    spec = TensorSpec(4, "uniform", "static", outliers=0.1)
    coded = quantise(torch.full((PAGE, 2, 8), 5.0), spec, _tables(2, 8, _uniform(4)))
    assert coded.positions.unique().numel() == spec.outliers_per_page(2, 8) == 51


def test_an_outlier_does_not_widen_the_range_of_its_token():
    x = torch.linspace(-1, 1, 16).expand(PAGE, 1, 16).clone()
    x[:, 0, 7] = 500.0
    spec = TensorSpec(4, "uniform", "token", outliers=1 / 16)
    tables = _tables(1, 16, _uniform(4))
    back = dequantise(quantise(x, spec, tables), spec, tables)
    assert (back - x).abs().max() < 0.3  # the correction of 500 is fp16
    assert (back - x)[:, 0, :7].abs().max() < 0.08


@pytest.mark.parametrize("range_", ["static", "group", "token"])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 7e4])
def test_constant_and_extreme_inputs_stay_finite(range_, magnitude):
    spec = TensorSpec(3, "uniform", range_, group=8, outliers=0.01)
    tables = _tables(2, 8, _uniform(3), scale=magnitude / 4)
    for x in (torch.zeros(PAGE, 2, 8), torch.full((PAGE, 2, 8), magnitude), magnitude * torch.randn(PAGE, 2, 8)):
        back = dequantise(quantise(x, spec, tables), spec, tables)
        assert back.isfinite().all()
        if range_ != "static":
            assert (back - x).abs().max() <= 0.6 * (x.amax() - x.amin()) / 7 + 1e-3 * x.abs().amax()


def test_constant_group_comes_back_exactly_representable():
    spec = TensorSpec(2, "uniform", "group", group=PAGE)
    tables = _tables(1, 4, _uniform(2))
    x = torch.full((PAGE, 1, 4), 100.0)
    assert torch.equal(dequantise(quantise(x, spec, tables), spec, tables), x)


def test_simulation_of_a_partial_page_matches_the_whole_one_where_ranges_are_per_token():
    x = torch.randn(2 * PAGE, 2, 8)
    spec = TensorSpec(3, "uniform", "token", "head")
    tables = _tables(2, 8, _uniform(3))
    assert torch.equal(simulate(x[:40], spec, tables), simulate(x, spec, tables)[:40])
    assert simulate(x[:0], spec, tables).shape == (0, 2, 8)


def test_normalise_tells_what_the_levels_are_compared_with():
    x = torch.randn(PAGE, 2, 8)
    spec = TensorSpec(3, "nf", "token", "layer")
    tables = _tables(2, 8, torch.linspace(-1, 1, 8).bfloat16(), scale=0.5)
    v, inlier, coded = normalise(x, spec, tables)
    assert inlier is None
    assert v.abs().amax().item() == pytest.approx(1, abs=2e-3)
    rebuilt = v * ranges.expand(coded.step, spec, 8) + ranges.expand(coded.base, spec, 8)
    torch.testing.assert_close(rebuilt * 0.5, x, rtol=1e-4, atol=1e-4)


def test_rank_by_error_spends_the_budget_where_it_matters():
    """An element far outside in a channel that hardly matters loses against a small error that does."""
    x = torch.zeros(PAGE, 1, 4)
    x[3, 0, 0], x[9, 0, 2] = 50.0, 1.4
    tables = _tables(1, 4, torch.linspace(-1, 1, 8).bfloat16())
    tables = tables._replace(weight=torch.tensor([[1e-6, 1.0, 1.0, 1.0]]))
    for rank, position in (("range", 0 * PAGE + 3), ("error", 2 * PAGE + 9)):
        spec = TensorSpec(3, "nf", "static", outliers=1 / (PAGE * 4), rank=rank)
        assert quantise(x, spec, tables).positions.tolist() == [position]


def test_norm_range_is_the_root_mean_square_of_a_token():
    x = torch.randn(PAGE, 2, 8) * torch.logspace(-3, 3, PAGE)[:, None, None]
    spec = TensorSpec(3, "nuq", "norm", "layer")
    tables = _tables(2, 8, torch.linspace(-1, 1, 8).bfloat16())
    coded = quantise(x, spec, tables)
    assert coded.base is None
    torch.testing.assert_close(coded.step[:, 0, 0].float(), 4 * x.square().mean((1, 2)).sqrt(), rtol=1e-3, atol=0)
    relative = (dequantise(coded, spec, tables) - x).norm(dim=(1, 2)) / x.norm(dim=(1, 2))
    assert relative.max() < 0.5


def test_rotation_is_undone_by_dequantise():
    x = torch.randn(PAGE, 2, 16)
    spec = TensorSpec(8, "uniform", "token", "head", rotation="hadamard")
    tables = _tables(2, 16, _uniform(8))
    torch.testing.assert_close(dequantise(quantise(x, spec, tables), spec, tables), x, rtol=0, atol=0.03)


def test_every_channel_can_have_its_own_width():
    levels = torch.cat([torch.linspace(-1, 1, 2**w) for w in range(1, 6)]).bfloat16().float()
    widths = torch.tensor([[1, 5, 3, 3]], dtype=torch.uint8)
    tables = Tables(torch.zeros(1, 4), torch.ones(1, 4), levels[None], None, widths)
    x = torch.linspace(-1, 1, PAGE)[:, None, None].expand(PAGE, 1, 4)
    spec = TensorSpec(5, "mixed", "static")
    coded = quantise(x, spec, tables)
    assert coded.codes.amax((0, 1)).tolist() == [1, 31, 7, 7]
    error = (dequantise(coded, spec, tables) - x).abs().amax((0, 1))
    assert (error <= torch.tensor([1, 1 / 31, 1 / 7, 1 / 7]) * 1.02).all()


def test_equal_ranks_go_to_the_first_positions():
    spec = TensorSpec(4, "nuq", "token", outliers=4 / (PAGE * 32))
    x = torch.zeros(2, PAGE, 2, 16)
    x[0, [3, 9, 20], 1, 5] = 1.0  # the same token three times
    x[:, [3, 9, 20], 0, [7, 2, 1]] = 1.0
    tables = Tables(torch.zeros(2, 16), torch.ones(2, 16), torch.linspace(-1, 1, 16).bfloat16().float()[None])
    positions = quantise(x, spec, tables).positions
    assert positions[0].tolist() == sorted([1 * 32 + 20, 2 * 32 + 9, 7 * 32 + 3, 21 * 32 + 3])


def test_rank_by_threshold_corrects_what_lies_beyond_the_frame_and_nothing_else():
    x = torch.rand(PAGE, 1, 16) * 2 - 1
    x[3, 0, 5], x[20, 0, 1] = 40.0, -70.0
    spec = TensorSpec(3, "nf", "static", outliers=2 / (PAGE * 16), rank="threshold")
    tables = _tables(1, 16, torch.linspace(-1, 1, 8).bfloat16())
    _, inlier, coded = normalise(x, spec, tables)
    assert (~inlier).nonzero().tolist() == [[3, 0, 5], [20, 0, 1]]
    corrections = quantise(x, spec, tables).corrections
    assert len(corrections) == spec.outliers_per_page(1, 16) > 2  # room for a page with more than the average
    assert (corrections != 0).sum() == 2
    back = dequantise(quantise(x, spec, tables), spec, tables)
    assert torch.allclose(back[[3, 20], 0, [5, 1]], torch.tensor([40.0, -70.0]), rtol=1e-3)


@pytest.mark.parametrize(("elements", "each"), [((3, 64), 1), ((1, 256), 2), ((32, 128), 21)])
def test_rank_by_tails_takes_what_lies_beyond_two_quantiles_of_every_token(elements, each):
    x = torch.randn(PAGE, *elements)
    spec = TensorSpec(4, "nuq", "token", outliers=0.01, rank="tails")
    _, inlier, _ = normalise(x, spec, _tables(*elements, torch.linspace(-1, 1, 16).bfloat16()))
    flat = x.flatten(1)
    low, high = (torch.quantile(flat, q, dim=1, keepdim=True) for q in (0.005, 0.995))
    assert torch.equal(~inlier.flatten(1), (flat < low) | (flat > high))
    assert int((~inlier).sum()) == 2 * each * PAGE == spec.outliers_per_page(*elements)
