"""Which stages run, are kept, re-used or refused; and that a kill never looks finished.

The stages here are fakes that append their name to a ledger, so the tests see what really ran.
"""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from kvcalib import cli, pipeline, records
from kvcalib.errors import ConfigError, MissingInput
from kvcalib.planner import Stage, _difference
from kvcalib.settings import Labels


@pytest.fixture(scope="module")
def base():
    cli.register_schema()
    with initialize_config_dir(cli.conf_dir(), version_base="1.3"):
        return cli.to_settings(compose("config", overrides=["model=tiny"]), Path("/launch"))


class Bench:
    """A runs folder, fake stages collect -> outliers -> export -> report, and a ledger."""

    def __init__(self, root: Path, base):
        self.root, self.base, self.ledger = root, base, []
        self.fail = None

    def stage(self, name, needs, reads, **kwargs):
        def run(session, task):
            self.ledger.append(name)
            (task.out / "numbers.json").write_text(json.dumps([name, len(self.ledger)]))
            if self.fail == name:
                raise MissingInput("the text is gone")
            return {"inputs": {need: str(path) for need, path in task.inputs.items()}}

        return Stage(name, needs, reads, run, **kwargs)

    @staticmethod
    def measured(settings):
        return {"data": {"windows": settings.data.windows}, "quant": {"labels": settings.quant.labels.value}}

    @property
    def table(self):
        return (
            self.stage("collect", (), self.measured, shared=True),
            self.stage("outliers", ("collect",), lambda s: {"quant": {"sink": s.quant.sink}}, shared=True),
            self.stage("export", ("outliers",), lambda s: {"quant": {"bits": s.quant.key.bits}}),
            self.stage("report", ("export",), lambda s: {"eval": s.eval.windows}, derived=True),
        )

    def run(self, *stages, name="a", force=False, bits=3, windows=8, sink=4, evaluated=1, prepare=None, labels="model"):
        """What ran, in order; settings that are not given are the defaults."""
        settings = copy.deepcopy(self.base)
        settings.name, settings.runs_root = name, str(self.root)
        settings.run_dir = str(self.root / name)
        settings.stage.run = list(stages) or ["collect", "outliers", "export", "report"]
        settings.stage.force = force
        settings.quant.key.bits, settings.quant.sink = bits, sink
        settings.data.windows, settings.eval.windows = windows, evaluated
        settings.quant.labels = Labels(labels)
        self.ledger.clear()
        self.done = pipeline.run(settings, self.table, None, progress=lambda items, **_: items, prepare=prepare)
        return list(self.ledger)

    def record(self, stage, name="a"):
        return json.loads((self.root / name / stage / "stage.json").read_text())


@pytest.fixture
def bench(tmp_path, base):
    return Bench(tmp_path / "runs", base)


ALL = ["collect", "outliers", "export", "report"]


def test_everything_runs_once(bench):
    assert bench.run() == ALL
    assert bench.run() == []
    assert {result.action for result in bench.done.values()} == {"up to date"}


def test_the_record_says_what_was_done(bench):
    bench.run()
    record = bench.record("outliers")
    assert record["settings"] == {"quant": {"sink": 4}}
    assert record["inputs"]["collect"]["fingerprint"] == bench.record("collect")["fingerprint"]
    assert record["inputs"]["collect"]["path"] == "collect"
    assert record["outputs"] == [{"file": "numbers.json", "bytes": 15}]
    assert record["started"] <= record["finished"]
    assert record["peak_memory_bytes"] > 1_000_000
    assert record["seconds"] >= 0
    assert "kvcalib" in record["versions"]


def test_one_stage_brings_its_missing_prerequisites(bench):
    assert bench.run("outliers") == ["collect", "outliers"]
    assert bench.run("export") == ["export"]


def test_a_finished_stage_does_not_need_its_inputs_any_more(bench):
    bench.run()
    (bench.root / "a" / "collect" / "stage.json").unlink()
    assert bench.run("export") == []
    assert bench.run() == ["collect"]


def test_a_changed_setting_is_refused_with_both_remedies(bench):
    bench.run()
    with pytest.raises(ConfigError) as caught:
        bench.run(windows=9)
    text = str(caught.value)
    assert "stage collect" in text
    assert "data.windows 8 -> 9" in text
    assert "name=..." in text
    assert "stage.force=true" in text
    assert bench.run() == []


def test_nothing_runs_before_a_refusal(bench):
    bench.run()
    (bench.root / "a" / "collect" / "stage.json").unlink()
    with pytest.raises(ConfigError, match="bits 3 -> 4"):
        bench.run(bits=4)
    assert bench.ledger == []


def test_a_refusal_has_two_remedies_and_no_third(bench):
    bench.run()
    with pytest.raises(ConfigError) as caught:
        bench.run(bits=4)
    assert "name=..." in str(caught.value)
    assert "stage.force=true" in str(caught.value)
    assert "alone" not in str(caught.value)


