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
    layout = PageLayout(spec, heads, key_dim, value_dim)
    first = torch.arange(6).view(2, 3) * 1000
    pages = write_page(key, value, first, layout)
    key_back, value_back, first_back = read_page(pages, layout)
    assert torch.equal(first_back.long(), first)
    assert torch.equal(dequantise(key_back, spec.key, key_tables), dequantise(key, spec.key, key_tables))
    assert torch.equal(dequantise(value_back, spec.value, value_tables), dequantise(value, spec.value, value_tables))


def test_codes_lie_where_the_drawing_says():
    spec = CacheSpec(TensorSpec(4, "uniform", "static"), TensorSpec(4, "uniform", "static"), 0, 0)
    layout = PageLayout(spec, 2, 8, 32)
    key, value = torch.zeros(PAGE, 2, 8), torch.zeros(PAGE, 2, 32)
    key[16 + 3, 1, 4 + 2] = 9  # head 1, second half of the tokens, pair 2, second channel, token 3 of the half
    value[5, 0, 16 + 6] = 7  # head 0, tile 1, token pair 2, second token, channel 6 of the tile
    identity = Tables(torch.zeros(1), torch.ones(1), torch.arange(16.0)[None])
    pages = write_page(
        quantise(key, spec.key, identity), quantise(value, spec.value, identity), torch.tensor(0), layout
    )
    record = 4 * 4
    key_byte = layout.read(pages, "key_codes")[1, (1 * 4 + 2) * record + 8 + 3 // 2]
    value_byte = layout.read(pages, "value_codes")[0, (1 * 16 + 2) * record + 8 + 6 // 2]
    assert (key_byte.item(), value_byte.item()) == (9 << 4, 7)
    assert pages.count_nonzero() == 2


def test_three_bits_take_three_bits():
    spec = CacheSpec(TensorSpec(3, "uniform", "static"), TensorSpec(3, "uniform", "static"), 0, 0)
    layout = PageLayout(spec, 3, 64, 64)
    assert layout.tensor_bytes("key") * 8 == 3 * PAGE * 3 * 64
    assert layout.nbytes == layout.tensor_bytes("key") + layout.tensor_bytes("value") + 4


def test_row_pointers_split_the_outliers_by_half_head():
    spec = CacheSpec(TensorSpec(2, "uniform", "static", outliers=0.05), TensorSpec(2, "uniform", "static"), 0, 0)
    layout = PageLayout(spec, 2, 16, 16)
    tables = Tables(torch.zeros(2, 16), torch.ones(2, 16), torch.arange(4.0)[None])
    key = quantise(10 * torch.randn(PAGE, 2, 16), spec.key, tables)
    value = quantise(torch.zeros(PAGE, 2, 16), spec.value, tables)
    pages = write_page(key, value, torch.tensor(7), layout)
    rows, in_head = layout.read(pages, "key_rows").tolist(), layout.read(pages, "key_positions")
    assert rows[0] == 0
    assert rows[-1] == spec.key.outliers_per_page(2, 16)
    for half in range(4):
        channels = in_head[rows[half] : rows[half + 1]] // PAGE
        assert ((channels >= 8) == bool(half % 2)).all()
