import numpy as np
import pytest
import torch

from kvcalib.fit.grids import fp8_e4m3, normal_float, uniform

# QLoRA, appendix E
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def every_grid():
    for bits in range(1, 9):
        yield uniform(bits, static=True)
        yield uniform(bits, static=False)
    for bits in range(1, 6):
        yield normal_float(bits)
    yield fp8_e4m3()


def test_sorted_distinct_and_exact_in_bfloat16():
    for levels in every_grid():
        assert (np.diff(levels) > 0).all()
        as_bf16 = torch.from_numpy(levels).to(torch.bfloat16).double().numpy()
        np.testing.assert_array_equal(levels, as_bf16)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_counts_and_ends(bits):
    for levels in (uniform(bits, static=True), normal_float(bits)):
        assert len(levels) == 2**bits
        assert levels[0] == -1
        assert levels[-1] == 1
    assert uniform(bits, static=False).tolist() == list(range(2**bits))


def test_nf4_is_the_published_table():
    np.testing.assert_allclose(normal_float(4), NF4, rtol=2**-8)


def test_fp8_is_symmetric_to_448():
    levels = fp8_e4m3()
    assert len(levels) == 253
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert levels[-1] == 448
    assert levels[levels > 0][0] == 2.0**-9
