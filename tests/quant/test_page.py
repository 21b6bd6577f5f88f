import pytest
import torch

from kvcalib.quant.codec import dequantise, quantise
from kvcalib.quant.page import PageLayout, read_page, write_page
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec

SHAPES = [(3, 64, 64), (2, 20, 36), (1, 256, 256), (2, 80, 96), (4, 16, 8)]


def _spec(bits, range_, scope, outliers):
    levels = "none" if bits == 16 else "uniform"
    return TensorSpec(bits, levels, range_, scope, group=4, outliers=outliers)


def _tables(heads, dim, bits):
    return Tables(torch.randn(heads, dim), torch.rand(heads, dim) + 0.5, torch.arange(2.0 ** min(bits, 8))[None])


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), SHAPES)
@pytest.mark.parametrize(("key_bits", "value_bits"), [(1, 2), (3, 4), (5, 8), (16, 3), (2, 16)])
@pytest.mark.parametrize(
    ("range_", "scope"), [("static", "layer"), ("group", "layer"), ("token", "head"), ("token", "channels")]
)
def test_read_undoes_write(heads, key_dim, value_dim, key_bits, value_bits, range_, scope):
    spec = CacheSpec(_spec(key_bits, range_, scope, 0.01), _spec(value_bits, "token", scope, 0.02), 0, 1)
    key_tables, value_tables = _tables(heads, key_dim, key_bits), _tables(heads, value_dim, value_bits)
    key = quantise(3 * torch.randn(2, 3, PAGE, heads, key_dim), spec.key, key_tables)
    value = quantise(torch.randn(2, 3, PAGE, heads, value_dim), spec.value, value_tables)
    layout = PageLayout(spec, key_tables, value_tables)
    first = torch.arange(6).view(2, 3) * 1000
    pages = write_page(key, value, first, layout)
    key_back, value_back, first_back = read_page(pages, layout)
    assert torch.equal(first_back.long(), first)
    assert torch.equal(dequantise(key_back, spec.key, key_tables), dequantise(key, spec.key, key_tables))
    assert torch.equal(dequantise(value_back, spec.value, value_tables), dequantise(value, spec.value, value_tables))


def test_codes_lie_where_the_drawing_says():
    spec = CacheSpec(TensorSpec(4, "uniform", "static"), TensorSpec(4, "uniform", "static"), 0, 0)
    key, value = torch.zeros(PAGE, 2, 8), torch.zeros(PAGE, 2, 32)
    key[16 + 3, 1, 4 + 2] = 9  # head 1, second half of the tokens, pair 2, second channel, token 3 of the half
    value[5, 0, 16 + 6] = 7  # head 0, tile 1, token pair 2, second token, channel 6 of the tile
    tables = [Tables(torch.zeros(2, dim), torch.ones(2, dim), torch.arange(16.0)[None]) for dim in (8, 32)]
    layout = PageLayout(spec, *tables)
    coded = quantise(key, spec.key, tables[0]), quantise(value, spec.value, tables[1])
    pages = write_page(*coded, torch.tensor(0), layout)
    record = 4 * 4
    key_byte = layout.read(pages, "key_codes")[1, (1 * 4 + 2) * record + 8 + 3 // 2]
    value_byte = layout.read(pages, "value_codes")[0, (1 * 16 + 2) * record + 8 + 6 // 2]
    assert (key_byte.item(), value_byte.item()) == (9 << 4, 7)
    assert pages.count_nonzero() == 3  # and the number of tokens


def test_three_bits_take_three_bits():
    spec = CacheSpec(TensorSpec(3, "uniform", "static"), TensorSpec(3, "uniform", "static"), 0, 0)
    tables = _tables(3, 64, 3)
    layout = PageLayout(spec, tables, tables)
    assert layout.tensor_bytes("key") * 8 == 3 * PAGE * 3 * 64
    assert layout.nbytes == layout.tensor_bytes("key") + layout.tensor_bytes("value") + 8


def test_row_pointers_split_the_outliers_by_half_head():
    spec = CacheSpec(TensorSpec(2, "uniform", "static", outliers=0.05), TensorSpec(2, "uniform", "static"), 0, 0)
    tables = Tables(torch.zeros(2, 16), torch.ones(2, 16), torch.arange(4.0)[None])
    layout = PageLayout(spec, tables, tables)
    key = quantise(10 * torch.randn(PAGE, 2, 16), spec.key, tables)
    value = quantise(torch.zeros(PAGE, 2, 16), spec.value, tables)
    pages = write_page(key, value, torch.tensor(7), layout)
    rows, in_head = layout.read(pages, "key_rows").tolist(), layout.read(pages, "key_positions")
    assert rows[0] == 0
    assert rows[-1] == spec.key.outliers_per_page(2, 16)
    for half in range(4):
        channels = in_head[rows[half] : rows[half + 1]] // PAGE
        assert ((channels >= 8) == bool(half % 2)).all()


MIXED = TensorSpec(5, "mixed", "static", outliers=0.01)


def _mixed_tables(heads: int, dim: int, unit_of) -> Tables:
    """Random widths of 1 to 5, equal in each unit; unit_of: channel indices -> unit indices."""
    levels = torch.cat([torch.linspace(-1, 1, 2**w) for w in range(1, 6)]).bfloat16().float()
    units = unit_of(torch.arange(dim))
    widths = torch.randint(1, 6, (heads, int(units.max()) + 1), dtype=torch.uint8)[:, units]
    return Tables(torch.randn(heads, dim), torch.rand(heads, dim) + 0.5, levels[None], None, widths)


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), SHAPES)
def test_mixed_widths_come_back_and_take_their_bits(heads, key_dim, value_dim):
    key_tables = _mixed_tables(heads, key_dim, lambda c: c % (key_dim // 2))
    value_tables = _mixed_tables(heads, value_dim, lambda c: c // 16)
    spec = CacheSpec(MIXED, TensorSpec(5, "mixed", "norm", rotation="hadamard"), 0, 1)
    key = quantise(2 * torch.randn(3, PAGE, heads, key_dim), spec.key, key_tables)
    value = quantise(torch.randn(3, PAGE, heads, value_dim), spec.value, value_tables)
    layout = PageLayout(spec, key_tables, value_tables)
    assert layout.sections["key_codes"].nbytes * 8 == PAGE * int(key_tables.widths.sum())
    pages = write_page(key, value, torch.arange(3), layout)
    key_back, value_back, _ = read_page(pages, layout)
    for back, coded in ((key_back, key), (value_back, value)):
        for a, b in zip(back, coded, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_pairs_of_a_head_are_stored_in_order_of_width():
    widths = torch.tensor([[3, 1, 2, 1] * 2, [2, 2, 5, 4] * 2], dtype=torch.uint8)
    tables = _mixed_tables(2, 8, lambda c: c % 4)._replace(widths=widths)
    layout = PageLayout(CacheSpec(MIXED, MIXED, 0, 0), tables, _mixed_tables(2, 8, lambda c: c // 16))
    stored = [(run.head, run.width, run.units) for run in layout.key_runs]
    assert stored == [(0, 1, (1, 3)), (0, 2, (2,)), (0, 3, (0,)), (1, 2, (0, 1)), (1, 4, (3,)), (1, 5, (2,))]
