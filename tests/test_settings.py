"""Every key is known by its dotted name; paths become absolute relative to the launch."""

import pytest

from kvcalib.settings import STAGES, absolute_paths, known_keys, plain
from kvcalib.stages import TABLE


def test_stage_names_are_those_of_the_table():
    assert tuple(stage.name for stage in TABLE) == STAGES


def test_known_keys_are_those_of_the_configuration():
    keys = set(known_keys())
    assert {"quant", "quant.key.bits", "eval.prompt", "stage.force", "seed"} <= keys


def test_paths_are_relative_to_the_launch_directory(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "weights").mkdir()
    settings.runs_root, settings.run_dir = "~/runs", "runs/x"
    settings.data.path, settings.model.path = "text/*.txt", "weights"
    absolute_paths(settings, tmp_path)
    assert settings.runs_root == "/home/somebody/runs"
    assert settings.run_dir == str(tmp_path / "runs/x")
    assert settings.data.path == str(tmp_path / "text/*.txt")
    assert settings.model.path == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("path", "kept"),
    [("owner/name", True), ("./owner/name", False), ("model.gguf", False), ("/no/such", False)],
)
def test_a_hub_id_is_not_a_path(settings, tmp_path, path, kept):
    settings.model.path = path
    absolute_paths(settings, tmp_path)
    assert (settings.model.path == path) == (kept or path.startswith("/"))


def test_plain_holds_json_types_only(settings):
    kept = plain(settings)["quant"]["key"]
    assert kept["levels"] == "nuq"
    assert type(kept["levels"]) is str
