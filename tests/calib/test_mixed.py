"""Bits by sensitivity: the budget is kept, and beats the same bits spread evenly."""

from dataclasses import replace

import pytest
import torch

from kvcalib.artifact.io import load_artifact
from kvcalib.calib.codebooks import codebooks
from kvcalib.calib.export import export
from kvcalib.calib.files import Reader
from kvcalib.calib.outliers import outliers
from kvcalib.errors import ConfigError
from kvcalib.quant import codec
from kvcalib.quant.page import PageLayout
from kvcalib.quant.rotation import rotate
from kvcalib.quant.spec import PAGE, CacheSpec, TensorSpec
from tests.calib.conftest import SINK, calibrated, make_windows, quiet
from tests.models.zoo import tiny

KEY = TensorSpec(5, "mixed", "static", rope="pre", outliers=0.01, rank="error")
VALUE = TensorSpec(5, "mixed", "norm", rotation="hadamard")


@pytest.fixture(scope="module")
def model():
    """A tiny model in which half of the key channels and of the value heads hardly matter."""
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.view(4, 16, -1)[:, ::2] *= 0.05
            layer.self_attn.v_proj.weight.view(2, 16, -1)[0] *= 0.05
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return calibrated(model, make_windows(), tmp_path_factory.mktemp("mixed"))


def make(model, folder, out, spec, budget=None):
    outliers(folder / "collect", spec, out=out)
    codebooks(out, folder / "fisher", spec, out=out, budget=budget, progress=quiet)
    export(model, out, out, spec, out=out)
    return load_artifact(out)


def page_bits(artifact) -> float:
    layouts = [PageLayout(artifact.spec, layer.key, layer.value) for layer in artifact.layers.values()]
    elements = sum(PAGE * layout.heads * (layout.key_dim + layout.value_dim) for layout in layouts)
    return 8 * sum(layout.nbytes for layout in layouts) / elements


def damage(artifact, folder) -> float:
    """Squared gradient times squared error of the codec over the sample, keys and values."""
    total = 0.0
    for path in sorted((folder / "fisher").glob("window_*")):
        reader = Reader(path, "fisher")
        for index, layer in artifact.layers.items():
            for name in ("key", "value"):
                x, grad = (reader[f"layers.{index}.{name}{end}"].float() for end in ("", "_grad"))
                back = codec.simulate(x, getattr(artifact.spec, name), getattr(layer, name))
                total += ((back - x) * grad).square().sum().item()
    return total


@pytest.mark.parametrize("budget", [2.5, 3.3, 4.0])
def test_the_budget_is_true_bits_and_is_spent(model, folder, tmp_path, budget):
    artifact = make(model, folder, tmp_path, CacheSpec(KEY, VALUE, 0, SINK), budget)
    assert budget - 0.1 < page_bits(artifact) <= budget
    assert artifact.layers[0].key.widths.unique().numel() > 1


def test_bits_by_sensitivity_beat_even_bits(model, folder, tmp_path):
    even = CacheSpec(replace(KEY, bits=3, levels="nuq"), replace(VALUE, bits=3, levels="nuq"), 0, SINK)
    plain = make(model, folder, tmp_path / "even", even)
    mixed = make(model, folder, tmp_path / "mixed", CacheSpec(KEY, VALUE, 0, SINK), page_bits(plain))
    assert page_bits(mixed) <= page_bits(plain)
    assert damage(mixed, folder) < 0.7 * damage(plain, folder)


def test_one_tensor_can_be_mixed_alone(model, folder, tmp_path):
    spec = CacheSpec(KEY, TensorSpec(4, "nuq", "token"), 0, SINK)
    artifact = make(model, folder, tmp_path, spec, 3.5)
    assert artifact.layers[0].value.widths is None
    assert page_bits(artifact) <= 3.5


def test_a_budget_that_leaves_no_bit_per_code(model, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"quant\.budget=1\.2 .* less than one bit per code"):
        make(model, folder, tmp_path, CacheSpec(KEY, VALUE, 0, SINK), 1.2)


