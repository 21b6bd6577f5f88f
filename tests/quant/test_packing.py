import pytest
import torch

from kvcalib.quant.packing import pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 33, 127, 8 * 20])
def test_unpack_undoes_pack_without_padding_inside(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    data = pack(codes, bits)
    assert data.shape == (3, packed_bytes(count, bits))
    assert data.shape[-1] * 8 < count * bits + 8 * bits
    assert torch.equal(unpack(data, bits, count), codes)


def test_three_bit_codes_straddle_bytes_as_drawn():
    data = pack(torch.tensor([0b111, 0, 0b101, 0, 0, 0b100, 0, 0b001], dtype=torch.uint8), 3)
    stream = sum(byte << (8 * i) for i, byte in enumerate(data.tolist()))
    assert stream == 0b111 | 0b101 << 6 | 0b100 << 15 | 0b001 << 21
