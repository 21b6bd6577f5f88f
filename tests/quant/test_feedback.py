"""Error feedback: smaller quadratic damage, nothing changed when there is nothing to feed back, tokens on their own."""

import pytest
import torch

from kvcalib.fit.feedback import fit_feedback
from kvcalib.quant.codec import dequantise, quantise, simulate
from kvcalib.quant.spec import PAGE, Tables, TensorSpec

HEADS, DIM = 2, 16
LEVELS = torch.linspace(-1, 1, 8).bfloat16().float()[None]


def _spec(**changes) -> TensorSpec:
    given = {"bits": 3, "levels": "nuq", "range": "static", "rounding": "feedback", **changes}
    return TensorSpec(given.pop("bits"), given.pop("levels"), given.pop("range"), **given)


def _gradients(count=4000, *, common=3.0, seed=0):
    """[n, H, D]: one strong common direction per head over independent noise."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(HEADS, DIM, generator=generator)
    along = torch.randn(count, HEADS, 1, generator=generator)
    return common * along * direction + torch.randn(count, HEADS, DIM, generator=generator)


def _tables(grad, **fields) -> Tables:
    matrix, order, weight = fit_feedback(grad)
    plain = Tables(torch.zeros(HEADS, DIM), torch.ones(HEADS, DIM), LEVELS, weight)
    return plain._replace(feedback=matrix, order=order, **fields)


def _damage(x, spec, tables, grad):
    error = simulate(x, spec, tables) - x
    fisher = torch.einsum("nhc,nhd->hcd", grad, grad) / len(grad)
    return torch.einsum("nhc,hcd,nhd->", error, fisher, error).item() / len(x)


def _text(pages=8, spread=0.5):
    return spread * torch.randn(pages * PAGE, HEADS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {"outliers": 0.02, "rank": "error"}, {"range": "token"}, {"range": "norm"}])
def test_damage_falls_well_below_that_of_rounding_to_nearest(changes):
    grad, x = _gradients(), _text()
    tables = _tables(grad)
    fed = _damage(x, _spec(**changes), tables, grad)
    nearest = _damage(x, _spec(**changes, rounding="nearest"), tables, grad)
    assert fed < 0.4 * nearest


def test_gradients_without_common_directions_leave_every_code_as_it_is():
    tables = _tables(_gradients())
    tables = tables._replace(feedback=torch.zeros_like(tables.feedback))
    x = _text()
    for changes in ({}, {"range": "token"}, {"outliers": 0.02}, {"range": "group", "group": 8}):
        fed = quantise(x.unflatten(0, (-1, PAGE)), _spec(**changes), tables)
        nearest = quantise(x.unflatten(0, (-1, PAGE)), _spec(**changes, rounding="nearest"), tables)
        assert torch.equal(fed.codes, nearest.codes)


def test_every_code_is_the_nearest_to_what_the_errors_before_it_leave_to_want():
    tables, x = _tables(_gradients()), _text(pages=1)
    error = dequantise(quantise(x, _spec(), tables), _spec(), tables) - x
    for head in range(HEADS):
        order = tables.order[head].long()
        errors = error[:, head, order]
        wanted = x[:, head, order] - errors @ tables.feedback[head].T
        best = LEVELS[0][(wanted[..., None] - LEVELS[0]).abs().argmin(-1)]
        assert torch.allclose(best, x[:, head, order] + errors, atol=1e-6)


def test_an_outlier_takes_what_it_wants_exactly():
    tables, x = _tables(_gradients()), _text(pages=1)
    x[5, 1, 3] = 30.0
    spec = _spec(outliers=1 / (PAGE * HEADS * DIM))
    coded = quantise(x, spec, tables)
    assert coded.positions.tolist() == [(1 * DIM + 3) * PAGE + 5]
    error = (dequantise(coded, spec, tables) - x)[5, 1, tables.order[1].long()]
    rank = tables.order[1].tolist().index(3)
    assert error[rank].item() == pytest.approx(-(tables.feedback[1, rank] @ error).item(), abs=2e-2)


def test_tokens_do_not_depend_on_each_other():
    tables, x = _tables(_gradients()), _text(pages=2)
    whole = simulate(x, _spec(), tables)
    assert torch.equal(simulate(x[PAGE:], _spec(), tables), whole[PAGE:])


def test_channels_of_their_own_width_and_table():
    widths = torch.tensor([1, 2, 3, 3, 2, 1, 3, 3]).repeat(HEADS, 2).to(torch.uint8)
    row = torch.cat([torch.linspace(-1, 1, 2**w) for w in (1, 2, 3)]).bfloat16().float()
    books = row + 0.25 * torch.arange(HEADS * DIM)[:, None] / (HEADS * DIM)
    tables = _tables(_gradients(), widths=widths)._replace(levels=books.bfloat16().float())
    spec, x = _spec(levels="mixed", books="channel"), _text(spread=2)
    codes = quantise(x.unflatten(0, (-1, PAGE)), spec, tables).codes.flatten(0, 1)
    assert (codes < 2 ** widths.int()).all()
    assert (codes.amax(0) == 2 ** widths.int() - 1).all()
    grad = _gradients()
    nearest = _damage(x, _spec(levels="mixed", books="channel", rounding="nearest"), tables, grad)
    assert _damage(x, spec, tables, grad) < 0.6 * nearest
