"""What decides a stage's result: the settings that each stage reads, and nothing else."""

import copy

import pytest

from kvcalib.checks import check
from kvcalib.planner import Planner
from kvcalib.settings import Device, Labels, Levels, Range
from kvcalib.stages import TABLE, _shipped, _spec

NAMES = [stage.name for stage in TABLE]


def changed(before, after):
    """Stages whose fingerprint differs."""
    old, new = Planner(before, TABLE).prints, Planner(after, TABLE).prints
    return [name for name in NAMES if old[name] != new[name]]


def test_the_table_is_in_order_of_dependence():
    for position, stage in enumerate(TABLE):
        assert set(stage.needs) <= set(NAMES[:position])


def test_what_is_timed_decides_whether_timings_are_current(settings, monkeypatch):
    before = Planner(settings, TABLE).prints["bench"]
    monkeypatch.setenv("KVCALIB_KERNEL", "reference")
    assert Planner(settings, TABLE).prints["bench"] != before


def test_local_files_count_by_their_place_and_folders_do_not(settings, tmp_path):
    (tmp_path / "step-10").mkdir()
    for name in ("config.json", "model.safetensors", "step-10/model.safetensors"):
        (tmp_path / name).write_text("x")
    settings.model.path = str(tmp_path)
    settings.data.path = f"{tmp_path}/*"  # finds a folder, too
    before = copy.deepcopy(TABLE[0].reads(settings))
    assert set(before["model"]["files"]) == {"config.json", "model.safetensors", "step-10/model.safetensors"}
    (tmp_path / "model.safetensors").write_text("other")
    assert TABLE[0].reads(settings) != before


@pytest.mark.parametrize(
    ("path", "value", "first"),
    [
        ("data.windows", 3, ["collect", "fisher"]),
        ("data.sample", 64, ["fisher", "codebooks"]),
        ("quant.sink", 0, ["collect", "fisher"]),
        ("quant.labels", Labels.model, ["fisher", "codebooks"]),
        ("quant.repeat", 0.5, ["fisher", "codebooks"]),
        ("quant.key.outliers", 0.02, ["outliers", "codebooks"]),
        ("quant.key.levels", Levels.nf, ["outliers", "codebooks"]),
        ("quant.key.bits", 4, ["outliers", "codebooks", "export"]),
        ("quant.value.fisher", False, ["codebooks", "export"]),
        ("quant.value.q_norm", True, ["outliers", "codebooks", "export"]),
        ("quant.value.unbiased", True, ["outliers", "codebooks", "export"]),
        ("quant.window", 64, ["export", "measure", "evaluate"]),
        ("eval.windows", 9, ["reference", "measure", "evaluate", "report"]),
        ("eval.chunk", 9, ["evaluate", "report"]),
        ("eval.text", "pycode", ["reference", "measure", "evaluate", "report"]),
        ("model.dtype", "bfloat16", ["collect", "fisher"]),
        ("name", "other", ["report"]),
        ("device", Device.cpu, ["bench"]),
        ("model.context", 300, ["bench"]),
        ("threads", 1, ["bench"]),
        ("bench.rounds", 2, ["bench"]),
        ("quant.name", "other", []),
        ("model.name", "other", []),
        ("model.install", "other", []),
        ("stage.force", True, []),
    ],
)
def test_a_setting_touches_the_stages_that_read_it(settings, path, value, first):
    before = copy.deepcopy(settings)
    *parents, last = path.split(".")
    node = settings
    for parent in parents:
        node = getattr(node, parent)
    setattr(node, last, value)
    touched = changed(before, settings)
    assert touched[: len(first)] == first
    if not first or first == ["bench"]:
        assert touched == first


def test_local_weights_count_by_size_and_time(settings, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    (tmp_path / "README.md").write_text("one")
    settings.model.path = str(tmp_path)
    before = Planner(settings, TABLE).prints
    (tmp_path / "README.md").write_text("another")
    assert Planner(settings, TABLE).prints == before
    weights.write_bytes(b"12345")
    assert Planner(settings, TABLE).prints["collect"] != before["collect"]


def test_local_text_counts_by_content(settings, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one")
    settings.data.path = str(text)
    before = Planner(settings, TABLE).prints
    text.write_text("two!")
    after = Planner(settings, TABLE).prints
    assert [name for name in NAMES if before[name] == after[name]] == []


def test_the_format_is_that_of_the_settings(settings):
    spec = _spec(settings)
    assert (spec.key.bits, spec.key.levels, spec.key.rope) == (3, "nuq", "pre")
    assert (spec.value.range, spec.value.outliers) == ("token", 0.01)
    assert (spec.window, spec.sink) == (128, 4)


def test_no_path_of_this_machine_is_shipped(settings):
    settings.data.path = "/secret/place"
    assert "/" not in str(_shipped(settings))


def test_a_range_can_be_changed_alone(settings):
    """Outliers that cannot rank by error under another range rank by range."""
    assert _spec(settings).key.ranks_by_error
    settings.quant.key.range = Range("group")
    check(settings)
    assert not _spec(settings).key.ranks_by_error