def test_the_named_stage_is_redone_and_later_ones_are_said_to_be_stale(bench, caplog):
    bench.run()
    with caplog.at_level("INFO"):
        assert bench.run("outliers", sink=5) == ["outliers"]
    assert "sink 4 -> 5" in caplog.text
    assert "now out of date: export, report" in caplog.text
    assert bench.run("export", sink=5) == ["export"]


def test_the_named_stage_is_refused_on_stale_prerequisites(bench):
    bench.run()
    with pytest.raises(ConfigError, match=r"stage collect .*stage=all stage.force=true"):
        bench.run("export", windows=9)


def test_a_prerequisite_of_another_format_is_redone(bench, caplog):
    bench.run()
    with caplog.at_level("INFO"):
        assert bench.run("export", sink=5) == ["outliers", "export"]
    assert "outliers: settings changed (quant.sink 4 -> 5), running again" in caplog.text
    assert "export: inputs or code changed (other result of outliers), running again" in caplog.text
    assert "now out of date: report" in caplog.text
    assert bench.done["outliers"].action == "ran"


def test_a_stage_that_only_reads_does_not_remake_what_it_judges(bench):
    bench.run(bits=4)
    with pytest.raises(ConfigError, match=r"quant.bits 4 -> 3.* first, which measures the model no second"):
        bench.run("report")
    assert bench.ledger == []


def test_a_format_that_wants_other_measurements_is_not_said_to_be_free(bench):
    bench.run()
    with pytest.raises(ConfigError, match=r"quant.labels model -> text.* type stage=export first, or give"):
        bench.run("report", labels="text")
    assert bench.run("export", labels="text") == ["collect", "outliers", "export"]


def test_back_to_the_first_format_is_one_refusal_and_one_command(bench):
    bench.run()
    bench.run("export", sink=5, bits=4)
    with pytest.raises(ConfigError, match=r"stage outliers .*quant.sink 5 -> 4\).* stage.force=true"):
        bench.run()
    assert bench.run(force=True) == ["outliers", "export", "report"]
    assert bench.run() == []


def test_a_prerequisite_on_other_data_is_refused_however_far_up(bench):
    bench.run()
    with pytest.raises(ConfigError, match="stage collect .*data.windows 8 -> 9"):
        bench.run("export", windows=9, sink=5)
    assert bench.ledger == []


def test_force_runs_a_named_stage_again_and_no_other(bench):
    bench.run()
    assert bench.run("outliers", force=True) == ["outliers"]


def test_force_redoes_from_the_first_change_on(bench):
    bench.run()
    assert bench.run(sink=5, force=True) == ["outliers", "export", "report"]
    assert bench.run(sink=5, windows=9, force=True) == ALL
    assert bench.run(sink=5, windows=9) == []


def test_force_without_a_change_redoes_everything_selected(bench):
    bench.run()
    assert bench.run(force=True) == ALL


def test_force_does_not_replace_a_stale_prerequisite(bench):
    bench.run()
    with pytest.raises(ConfigError, match="stage collect"):
        bench.run("outliers", force=True, windows=9)


def test_a_derived_stage_is_redone_without_asking(bench, caplog):
    bench.run()
    assert bench.run(evaluated=2) == ["report"]
    assert bench.run("export", force=True) == ["export"]
    with caplog.at_level("INFO"):
        assert bench.run(evaluated=2) == ["report"]
    assert "report: inputs or code changed (export made anew), running again" in caplog.text
    assert bench.run(evaluated=2) == []


def test_a_sibling_run_is_re_used_where_allowed(bench):
    bench.run(name="a")
    assert bench.run(name="b", bits=4) == ["export", "report"]
    assert bench.record("collect", "b")["reused_from"] == os.path.join("..", "a", "collect")
    found = records.finished(bench.root / "b", "collect")
    assert found.path == bench.root / "a" / "collect"
    assert bench.done["collect"].describe() == "reused"
    assert bench.run(name="b", bits=4) == []
    assert bench.run(name="c", sink=9) == ["outliers", "export", "report"]


def test_a_re_used_result_that_is_gone_is_made_again(bench):
    bench.run(name="a")
    bench.run(name="b", bits=4)
    (bench.root / "a" / "collect" / "numbers.json").unlink()
    assert bench.run("collect", name="b", bits=4) == ["collect"]


def test_a_re_used_result_that_changed_since_is_made_again(bench):
    bench.run(name="a")
    bench.run(name="b", bits=4)
    bench.run("collect", name="a", windows=9)
    assert bench.run("collect", name="b", bits=4) == ["collect"]
    assert "reused_from" not in bench.record("collect", "b")


