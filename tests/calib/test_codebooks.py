"""The fit sees what run time will see: errors weighted in the fit equal errors of the codec."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcalib.calib import outliers as outliers_stage
from kvcalib.calib.codebooks import (
    DEFAULT_FIT,
    FILE,
    Fit,
    codebooks,
    fit_levels,
    grid,
    weighted_points,
)
from kvcalib.calib.files import Reader
from kvcalib.calib.fisher import fisher
from kvcalib.calib.outliers import outliers
from kvcalib.calib.sample import Sample
from kvcalib.errors import ConfigError, MissingInput
from kvcalib.fit.kmeans import distortion
from kvcalib.models.rotary import rotary
from kvcalib.quant import codebook, codec
from kvcalib.quant.rope import to_post_rope
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec
from tests.calib.conftest import SINK, calibrated, make_windows, quiet
from tests.models.zoo import tiny

KEY = TensorSpec(3, "nuq", "static", rope="pre", outliers=0.01)
VALUE = TensorSpec(3, "nuq", "token", outliers=0.01)
SPECS = {
    "static": KEY,
    "static-heads": replace(KEY, books="head"),
    "static-post": replace(KEY, rope="post"),
    "group": replace(KEY, range="group", outliers=0.0),
    "group16-outliers": replace(KEY, range="group", group=16),
    "token-layer": VALUE,
    "token-head": replace(VALUE, scope="head", books="head"),
    "token-channels": replace(VALUE, scope="channels", group=8),
    "no-outliers": replace(VALUE, outliers=0.0),
}


def run_stages(folder, out, key=KEY, value=VALUE, *, fit=DEFAULT_FIT, seed=0):
    spec = CacheSpec(key, value, 0, SINK)
    outliers(folder / "collect", spec, out=out / "frames")
    arguments = {"key": fit, "value": fit, "seed": seed, "out": out / "levels", "progress": quiet}
    summary = codebooks(out / "frames", folder / "fisher", spec, **arguments)
    return Reader(out / "levels" / FILE, "codebooks"), summary


def tables(out, layer, name) -> Tables:
    frame = Reader(out / "frames" / outliers_stage.FILE, "outliers")
    levels = Reader(out / "levels" / FILE, "codebooks")
    prefix = f"layers.{layer}.{name}"
    fields = ("levels", "edges") if levels.header["spec"][name]["q_norm"] else ("levels",)
    fitted = {field: levels[f"{prefix}.{field}"] for field in fields}
    return Tables(frame[f"{prefix}.zero"], frame[f"{prefix}.scale"], **fitted)


def sample(folder, layer, name, spec):
    readers = [Reader(path, "fisher") for path in sorted((folder / "fisher").glob("window_*"))]
    x, grad = (torch.cat([r[f"layers.{layer}.{name}{end}"] for r in readers]) for end in ("", "_grad"))
    if spec.rope == "post":
        from kvcalib.calib.files import read_rope

        positions, rope = torch.cat([r["positions"] for r in readers]), read_rope(readers[0], layer)
        x, grad = (to_post_rope(t.float(), positions, rope) for t in (x, grad))
    return x.float(), grad.float()


@pytest.mark.parametrize("kind", SPECS)
def test_fitted_distortion_is_the_loss_of_the_codec(kind, folder, tmp_path):
    """sum of g^2 (x - x')^2 over the inliers, once through the fit's points, once through pages."""
    spec = SPECS[kind]
    name = "value" if spec.rope == "none" else "key"
    run_stages(folder, tmp_path, **{name: spec})
    made, (x, grad) = tables(tmp_path, 1, name), sample(folder, 1, name, spec)
    sets = weighted_points(x, grad, made, spec, Fit())
    books = made.levels.double().numpy()
    from_fit = sum(
        distortion(points, weights, levels) * weights.sum()
        for (points, weights), levels in zip(sets, books, strict=True)
    )
    pages = x.unflatten(0, (-1, 32))
    _, inlier, _ = codec.normalise(pages, spec, made)
    error = (codec.simulate(x, spec, made) - x).unflatten(0, (-1, 32)).double()
    loss = grad.unflatten(0, (-1, 32)).double().square() * error.square()
    from_pages = (loss if inlier is None else loss * inlier).sum().item()
    assert from_fit == pytest.approx(from_pages, rel=1e-4)


@pytest.mark.parametrize("kind", SPECS)
def test_fitted_levels_are_usable_and_beat_the_grids(kind, folder, tmp_path):
    spec = SPECS[kind]
    name = "value" if spec.rope == "none" else "key"
    reader, summary = run_stages(folder, tmp_path, **{name: spec})
    for layer in (0, 1):
        levels = reader[f"layers.{layer}.{name}.levels"]
        assert levels.shape == (2 if spec.books == "head" else 1, 8)
        assert (levels.diff(dim=1) > 0).all()
        assert torch.equal(levels, levels.bfloat16().float())
        found = summary["layers"][layer][name]
        assert found["exact"] <= found["kmeans"] * (1 + 1e-9)
        assert found["kmeans"] <= 1.1 * found["exact"]
        assert found["exact"] <= found["stored"] * (1 + 1e-9) <= found["kmeans"] * 1.001
        assert found["stored"] < min(found["uniform"], found["nf"])


def moments_off(v, inlier, made, books) -> float:
    """How far mean (in units of the spread) and spread of the dequantised inliers are from their own, at most."""
    back, off = codebook.decode(codebook.encode(v, made), made), []
    for head in range(2) if books == "head" else [slice(None)]:
        before, after = (t[:, :, head][inlier[:, :, head]].double() for t in (v, back))
        off += [abs(after.mean() - before.mean()) / before.std(), abs(after.std() / before.std() - 1)]
    return float(max(off))


@pytest.mark.parametrize("kind", SPECS)
def test_q_norm_keeps_mean_and_spread_of_the_inliers(kind, folder, tmp_path):
    """Codes stay those of the fitted levels; what they mean has the moments of what was coded, in every book."""
    spec = replace(SPECS[kind], bits=2)
    name = "value" if spec.rope == "none" else "key"
    plain_report, report = (
        run_stages(folder, tmp_path / str(on), **{name: replace(spec, q_norm=on)})[1]["layers"][1][name]
        for on in (False, True)
    )
    plain, moved = (tables(tmp_path / str(on), 1, name) for on in (False, True))
    assert plain.edges is None
    assert torch.equal(moved.levels, moved.levels.bfloat16().float())
    x, grad = sample(folder, 1, name, spec)
    pages = x.unflatten(0, (-1, 32))
    assert torch.equal(codec.quantise(pages, spec, moved).codes, codec.quantise(pages, spec, plain).codes)
    v, inlier, _ = codec.normalise(pages, spec, moved)
    inlier = torch.ones_like(v, dtype=torch.bool) if inlier is None else inlier
    assert moments_off(v, inlier, moved, spec.books) < 5e-3, "bfloat16 is exact to 1 in 512"
    assert moments_off(v, inlier, plain, spec.books) > 0.02
    assert plain_report["stored"] < report["stored"], "the price"
    assert {**report, "stored": 0} == {**plain_report, "stored": 0}
    if spec.books == "layer":
        ((_, weights),) = weighted_points(x, grad, plain, spec, Fit())
        error = (codebook.decode(codebook.encode(v, moved), moved) - v)[inlier].double().numpy()
        assert report["stored"] == pytest.approx(np.average(error**2, weights=weights), rel=1e-4)


def test_q_norm_with_outliers_by_error(folder, tmp_path):
    """Moved levels make a few other elements outliers, which moves the moments by little."""
    off = {}
    for on in (False, True):
        spec = replace(KEY, bits=2, rank="error", q_norm=on)
        reader, _ = run_stages(folder, tmp_path / str(on), key=spec)
        made = tables(tmp_path / str(on), 0, "key")._replace(weight=reader["layers.0.key.weight"])
        v, inlier, _ = codec.normalise(sample(folder, 0, "key", spec)[0].unflatten(0, (-1, 32)), spec, made)
        off[on] = moments_off(v, inlier, made, "layer")
    assert off[True] < 0.2 * off[False]


def test_each_factor_of_the_weight_can_be_left_out(folder, tmp_path):
    run_stages(folder, tmp_path)
    made, (x, grad) = tables(tmp_path, 0, "key"), sample(folder, 0, "key", KEY)
    x, grad = x[:32], grad[:32]
    _, inlier, _ = codec.normalise(x[None], KEY, made)
    scale = made.scale.expand_as(x)[inlier[0]].double().square()
    squares = grad[inlier[0]].double().square()
    expected = {
        (True, True): squares * scale,
        (True, False): squares,
        (False, True): scale,
        (False, False): torch.ones_like(scale),
    }
    for (use_fisher, use_range), weights in expected.items():
        fit = Fit(fisher=use_fisher, range_weight=use_range)
        ((points, found),) = weighted_points(x, grad, made, KEY, fit)
        assert len(points) == round(0.99 * x.numel())
        np.testing.assert_allclose(found, weights.numpy())


def test_exact_solver_and_seed(folder, tmp_path):
    a, report = run_stages(folder, tmp_path / "a")
    b, _ = run_stages(folder, tmp_path / "b")
    exact, optimal = run_stages(folder, tmp_path / "c", fit=Fit("exact"))
    assert torch.equal(a["layers.0.key.levels"], b["layers.0.key.levels"])
    for layer in (0, 1):
        found, best = report["layers"][layer]["key"], optimal["layers"][layer]["key"]
        assert best["stored"] <= found["stored"] * 1.0001
        assert best["stored"] == pytest.approx(best["exact"], rel=1e-3)
    assert exact.header["sample_tokens"] == 3 * 96


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TensorSpec(2, "uniform", "static"), [-1, -0.333984375, 0.333984375, 1]),
        (TensorSpec(2, "uniform", "token"), [0, 1, 2, 3]),
        (TensorSpec(16, "none", "static"), []),
    ],
)
def test_grids_need_no_sample(spec, expected, folder, tmp_path):
    assert grid(spec).tolist() == [expected]
    full = CacheSpec(replace(spec, rope="pre"), spec, 0, SINK)
    outliers(folder / "collect", full, out=tmp_path)
    summary = codebooks(tmp_path, tmp_path / "absent", full, out=tmp_path, progress=quiet)
    assert summary["fitted"] == []
    assert Reader(tmp_path / FILE, "codebooks")["layers.1.value.levels"].tolist() == [expected]


def test_other_text_or_no_text_is_refused(llama, folder, tmp_path):
    spec = CacheSpec(KEY, VALUE, 0, SINK)
    outliers(folder / "collect", spec, out=tmp_path)
    with pytest.raises(MissingInput, match="stage=fisher"):
        codebooks(tmp_path, tmp_path / "absent", spec, out=tmp_path, progress=quiet)
    other = make_windows(seed=1)
    arguments = {"tokens": 64, "labels": "text", "repeat": 0.0, "seed": 0, "out": tmp_path / "other", "progress": quiet}
    fisher(llama, rotary(llama), other, sink=SINK, **arguments)
    with pytest.raises(ConfigError, match="same text"):
        codebooks(tmp_path, tmp_path / "other", spec, out=tmp_path, progress=quiet)


def test_values_that_are_all_zero(tmp_path):
    model = tiny("llama")
    model.model.layers[0].self_attn.v_proj.weight.data.zero_()
    folder = calibrated(model, make_windows(1), tmp_path)
    with pytest.warns(UserWarning, match="sensitivity"):
        reader, _ = run_stages(folder, tmp_path)
    levels = reader["layers.0.value.levels"]
    assert torch.isfinite(levels).all()
    assert (levels.diff(dim=1) > 0).all()
    x, _ = sample(folder, 0, "value", VALUE)
    assert codec.simulate(x, VALUE, tables(tmp_path, 0, "value")).abs().max() < 1e-20


@pytest.mark.parametrize("factor", [1e-40, 1e-300])
def test_weights_of_any_size_give_the_same_levels(factor, generator):
    points = torch.randn(5000, generator=generator).clamp(-1, 1).numpy()
    weights = torch.rand(5000, generator=generator).double().numpy()
    arguments = {"solver": "kmeans", "bins": 512, "seed": 0}
    plain, _ = fit_levels(points, weights, 3, **arguments)
    tiny_weights, _ = fit_levels(points, weights * factor, 3, **arguments)
    np.testing.assert_allclose(plain, tiny_weights, atol=0.01)


def test_post_rotary_gradient_undoes_the_gain(tmp_path):
    """Under YaRN the rotation has a gain; the gradient after rotary is that of the cached key."""
    model, windows = tiny("llama-yarn"), make_windows(1)
    folder = calibrated(model, windows, tmp_path)
    reader = Reader(next((folder / "fisher").iterdir()), "fisher")
    read, spec = Sample(folder / "fisher", reader.header), replace(KEY, rope="post")
    x, grad = read(0, "key", spec)
    pre_x, pre_grad = read(0, "key", KEY)
    # the loss to first order, <gradient, key>, is the same on both sides of the rotation
    torch.testing.assert_close((x * grad).sum(-1), (pre_x * pre_grad).sum(-1), rtol=1e-3, atol=1e-4)
    assert rotary(model)[0].scaling != 1


def test_outliers_by_error_cost_less_than_outliers_by_range(folder, tmp_path):
    """Same bits, same number of outliers: the weighted error of the codec itself is the judge."""
    damage = {}
    for rank in ("range", "error"):
        spec = replace(KEY, bits=2, rank=rank)
        reader, _ = run_stages(folder, tmp_path / rank, key=spec)
        fitted = tables(tmp_path / rank, 0, "key")
        if rank == "error":
            fitted = fitted._replace(weight=reader["layers.0.key.weight"])
            assert fitted.weight.mean() == pytest.approx(1)
        x, grad = sample(folder, 0, "key", spec)
        damage[rank] = ((codec.simulate(x, spec, fitted) - x) * grad).square().sum().item()
    assert damage["error"] < 0.99 * damage["range"]  # random weights: channels hardly differ in sensitivity
