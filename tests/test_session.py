"""The tiny model in the real pipeline: what is refused before the first stage, and what a change costs."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from kvcalib import cli, load_artifact, pipeline, stages
from kvcalib.errors import ConfigError, MissingInput
from kvcalib.session import Session

EVERYTHING = [stage.name for stage in stages.TABLE if stage.name not in ("reference", "measure", "bench")]
"""What stage=all runs."""
SMALL = ("model=tiny", "eval=quick", "data.windows=2", "data.sample=256")


def settings_of(*overrides):
    cli.register_schema()
    with initialize_config_dir(cli.conf_dir(), version_base="1.3"):
        return cli.to_settings(compose("config", overrides=[*SMALL, *overrides]), Path("/launch"))


@pytest.fixture
def command(tmp_path):
    """Run the pipeline as the command line does: overrides -> what became of each stage."""

    def call(*overrides):
        settings = settings_of(f"runs_root={tmp_path}", *overrides)
        done = pipeline.run(settings, stages.TABLE, Session(settings), progress=_quietly, prepare=stages.prepare)
        return {name: result.action for name, result in done.items()}

    return call


def _quietly(items, *_, **__):
    return items


def ran(done):
    return [name for name, action in done.items() if action == "ran"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.config.head_dim=16", "quant=kivi2"], "quant.value.group=32 does not divide the 16 .* 1, 2, 4, 8, 16$"),
        (["model.config.head_dim=80", "quant=kivi4"], "quant.value.group=32 does not divide the 80 channels"),
        (["quant.budget=1.1", "quant.key.outliers=0.02"], "quant.budget=1.1 .* leaves less than one bit per code"),
        (["eval.windows=100000"], "100000 windows of 256 tokens"),
        (["eval.chunk=256"], "eval.length=256 measures nothing quantised.* or more, or eval.chunk=91 or less, or a sm"),
        (["eval=standard", "eval.needle_lengths=[20]"], "eval.needle_lengths=20 is too short"),
        ([f"eval.prompt={'x' * 600}"], "the prompt has 600 tokens"),
        (["stage=bench", "bench.contexts=[64]"], "bench.contexts=64 is too short for bench.rounds=3 of bench.steps=32"),
        (["data.windows=100000"], "100000 windows of 256 tokens"),
    ],
)
def test_what_the_model_or_text_cannot_give_is_refused_before_any_stage(command, tmp_path, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        command(*overrides)
    assert not list(tmp_path.glob("*/*/stage.json"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data=textfile", "data.path=lost"], "data.path"),
        (["data=wikitext2", "data.path=lost", "stage=evaluate"], "data.path"),
        (["data.eval_path=lost", "stage=evaluate"], "data.eval_path"),
        (["eval.text=textfile", "eval.text_path=lost"], "eval.text_path"),
    ],
)
def test_texts_are_looked_for_before_the_model_is_loaded(command, monkeypatch, overrides, key):
    monkeypatch.setattr(Session, "loaded", property(lambda self: pytest.fail("the model is loaded")))
    with pytest.raises(MissingInput, match=rf"^/launch/lost: no such file \({key}\)$"):
        command(*overrides)


def test_a_text_that_calibrates_does_not_judge(command, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("x")
    mine = ("data=textfile", f"data.path={tmp_path}/a.txt", f"data.eval_path={tmp_path}/b.txt", "eval.text=textfile")
    with pytest.raises(ConfigError, match=r"^eval.text_path: .*a.txt is calibration text too"):
        command(*mine, f"eval.text_path={tmp_path}/a.txt")


def test_threads_are_those_of_the_settings_whatever_was_before():
    before = torch.get_num_threads()
    for words, count in ((["threads=3"], 3), (["threads=1"], 1), (["threads=null"], before)):
        stages.prepare(Session(settings_of(*words)), ["report"])
        assert torch.get_num_threads() == count


def test_a_stage_looks_only_for_the_text_that_it_reads(command):
    assert ran(command("eval.text=textfile", "eval.text_path=lost", "stage=export"))[-1] == "export"


def test_groups_need_not_divide_where_there_are_none(command):
    assert ran(command("model.config.head_dim=16", "quant=nuq2", "stage=collect")) == ["collect"]


@pytest.mark.slow
def test_every_stage_of_a_grouped_format_runs_on_the_tiny_model(command):
    assert ran(command("quant=kivi2")) == EVERYTHING


@pytest.mark.slow
def test_a_stage_of_another_format_re_uses_the_measurements(command, tmp_path, caplog):
    assert ran(command("quant=nuq3")) == EVERYTHING
    fit = load_artifact(tmp_path / "tiny-nuq3" / "export").summary["layers"]["0"]["key"]
    assert 0 < fit["stored"] <= 1.1 * fit["kmeans"], "what the fit came to travels with the file"
    with caplog.at_level("INFO"):
        done = command("quant=nuq3", "stage=codebooks", "quant.key.bits=2")
    assert ran(done) == ["outliers", "codebooks"]
    assert "outliers: settings changed (quant.key.bits 3 -> 2), running again" in caplog.text
    assert "now out of date: export, evaluate, report" in caplog.text
    with pytest.raises(ConfigError, match="quant.key.bits 2 -> 3.* name=... .* stage.force=true"):
        command("quant=nuq3")
    assert ran(command("quant=nuq3", "stage.force=true")) == ["outliers", "codebooks"]  # the rest is of this format
    assert ran(command("quant=nuq3")) == []


@pytest.mark.slow
def test_measuring_again_needs_no_permission(command, caplog):
    command("stage=evaluate", "eval.windows=1")
    with caplog.at_level("INFO"):
        assert ran(command()) == ["evaluate", "report"]
    assert "evaluate: settings changed (eval.windows 1 -> 2), running again" in caplog.text
    assert ran(command("stage=export", "stage.force=true")) == ["export"]
    assert ran(command()) == ["evaluate", "report"]


@pytest.mark.slow
def test_timing_is_a_stage_of_its_own_and_renews_the_report(command, tmp_path, caplog):
    quick = ("bench.shapes=[model]", "bench.lengths=[256]", "bench.contexts=[256]", "bench.peers=[full]")
    few = (*quick, "bench.batches=[1]", "bench.prefill=[64]", "bench.steps=4", "bench.calibration=1")
    command()
    assert ran(command("stage=bench", *few)) == ["bench"]
    found = json.loads((tmp_path / "tiny-mixed3" / "bench" / "bench.json").read_text())
    assert {row["contender"] for row in found["decode"]} == {"kvcalib", "full", "full:empty"}
    assert found["calibration"]["windows"] == 1
    assert found["stages"].keys() == set(EVERYTHING)
    assert ran(command("stage=bench", *few)) == []
    assert ran(command(*few)) == ["report"]
    assert ran(command("stage=bench", "stage.force=true", *few)) == ["bench"]
    assert ran(command(*few)) == ["report"], "with the new timings"
    assert ran(command("stage=bench", *few, "model.context=300")) == ["bench"]
    assert "Whole decode steps" in (tmp_path / "tiny-mixed3" / "report" / "report.md").read_text()
    assert ran(command("stage=bench", *few, "bench.rounds=2")) == ["bench"]


def test_another_text_can_judge_than_the_one_that_calibrates():
    same, other = Session(settings_of()), Session(settings_of("eval.text=pycode", "eval.order=start"))
    assert same.evaluation.hash != other.evaluation.hash
    assert same.calibration.hash == other.calibration.hash
    assert "import" in other.tokenizer.decode(other.evaluation.ids.flatten())
    assert other.evaluation.source["order"] == "start"
    assert other.calibration.source["order"] == "spread"


def test_sessions_that_follow_one_another_load_the_same_model_once():
    loaded = {}
    first, second, other = (
        Session(settings_of(*words), loaded) for words in (["quant=nuq2"], ["quant=nuq3"], ["model.config.head_dim=16"])
    )
    assert first.model is second.model
    assert other.model is not first.model
    assert len(loaded) == 1, "one model at a time"


def test_the_unchanged_model_is_measured_for_all_formats_at_once(command):
    assert ran(command("stage=measure", "quant=nuq2"))[-2:] == ["reference", "measure"]
    assert ran(command("stage=measure", "quant=nuq3")) == ["outliers", "codebooks", "export", "measure"]
    assert ran(command("stage=measure", "quant=nuq3", "eval.windows=1")) == ["reference", "measure"]
    assert ran(command("stage=measure", "quant=nuq3", "eval.windows=1")) == []
