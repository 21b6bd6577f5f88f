"""Fitted tables of a trellis are better than the best separate levels at the same bits, or are those."""

import numpy as np
import pytest
import torch

from kvcalib.fit import kmeans
from kvcalib.fit.trellis import GAIN, Sample, fit_table
from kvcalib.quant import trellis


def _draw(kind: str, spans: int = 3000) -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "normal":
        return 0.3 * torch.randn(spans, 32)
    return torch.distributions.Laplace(0.1, 0.2).sample((spans, 32))


def _separate(v: torch.Tensor, width: int) -> torch.Tensor:
    mass, edges = np.histogram(v.numpy(), 2000)
    return torch.from_numpy(kmeans.exact_kmeans((edges[1:] + edges[:-1]) / 2, mass.astype(float), 2**width)).float()


def _fit(v, weight, width, separate):
    mass, edges = np.histogram(v.numpy(), 2000)
    full = mass > 0
    centres = ((edges[1:] + edges[:-1]) / 2)[full]
    return fit_table(centres, mass[full].astype(float), separate, Sample(v, weight, torch.ones_like(v)), width)


def _error(v, levels, width) -> float:
    return float((v - levels[trellis.search(v, torch.ones_like(v), levels, width)]).square().mean())


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_paths_save_what_the_allocation_reckons_with(kind, width):
    v = _draw(kind)
    separate = _separate(v, width)
    levels = _fit(v, torch.ones_like(v), width, separate)
    assert torch.equal(levels, levels.bfloat16().float())
    alone = (v[..., None] - separate).abs().min(-1).values.square().mean()
    saved = 10 * np.log10(float(alone) / _error(v[:500], levels, width))
    assert saved > GAIN[width] - 0.05


def test_the_widest_codes_stand_alone():
    separate = torch.linspace(-1, 1, 64).bfloat16().float()
    assert torch.equal(_fit(_draw("normal", 50), torch.ones(50, 32), 6, separate), separate)


def test_where_paths_save_nothing_levels_stand_alone():
    """Four values and four levels: nothing can be better, and a path could only be worse."""
    separate = torch.tensor([-1.0, -0.25, 0.5, 1.0])
    v = separate[torch.randint(4, (400, 32), generator=torch.Generator().manual_seed(0))]
    levels = _fit(v, torch.ones_like(v), 2, separate)
    assert _error(v, levels, 2) == 0


def test_a_sample_without_weight_gives_finite_levels():
    v = _draw("normal", 100)
    levels = _fit(v, torch.zeros_like(v), 2, _separate(v, 2))
    assert levels.isfinite().all()