def test_a_truncated_output_does_not_count(bench):
    bench.run()
    (bench.root / "a" / "export" / "numbers.json").write_text("")
    assert bench.run("export") == ["export"]


@pytest.mark.parametrize("text", ['{"stage": "exp', "{}", "[]", "null", '{"fingerprint": 3}'])
def test_a_damaged_record_does_not_count(bench, caplog, text):
    bench.run()
    (bench.root / "a" / "export" / "stage.json").write_text(text)
    with caplog.at_level("INFO"):
        assert bench.run("export") == ["export"]
    assert "export: its record or one of its files is damaged" in caplog.text


def test_a_damaged_json_output_of_the_same_size_does_not_count(bench):
    bench.run()
    numbers = bench.root / "a" / "export" / "numbers.json"
    numbers.write_text("x" * numbers.stat().st_size)
    assert bench.run("export") == ["export"]


@pytest.mark.parametrize(
    ("key", "old", "new", "words"),
    [
        ("data.path", "0" * 64, "f" * 64, "content of data.path changed"),
        ("data.path", None, "f" * 64, "content of data.path changed"),
        ("model.files.a.safetensors", "9 bytes, 1", "9 bytes, 2", "file a.safetensors of model.path changed"),
        ("seed", 0, 1, "seed 0 -> 1"),
    ],
)
def test_a_difference_is_for_the_eye(key, old, new, words):
    assert _difference(key, old, new) == words


def test_a_setting_that_the_record_does_not_know_was_absent(bench):
    bench.run()
    record = bench.record("collect")
    del record["settings"]["quant"]["labels"]
    record["fingerprint"] = "0" * 64
    (bench.root / "a" / "collect" / "stage.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"\(quant.labels \(absent\) -> model\)"):
        bench.run()


def test_a_file_in_the_place_of_a_folder_is_left_alone(bench):
    run = bench.root / "a"
    run.mkdir(parents=True)
    (run / "export").write_text("mine")
    with pytest.raises(ConfigError, match=r"a.export is a file .* name=\.\.\."):
        bench.run()
    assert (run / "export").read_text() == "mine"
    assert bench.ledger == []


def test_outputs_have_the_mode_of_the_umask(tmp_path):
    with records.replacing(tmp_path / "export") as out:
        (out / "private").touch(mode=0o600)
    assert (tmp_path / "export" / "private").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_preparing_comes_before_the_first_stage_and_may_refuse(bench):
    def prepare(session, names):
        assert names == ALL
        raise ConfigError("the text is too short")

    with pytest.raises(ConfigError, match="too short"):
        bench.run(prepare=prepare)
    assert bench.ledger == []


def test_an_error_leaves_no_trace_and_keeps_what_was_there(bench):
    bench.run()
    before = bench.record("export")
    bench.fail = "export"
    with pytest.raises(MissingInput):
        bench.run("export", bits=4)
    assert bench.record("export") == before
    assert not list(bench.root.rglob("*.partial"))


def test_a_newer_stage_version_counts_as_a_change(bench):
    bench.run()
    table = tuple(s._replace(version=2) if s.name == "export" else s for s in bench.table)
    settings = copy.deepcopy(bench.base)
    settings.run_dir, settings.runs_root = str(bench.root / "a"), str(bench.root)
    settings.stage.run = ["collect", "outliers", "export", "report"]
    settings.data.windows, settings.eval.windows, settings.quant.key.bits = 8, 1, 3
    with pytest.raises(ConfigError, match="stage export .*another version"):
        pipeline.run(settings, table, None, progress=None)


def test_two_processes_do_not_write_one_run(bench):
    bench.run()
    with (
        records.exclusive(bench.root / "a"),
        pytest.raises(ConfigError, match="in use by another process"),
    ):
        bench.run()


KILLED = """
import sys, time
from pathlib import Path
from kvcalib import records
run = Path(sys.argv[1])
with records.exclusive(run), records.replacing(run / "collect") as out:
    (out / "numbers.json").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def heed_interrupts():
    """A job in the background ignores SIGINT, and hands that down to its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_killed_stage_never_looks_finished(bench, number, earlier):
    if earlier:
        bench.run()
    run_dir = bench.root / "a"
    command = [sys.executable, "-c", KILLED, str(run_dir)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=heed_interrupts
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    process.wait(20)
    process.stdout.close()
    assert (records.finished(run_dir, "collect") is not None) == earlier
    assert bench.run() == ([] if earlier else ALL)
    assert not list(bench.root.rglob("*.partial"))


def test_writing_json_is_atomic(tmp_path):
    path = tmp_path / "x.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert records.read_json(path) == {"a": 1}


def test_fingerprint_is_of_content_not_of_order():
    one, two = {"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}
    assert records.fingerprint(one) == records.fingerprint(two)
    assert records.fingerprint(one) != records.fingerprint({"a": 1, "b": [2, 1]})
