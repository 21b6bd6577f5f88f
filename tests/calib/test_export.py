from dataclasses import replace

import pytest
import torch

from kvcalib.artifact.io import load_artifact
from kvcalib.calib.codebooks import codebooks
from kvcalib.calib.export import export
from kvcalib.calib.outliers import outliers
from kvcalib.errors import ConfigError
from kvcalib.models.identity import identity
from kvcalib.quant import codec
from kvcalib.quant.spec import CacheSpec, TensorSpec
from tests.calib.conftest import SINK, calibrated, make_windows, quiet
from tests.calib.test_codebooks import KEY, VALUE, sample
from tests.models.zoo import tiny

FP8 = TensorSpec(8, "fp8", "static", rope="post")
NONE = TensorSpec(16, "none", "static", rope="pre")
GROUP = TensorSpec(4, "uniform", "group", rope="post")
SPECS = {
    "nuq": CacheSpec(KEY, VALUE, 32, SINK),
    "nuq-heads": CacheSpec(replace(KEY, books="head"), replace(VALUE, books="head"), 32, SINK),
    "kivi": CacheSpec(GROUP, TensorSpec(4, "uniform", "token", "channels", 16), 32, SINK),
    "nf": CacheSpec(replace(KEY, levels="nf"), replace(VALUE, levels="nf"), 0, SINK),
    "fp8": CacheSpec(FP8, replace(FP8, rope="none"), 0, SINK),
    "identity": CacheSpec(NONE, replace(NONE, rope="none"), 0, SINK),
}


def stages(model, folder, out, spec):
    outliers(folder / "collect", spec, out=out / "outliers")
    codebooks(out / "outliers", folder / "fisher", spec, out=out / "codebooks", progress=quiet)
    return export(
        model,
        out / "outliers",
        out / "codebooks",
        spec,
        out=out,
        settings={"seed": 0},
        summary={"a": 1},
    )


@pytest.mark.parametrize("kind", SPECS)
def test_artifact_holds_a_format_that_works(kind, llama, folder, tmp_path):
    spec = SPECS[kind]
    summary = stages(llama, folder, tmp_path, spec)
    artifact = load_artifact(tmp_path / summary["file"])
    assert artifact.spec == spec
    assert sorted(artifact.layers) == [0, 1]
    assert artifact.model == identity(llama)
    assert artifact.calibration["windows"] == "windows-0"
    assert artifact.settings == {"seed": 0}
    for name in ("key", "value"):
        tensor_spec, made = getattr(spec, name), getattr(artifact.layers[1], name)
        x, _ = sample(folder, 1, name, tensor_spec)
        error = codec.simulate(x, tensor_spec, made) - x
        assert error.std() < 0.2 * x.std()


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_neox", "phi3", "gemma3_text"])
def test_families(family, tmp_path):
    model = tiny(family)
    folder = calibrated(model, make_windows(1), tmp_path)
    stages(model, folder, tmp_path, SPECS["nuq"])
    artifact = load_artifact(tmp_path / "kvcalib.safetensors")
    assert [str(i) for i in sorted(artifact.layers)] == list(identity(model)["shapes"])


def test_bfloat16_model(tmp_path):
    model = tiny("llama").bfloat16()
    folder = calibrated(model, make_windows(1), tmp_path)
    stages(model, folder, tmp_path, SPECS["nuq"])
    artifact = load_artifact(tmp_path / "kvcalib.safetensors")
    assert artifact.model["dtype"] == "bfloat16"
    assert torch.isfinite(artifact.layers[0].key.levels).all()


def test_folders_of_another_format_are_refused(llama, folder, tmp_path):
    stages(llama, folder, tmp_path, SPECS["nuq"])
    folders = (tmp_path / "outliers", tmp_path / "codebooks")
    with pytest.raises(ConfigError, match="stage=outliers"):
        export(llama, *folders, SPECS["nf"], out=tmp_path)
    export(llama, *folders, replace(SPECS["nuq"], window=64), out=tmp_path)
