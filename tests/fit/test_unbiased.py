"""What comes back through the read frame has the mean and the slope of what went in."""

import pytest
import torch

from kvcalib.fit.unbiased import with_read_frame
from kvcalib.quant.spec import Tables

HEADS, DIM = 2, 8
FRAME = Tables(torch.full((HEADS, DIM), 3.0), torch.full((HEADS, DIM), 2.0), torch.zeros(1, 2))


def sample(count: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """v with a mean, and v in one bit: its sign about this mean, at the means of both halves, moved a little."""
    g = torch.Generator().manual_seed(0)
    v = 0.1 * torch.randn(count, HEADS, DIM, generator=g) + 0.3
    return v, 0.3 + 0.08 * torch.sign(v - 0.3) - 0.01


def read(back: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Read frame out of the frame that codes are chosen in."""
    return (back * tables.read_scale + tables.read_zero - tables.zero) / tables.scale


def slope(v: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    off = v - v.mean(0)
    return (off * (back - back.mean(0))).sum(0) / off.square().sum(0)


def test_a_static_frame_gives_slope_one_and_the_mean():
    v, back = sample()
    assert (slope(v, back) < 0.7).all()
    out = read(back, with_read_frame(v, back, None, FRAME, static=True, share=1.0))
    torch.testing.assert_close(slope(v, out), torch.ones(HEADS, DIM), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.mean(0), v.mean(0), atol=1e-5, rtol=0)


def test_a_share_goes_part_of_the_way_and_keeps_the_mean():
    v, back = sample()
    half = with_read_frame(v, back, None, FRAME, static=True, share=0.5)
    whole = with_read_frame(v, back, None, FRAME, static=True, share=1.0)
    torch.testing.assert_close(half.read_scale - FRAME.scale, (whole.read_scale - FRAME.scale) / 2)
    torch.testing.assert_close(read(back, half).mean(0), v.mean(0), atol=1e-5, rtol=0)


def test_ranges_of_run_time_are_stretched_about_the_zero_point():
    v, back = (t - 0.3 for t in sample())
    tables = with_read_frame(v, back, None, FRAME, static=False, share=1.0)
    assert torch.equal(tables.read_zero, FRAME.zero)
    torch.testing.assert_close(slope(v, read(back, tables)), torch.ones(HEADS, DIM), atol=1e-4, rtol=0)


def test_outliers_do_not_count():
    v, back = sample()
    inlier = torch.ones_like(v, dtype=torch.bool)
    inlier[::7] = False
    expected = with_read_frame(v[inlier[:, 0, 0]], back[inlier[:, 0, 0]], None, FRAME, static=True, share=1.0)
    found = with_read_frame(v.where(inlier, 50.0), back, inlier, FRAME, static=True, share=1.0)
    torch.testing.assert_close(found.read_scale, expected.read_scale)
    torch.testing.assert_close(found.read_zero, expected.read_zero)


@pytest.mark.parametrize("back", [0.25, "opposite"])
def test_a_channel_without_a_slope_stays_as_it_is(back):
    v, _ = sample()
    back = torch.full_like(v, back) if back != "opposite" else -v
    tables = with_read_frame(v, back, None, FRAME, static=True, share=1.0)
    assert torch.equal(tables.read_scale, FRAME.scale)


def test_the_stretch_has_limits():
    v, back = sample()
    tables = with_read_frame(v, 0.3 + (back - 0.3) / 50, None, FRAME, static=True, share=1.0)
    assert torch.equal(tables.read_scale, 2 * FRAME.scale)
