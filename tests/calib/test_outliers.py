from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcalib.calib.collect import FILE as STATISTICS
from kvcalib.calib.files import Reader
from kvcalib.calib.outliers import FILE, outliers
from kvcalib.errors import ConfigError
from kvcalib.quant.rotation import rotate
from kvcalib.quant.spec import CacheSpec, TensorSpec
from tests.calib.conftest import SINK, calibrated, make_windows
from tests.models.zoo import tiny

NUQ = TensorSpec(3, "nuq", "static", rope="pre", outliers=0.02)
TOKEN = TensorSpec(3, "nuq", "token", outliers=0.02)


def frames(folder, out, key=NUQ, value=TOKEN):
    summary = outliers(folder / "collect", CacheSpec(key, value, 0, SINK), out=out)
    return Reader(out / FILE, "outliers"), summary


def tails(folder, name, layer=0):
    reader = Reader(folder / "collect" / STATISTICS, "collect")
    return (reader[f"layers.{layer}.{name}.{end}"][0] for end in ("low", "high"))


def sample(folder, name, layer=0):
    paths = sorted((folder / "fisher").glob("window_*"))
    return torch.cat([Reader(path, "fisher")[f"layers.{layer}.{name}"] for path in paths])


def test_a_share_of_the_keys_lies_outside_its_frame(folder, tmp_path):
    reader, _ = frames(folder, tmp_path)
    zero, scale = reader["layers.0.key.zero"], reader["layers.0.key.scale"]
    u = (sample(folder, "key") - zero) / scale
    outside = (u.abs() > 1 + 1e-6).float().mean().item()
    assert outside == pytest.approx(0.02, abs=0.004)
    assert ((u > 1).float().mean() - (u < -1).float().mean()).abs() < 0.005


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_without_outliers_the_frame_is_min_and_max(folder, tmp_path, rope):
    key = replace(NUQ, outliers=0.0, rope=rope)
    reader, _ = frames(folder, tmp_path, key)
    low, high = tails(folder, "key" if rope == "pre" else "key_post")
    zero, scale = reader["layers.0.key.zero"], reader["layers.0.key.scale"]
    torch.testing.assert_close(zero - scale, low)
    torch.testing.assert_close(zero + scale, high)


def test_group_ranges_only_need_conditioning(folder, tmp_path):
    key = TensorSpec(4, "uniform", "group", rope="post")
    reader, _ = frames(folder, tmp_path / "a", key)
    low, high = tails(folder, "key_post")
    assert (reader["layers.0.key.zero"] == 0).all()
    torch.testing.assert_close(reader["layers.0.key.scale"] * 256, torch.maximum(-low, high))
    reader, _ = frames(folder, tmp_path / "b", replace(key, rope="pre"))
    low, high = tails(folder, "key")
    torch.testing.assert_close(reader["layers.0.key.zero"], (low + high) / 2)


def test_token_ranges_keep_the_proportions_of_channels(folder, tmp_path):
    reader, _ = frames(folder, tmp_path)
    low, high = tails(folder, "value")
    scale = reader["layers.0.value.scale"]
    assert (reader["layers.0.value.zero"] == 0).all()
    assert scale.unique().numel() == 1
    assert scale[0, 0] * 256 == torch.maximum(-low, high).max()


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_norms_are_taken_about_the_mean_of_every_channel(folder, tmp_path, rotation):
    reader, _ = frames(folder, tmp_path, value=TensorSpec(3, "nuq", "norm", rotation=rotation))
    mean = Reader(folder / "collect" / STATISTICS, "collect")["layers.0.value.mean"]
    torch.testing.assert_close(reader["layers.0.value.zero"], rotate(mean, rotation))
    assert mean.abs().max() > 0
    assert reader["layers.0.value.scale"].unique().numel() == 1


def test_fp8_uses_the_whole_of_e4m3(folder, tmp_path):
    fp8 = TensorSpec(8, "fp8", "static", rope="post")
    reader, _ = frames(folder, tmp_path, fp8, replace(fp8, rope="none"))
    low, high = tails(folder, "key_post")
    largest = torch.maximum(-low, high).max()
    torch.testing.assert_close(reader["layers.0.key.scale"] * 448, largest.expand(2, 16))


def test_identity_is_left_alone(folder, tmp_path):
    none = TensorSpec(16, "none", "static", rope="pre")
    reader, summary = frames(folder, tmp_path, none, replace(none, rope="none"))
    for name in ("key", "value"):
        assert (reader[f"layers.1.{name}.zero"] == 0).all()
        assert (reader[f"layers.1.{name}.scale"] == 1).all()
    assert summary["outliers_key"] == 0


@pytest.mark.parametrize("factor", [1e5, 1e-6])
def test_values_beyond_fp16_get_a_power_of_two(tmp_path, factor):
    """Either end: too large for it, or so small that it has only a few bits left."""
    model = tiny("llama")
    model.model.layers[0].self_attn.v_proj.weight.data *= factor
    folder = calibrated(model, make_windows(1), tmp_path)
    none = TensorSpec(16, "none", "static")
    reader, _ = frames(folder, tmp_path, replace(none, rope="pre"), none)
    scale = reader["layers.0.value.scale"]
    assert (scale[0, 0] > 1) == (factor > 1)
    assert scale[0, 0].log2() % 1 == 0
    assert 0.05 < (sample(folder, "value") / scale).abs().max() <= 65504


@pytest.mark.parametrize("name", ["key", "value"])
def test_more_outliers_than_collected_tails(folder, tmp_path, name):
    wide = {
        "key": replace(NUQ, outliers=0.2),
        "value": replace(TOKEN, range="static", outliers=0.2),
    }
    with pytest.raises(ConfigError, match=rf"quant\.{name}\.outliers=0\.2 .* at most 0\.025"):
        frames(folder, tmp_path, **{name: wide[name]})


def test_dead_and_constant_channels(tmp_path):
    model = tiny("qwen2")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight[:2] = 0
        attention.k_proj.bias[:2] = torch.tensor([0.0, 100.0])
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.zero_()
    folder = calibrated(model, make_windows(1), tmp_path)
    reader, _ = frames(folder, tmp_path)
    for name in ("key", "value"):
        assert (reader[f"layers.0.{name}.scale"] > 0).all()
        assert torch.isfinite(1 / reader[f"layers.0.{name}.scale"]).all()
    zero, scale = reader["layers.0.key.zero"], reader["layers.0.key.scale"]
    worst = (zero.abs() + scale)[0, :2]
    np.testing.assert_allclose(worst, [0, 100], atol=1e-2, rtol=1e-4)