@pytest.mark.parametrize("levels", ["mixed", "nuq"])
def test_tables_per_channel_cost_no_bits_and_lower_the_damage(model, folder, tmp_path, levels):
    bits = 5 if levels == "mixed" else 3
    found = {}
    for books in ("layer", "channel"):
        key = replace(KEY, levels=levels, bits=bits, books=books)
        spec = CacheSpec(key, TensorSpec(4, "nuq", "token"), 0, SINK)
        artifact = make(model, folder, tmp_path / books, spec, 3.5 if levels == "mixed" else None)
        found[books] = page_bits(artifact), damage(artifact, folder)
    assert found["channel"][0] == found["layer"][0]
    assert found["channel"][1] < found["layer"][1]


def joint_damage(artifact, folder, names) -> float:
    """Squared (gradient . error) of whole heads over the sample: errors of a head may cancel."""
    total = 0.0
    for path in sorted((folder / "fisher").glob("window_*")):
        reader = Reader(path, "fisher")
        for index, layer in artifact.layers.items():
            for name in names:
                x, grad = (reader[f"layers.{index}.{name}{end}"].float() for end in ("", "_grad"))
                error = codec.simulate(x, getattr(artifact.spec, name), getattr(layer, name)) - x
                total += (error * grad).sum(-1).square().sum().item()
    return total


def test_a_trellis_costs_no_bits_and_lowers_the_damage(model, folder, tmp_path):
    found = {}
    for rounding in ("feedback", "trellis"):
        key, value = (replace(spec, bits=6, rounding=rounding) for spec in (KEY, VALUE))
        artifact = make(model, folder, tmp_path / rounding, CacheSpec(key, value, 0, SINK), 2.5)
        found[rounding] = page_bits(artifact), joint_damage(artifact, folder, ["key", "value"])
    assert found["trellis"][0] <= 2.5
    assert found["trellis"][1] < 0.95 * found["feedback"][1]


@pytest.mark.parametrize(("levels", "bits"), [("nuq", 3), ("uniform", 3)])
def test_error_feedback_costs_no_bits_and_lowers_the_damage(model, folder, tmp_path, levels, bits):
    found = {}
    for rounding in ("nearest", "feedback"):
        key = replace(KEY, levels=levels, bits=bits, rounding=rounding)
        spec = CacheSpec(key, TensorSpec(4, "nuq", "token"), 0, SINK)
        artifact = make(model, folder, tmp_path / rounding, spec)
        found[rounding] = page_bits(artifact), joint_damage(artifact, folder, ["key"])
    assert found["feedback"][0] == found["nearest"][0]
    assert found["feedback"][1] < 0.9 * found["nearest"][1]


def test_widest_widths_of_keys_and_values_may_differ(model, folder, tmp_path):
    artifact = make(model, folder, tmp_path, CacheSpec(replace(KEY, bits=6), replace(VALUE, bits=3), 0, SINK), 3.9)
    assert max(int(layer.value.widths.max()) for layer in artifact.layers.values()) == 3
    assert max(int(layer.key.widths.max()) for layer in artifact.layers.values()) == 6


@pytest.mark.parametrize("rounding", ["feedback", "trellis"])
def test_unbiased_keys_and_values_come_back_without_shrinking(model, folder, tmp_path, rounding):
    """The slope of what comes back over what went in, mean of all channels; the codes are the same."""
    specs = [replace(spec, rounding=rounding, outliers=0.0) for spec in (KEY, VALUE)]
    plain = make(model, folder, tmp_path / "plain", CacheSpec(*specs, 0, SINK), 2.2)
    stretched = CacheSpec(*(replace(spec, unbiased=True) for spec in specs), 0, SINK)
    unbiased = make(model, folder, tmp_path / "unbiased", stretched, 2.2)
    for name, (low, high) in {"key": (0.3, 0.8), "value": (-0.1, 0.4)}.items():
        before, after = (1 - _slope(artifact, folder, name) for artifact in (plain, unbiased))
        assert before > 0.05
        assert low * before < after < high * before, name


def _slope(artifact, folder, name: str) -> float:
    spec, slopes = getattr(artifact.spec, name), []
    for index, layer in artifact.layers.items():
        paths = sorted((folder / "fisher").glob("window_*"))
        x = torch.cat([Reader(path, "fisher")[f"layers.{index}.{name}"].float() for path in paths])
        back = codec.simulate(x, spec, getattr(layer, name))
        x, back = (rotate(t - t.mean(0), spec.rotation) for t in (x, back))
        slopes.append((x * back).sum(0) / x.square().sum(0))
    return torch.stack(slopes).mean().item()
