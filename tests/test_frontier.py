"""experiment=frontier as a user types it, on the tiny model, and the pieces it is made of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcalib
from kvcalib import cli, frontier, load_artifact
from kvcalib.errors import ConfigError
from kvcalib.quant.codebook import middles
from kvcalib.settings import FrontierSettings

SOURCE = str(Path(kvcalib.__file__).resolve().parent.parent)
SETS = {
    "main": {"int4": "quant=int4_token", "nuq2": "quant=nuq2"},
    "more": {"nuq3": "quant=nuq3", "nuq2": "quant=nuq2"},
}


def settings(which="main", methods=None):
    return FrontierSettings(which, methods, SETS, {}, {})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("main",), ["int4", "nuq2"]),
        (("more",), ["nuq3", "nuq2"]),
        (("all",), ["int4", "nuq2", "nuq3"]),
        (("main", ["nuq*"]), ["nuq2", "nuq3"]),
        (("main", ["nuq3", "int4"]), ["int4", "nuq3"]),
    ],
)
def test_choosing(arguments, names):
    assert list(frontier.chosen(settings(*arguments))) == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mine",), "frontier.set=mine must be one of main, more, all"),
        (("main", ["nuq9"]), "'nuq9' is no method.*int4, nuq2"),
    ],
)
def test_choosing_what_is_not_there(arguments, words):
    with pytest.raises(ConfigError, match=words):
        frontier.chosen(settings(*arguments))


@pytest.mark.parametrize("key", ["quant", "peer", "stage"])
def test_what_methods_differ_in_is_not_for_all_of_them(key):
    with pytest.raises(ConfigError, match=f"{key}=... is what the methods of a frontier differ in: .*frontier.methods"):
        frontier.check_typed({key, "model"})
    frontier.check_typed({"model", "quant.sink", "stage.force"})


def test_quotes_of_a_word_are_kept():
    assert frontier.WORD.findall("quant=nuq3 data.path='a b/c' x=\"d e\"") == [
        "quant=nuq3",
        "data.path='a b/c'",
        'x="d e"',
    ]
    path = cli.typed("/it's here/a b")
    assert frontier.WORD.findall(f"data.path={path} seed=1") == [f"data.path={path}", "seed=1"]


def test_time_left_counts_what_is_due():
    clock = frontier.Clock(3)
    assert clock.remaining() == ""
    with clock.timing(False):
        pass
    assert clock.remaining() == "", "a finished method says nothing about the others"
    clock.spent.append(300)
    assert clock.remaining() == ", about 10 min left"


@pytest.fixture
def command(tmp_path):
    def call(*words, fails=False):
        small = ["model=tiny", "data.windows=2", "data.sample=128", "eval.windows=1", "eval.needle_tasks=[passkey]"]
        needles = ["eval.needle_lengths=[300]", "eval.needle_depths=[0.5]"]
        done = subprocess.run(
            [sys.executable, "-m", "kvcalib", "experiment=frontier", *small, *needles, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SOURCE, "HYDRA_FULL_ERROR": "0"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode != 0) is fails, done.stderr
        return done

    return call


def test_one_command_measures_reports_and_resumes(command, tmp_path):
    mine = "+frontier.sets.mine.k3v2='quant=nuq3 quant.value.bits=2'"
    first = command("frontier.methods=[int4,nuq2]")
    run = tmp_path / "runs" / "tiny-frontier"
    assert (run / "frontier.html").is_file()
    rows = {row["method"]: row for row in json.loads((run / "frontier.json").read_text())["rows"]}
    assert rows["int4"]["bits_key"] == pytest.approx(4.5, abs=0.1)
    assert rows["nuq2"]["needle_fp"] == 0
    assert "[2/2] nuq2" in first.stderr
    assert first.stderr.count("reference: running") == 1, "the unchanged model is measured once"
    assert first.stderr.count("collect: running") == 1

    (run / "nuq2" / "measure" / "stage.json").unlink()  # as if it had been killed there
    second = command(mine, "frontier.methods=[int4,nuq2,k3v2]")
    again = [line.split(":")[0] for line in second.stderr.splitlines() if ": running" in line]
    assert again == ["measure", "outliers", "codebooks", "export", "measure"], "nuq2 again, and all of k3v2"
    assert second.stderr.count("measure: done") == 2
    names = [line.split()[0] for line in second.stdout.splitlines() if line.startswith(("int4", "nuq2", "k3v2"))]
    assert names[:3] == ["int4", "nuq2", "k3v2"]


def test_what_has_changed_is_redone_when_asked(command, tmp_path):
    method = "+frontier.sets.mine.a='quant=int4_token quant.key.bits={}'"
    command(method.format(4), "frontier.methods=[a,int4]")
    done = command(method.format(3), "frontier.methods=[a,int4]", fails=True)
    assert "quant.key.bits 4 -> 3" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "name=... for another comparison, or stage.force=true to redo what has changed"
    )
    done = command(method.format(3), "frontier.methods=[a,int4]", "stage.force=true")
    again = [line.split(":")[0] for line in done.stderr.splitlines() if ": " in line and "running" in line]
    assert again == ["outliers", "codebooks", "export", "measure"], "a, and nothing of int4"


def test_methods_share_what_they_measure_wherever_they_are(command, tmp_path):
    """A folder outside of runs_root, and one that the shell would have to quote."""
    place = "run_dir=" + cli.typed(str(tmp_path / "it's elsewhere" / "x"))
    done = command(place, "frontier.methods=[int4,nuq2]")
    assert done.stderr.count("reference: running") == done.stderr.count("collect: running") == 1
    assert (tmp_path / "it's elsewhere" / "x" / "nuq2" / "measure" / "metrics.json").is_file()


def test_q_norm_is_a_method_beside_the_same_without(command, tmp_path):
    done = command("frontier.methods=[kvquant2-paper,kvquant2-qnorm]")
    assert "KVQuant with and without Q-Norm" in done.stdout
    run = tmp_path / "runs" / "tiny-frontier"
    rows = {row["method"]: row for row in json.loads((run / "frontier.json").read_text())["rows"]}
    assert rows["kvquant2-qnorm"]["bits"] == rows["kvquant2-paper"]["bits"]
    assert rows["kvquant2-qnorm"]["kl"] != rows["kvquant2-paper"]["kl"]
    files = [load_artifact(run / method / "export") for method in ("kvquant2-paper", "kvquant2-qnorm")]
    for name in ("key", "value"):
        plain, moved = (getattr(file.layers[1], name) for file in files)
        assert plain.edges is None
        assert torch.equal(moved.edges, middles(plain.levels))
        assert (moved.levels.max() - moved.levels.min()) > (plain.levels.max() - plain.levels.min())


def test_a_mistake_is_a_sentence_before_anything_runs(command, tmp_path):
    done = command("quant=nuq3", fails=True)
    assert done.stderr.splitlines()[-1].startswith("kvcalib: quant=... is what the methods of a frontier differ in")
    bad = "+frontier.sets.mine.bad='quant=nuq3 quant.key.bits=12'"
    done = command(bad, "frontier.methods=[int4,bad]", fails=True)
    assert done.stderr.splitlines()[-1].startswith("kvcalib: method bad: quant.key.bits=12 must be 1 to 8")
    assert not (tmp_path / "runs" / "tiny-frontier" / "int4").exists()


def test_texts_that_are_not_there_are_told_before_anything_runs(command, tmp_path):
    lost = "+frontier.sets.mine.lost='quant=nuq2 eval.text=textfile eval.text_path=nothing.txt'"
    done = command(lost, "frontier.methods=[int4,lost]", fails=True)
    assert done.stderr.splitlines()[-1].startswith("kvcalib: method lost: ")
    assert done.stderr.splitlines()[-1].endswith("nothing.txt: no such file (eval.text_path)")
    for texts, key in (("data=wikitext2 data.path=lost", "data.path"), ("data.eval_path=lost", "data.eval_path")):
        done = command(*texts.split(), "frontier.methods=[int4,nuq2]", fails=True)
        assert done.stderr.splitlines()[-1].endswith(f"lost: no such file ({key})")
    assert not (tmp_path / "runs" / "tiny-frontier" / "int4").exists()


def test_what_cannot_be_measured_is_a_row_of_its_own(command, tmp_path):
    """That a text is blank is found out when it is read."""
    (tmp_path / "blank.txt").write_text("\n")
    bad = f"+frontier.sets.mine.bad='quant=nuq2 eval.text=textfile eval.text_path={tmp_path}/blank.txt'"
    done = command(bad, "frontier.methods=[bad,int4]")
    assert "bad: the evaluation text of" in done.stdout
    assert "is blank" in done.stdout
    assert "int4" in done.stdout


def test_texts_of_all_methods_are_named():
    assert frontier.said_of([("pydoc", 8, 1024)] * 3) == "pydoc, 8 x 1024 tokens"
    several = [("wikitext2", 8, 1024), ("pycode", 2, 512), ("wikitext2", 32, 1024)]
    assert frontier.said_of(several) == "wikitext2 or pycode, 2 to 32 x 512 to 1024 tokens"
