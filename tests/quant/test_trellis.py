"""Paths through a trellis are the best, decode to what encoding reckoned with, and lower the error at equal bits."""

import itertools

import pytest
import torch

from kvcalib.fit.feedback import fit_feedback
from kvcalib.quant import trellis
from kvcalib.quant.codec import dequantise, quantise
from kvcalib.quant.page import PageLayout, read_page, write_page
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec

HEADS, DIM = 2, 32
KEY = TensorSpec(6, "mixed", "static", rope="pre", outliers=0.01, rank="error", rounding="trellis")
VALUE = TensorSpec(6, "mixed", "norm", rotation="hadamard", rounding="trellis")


def _levels(width: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2 ** (width + trellis.history(width)), generator=draw).bfloat16().float()


def _cost_of(codes, v, weight, levels, width) -> torch.Tensor:
    """Decoded bit by bit: the table's index is what the stream holds just before and in the code."""
    total, stream = 0.0, [0, 0, 0]
    for t, code in enumerate(codes):
        stream += [code >> i & 1 for i in range(width)]
        used = stream[len(stream) - width - trellis.history(width) :]
        total = total + weight[t] * (v[t] - levels[sum(bit << i for i, bit in enumerate(used))]) ** 2
    return total


@pytest.mark.parametrize(("width", "tokens"), [(1, 8), (2, 5), (3, 3), (5, 2)])
def test_no_path_is_better(width, tokens):
    draw = torch.Generator().manual_seed(1)
    v, weight = torch.randn(3, tokens, generator=draw), torch.rand(3, tokens, generator=draw)
    levels = _levels(width)
    found = trellis.search(v, weight, levels, width) >> trellis.history(width)
    for row in range(3):
        paths = itertools.product(range(2**width), repeat=tokens)
        least = min(_cost_of(path, v[row], weight[row], levels, width) for path in paths)
        torch.testing.assert_close(_cost_of(found[row].tolist(), v[row], weight[row], levels, width), least)


@pytest.mark.parametrize("span", [16, 32])
def test_codes_come_back_as_the_levels_of_the_path(span):
    draw = torch.Generator().manual_seed(2)
    widths = torch.arange(HEADS * DIM).view(HEADS, DIM).remainder(6).add(1).to(torch.uint8)
    table = torch.cat([_levels(width) for width in range(1, 7)])
    v = torch.randn(3, PAGE, HEADS, DIM, generator=draw)
    codes, chosen = torch.empty_like(v, dtype=torch.uint8), torch.empty_like(v)
    for head, channel in itertools.product(range(HEADS), range(DIM)):
        width = int(widths[head, channel])
        levels = trellis.table_of(table, width)
        spans = v[..., head, channel].reshape(-1, span)
        path = trellis.search(spans, torch.ones_like(spans), levels, width)
        codes[..., head, channel] = (path >> trellis.history(width)).view(3, PAGE)
        chosen[..., head, channel] = levels[path].view(3, PAGE)
    assert (codes < 2 ** widths.int()).all()
    tables = Tables(v[0, 0], v[0, 0], table[None], widths=widths, trellis=table)
    assert torch.equal(trellis.decode(codes, tables, span), chosen)


def test_a_table_that_does_not_look_back_is_rounding_to_nearest():
    levels = torch.linspace(-1, 1, 4)
    v = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    alone = levels.repeat_interleave(2 ** trellis.history(2))
    codes = trellis.search(v, torch.ones_like(v), alone, 2) >> trellis.history(2)
    assert torch.equal(codes, torch.bucketize(v, (levels[1:] + levels[:-1]) / 2))


def test_one_far_token_does_not_drown_the_others():
    v = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    far = v.clone()
    far[:, 3] = 1e6
    ones, levels = torch.ones_like(v), _levels(2)
    paths = [trellis.search(x, ones, levels, 2) for x in (v, far)]
    assert torch.equal(paths[0][:, 8:], paths[1][:, 8:])


def test_tokens_without_weight_do_not_pull():
    v = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    weight, levels = torch.ones_like(v), _levels(3)
    weight[:, 5] = 0
    moved = v.clone()
    moved[:, 5] = 100
    assert torch.equal(trellis.search(v, weight, levels, 3), trellis.search(moved, weight, levels, 3))


def test_no_span_at_all():
    assert trellis.search(torch.empty(0, 16), torch.empty(0, 16), _levels(2), 2).shape == (0, 16)


def _tables(spec: TensorSpec, seed: int) -> Tables:
    draw = torch.Generator().manual_seed(seed)
    unit = torch.randint(1, 7, (HEADS, DIM // 2 if spec is KEY else DIM // 16), generator=draw).to(torch.uint8)
    widths = unit.repeat(1, 2) if spec is KEY else unit.repeat_interleave(16, 1)
    separate = torch.cat([torch.linspace(-1, 1, 2**width) for width in range(1, 7)]).bfloat16().float()[None]
    matrix, order, weight = fit_feedback(torch.randn(500, HEADS, DIM, generator=draw))
    plain = Tables(torch.zeros(HEADS, DIM), torch.ones(HEADS, DIM), separate, weight, widths, matrix, order)
    return plain._replace(trellis=torch.cat([_levels(width, seed) for width in range(1, 7)]))


def test_pages_hold_a_trellis():
    draw = torch.Generator().manual_seed(6)
    key, value = (0.4 * torch.randn(3, PAGE, HEADS, DIM, generator=draw) for _ in range(2))
    key_tables, value_tables = _tables(KEY, 0), _tables(VALUE, 1)
    layout = PageLayout(CacheSpec(KEY, VALUE, 0, 1), key_tables, value_tables)
    coded = quantise(key, KEY, key_tables), quantise(value, VALUE, value_tables)
    pages = write_page(*coded, torch.arange(3) * PAGE, layout)
    read = read_page(pages, layout)
    for x, before, after, spec, tables in zip(
        (key, value), coded, read[:2], (KEY, VALUE), (key_tables, value_tables), strict=True
    ):
        back = dequantise(after, spec, tables)
        assert torch.equal(after.codes, before.codes)
        torch.testing.assert_close(back, dequantise(before, spec, tables))
        assert back.isfinite().all()
        assert (back - x).square().mean() < x.square().mean()


def test_pages_do_not_depend_on_each_other():
    x = torch.randn(4, PAGE, HEADS, DIM, generator=torch.Generator().manual_seed(7))
    for spec in (KEY, VALUE):
        tables = _tables(spec, 2)
        together = dequantise(quantise(x, spec, tables), spec, tables)
        single = torch.cat([dequantise(quantise(page[None], spec, tables), spec, tables) for page in x])
        torch.testing.assert_close(together, single)
