"""The command as a user types it, in a process of its own, with fakes where work is due."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvcalib
from kvcalib import cli

SOURCE = str(Path(kvcalib.__file__).resolve().parent.parent)
FAKES = """
import json
from pathlib import Path
from kvcalib import stages
from kvcalib.errors import MissingInput

LEDGER = Path(__file__).with_name("ledger")
METRICS = {
    "ppl_fp": 10.0, "ppl_cache": 10.5, "bits_per_element_key": 3.25,
    "sample": {"prompt": "Once", "fp": "upon a time", "cache": "upon a time,"},
}

def fake(name):
    def run(session, task):
        with LEDGER.open("a") as ledger:
            ledger.write(f"{session.settings.name} {name}\\n")
        if session.settings.seed == 13 and name == "export":
            raise MissingInput("weights of tiny are not there: give model.path=/folder")
        for item in task.progress(range(2), 2, name):
            pass
        (task.out / "metrics.json").write_text(json.dumps(METRICS))
        return {}
    return run

stages.TABLE = tuple(stage._replace(run=fake(stage.name)) for stage in stages.TABLE)
stages.prepare = lambda session, names: None
from kvcalib.cli import main
main()
"""


@pytest.fixture
def kvcalib_command(tmp_path):
    """Run `kvcalib ARGS` with fake stages in a folder of its own: (completed process)."""
    script = tmp_path / "fakes.py"
    script.write_text(FAKES)

    def call(*args, cwd=tmp_path, fake=True, **env):
        entry = [str(script)] if fake else ["-m", "kvcalib"]
        return subprocess.run(
            [sys.executable, *entry, *args],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": SOURCE, "HYDRA_FULL_ERROR": "0", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    call.ledger = lambda: (tmp_path / "ledger").read_text().splitlines()
    return call


def test_help_shows_everyday_commands_and_options(kvcalib_command):
    done = kvcalib_command("--help", fake=False)
    assert done.returncode == 0
    assert "kvcalib model=llama3_8b quant=nuq4" in done.stdout
    assert "quant: fp8, identity, int2_token" in done.stdout
    assert "seed: 0" in done.stdout


def test_another_eval_goes_with_the_comparison(kvcalib_command):
    """A group that is named on the command line wins over what the experiment chooses."""
    shown = [
        kvcalib_command("experiment=frontier", *words, "--cfg", "job", "-p", "eval", fake=False).stdout
        for words in ([], ["eval=long"])
    ]
    assert "- 512\n" in shown[0]
    assert "- tracking" not in shown[0]
    assert "- 8176\n" in shown[1]
    assert "- tracking" in shown[1]


def test_the_version_is_ours(kvcalib_command):
    done = kvcalib_command("--version", fake=False)
    assert done.stdout == f"kvcalib {kvcalib.__version__}\n"


def test_cfg_job_shows_one_group(kvcalib_command):
    done = kvcalib_command("quant=kivi2", "--cfg", "job", "-p", "quant.value", fake=False)
    assert done.returncode == 0
    assert "scope: channels" in done.stdout


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("quant=nuq9", ["quant=nuq9 is no option", "nuq3, nuq4"]),
        ("data=notes.txt", ["use data=textfile data.path=notes.txt"]),
        ("--flag", ["there is no option --flag", "key=value"]),
        ("--quant=nuq2", ["there is no option --quant: did you mean quant=nuq2?"]),
        ("--multi-run", ["did you mean --multirun?"]),
        ("quant.key.bitz=3", ["there is no key quant.key.bitz: did you mean quant.key.bits?"]),
        ("bits=3", ["there is no key bits: did you mean quant.key.bits or quant.value.bits?"]),
        ("quants=nuq2", ["did you mean quant?"]),
        ("quant.key.levels=nuk", ["quant.key.levels=nuk: invalid value 'nuk', expected one of [uniform", "fp8"]),
        ("quant.key.bits=three", ["quant.key.bits=three: value 'three'", "Integer"]),
        ("name=null", ["name=null: a value is needed"]),
        ("+quant.bitz=3", ["there is no key quant.bitz", "--cfg job"]),
        ("quant.key.bits=12", ["quant.key.bits=12 must be 1 to 8"]),
        ("frontier.methods=[mixed2]", ["frontier.methods can be set together with experiment=frontier"]),
        ("+frontier.sets.mine.x='quant=nuq2'", ["frontier.sets.mine.x can be", "experiment=frontier"]),
        ("peer.bits=2", ["peer.bits can be set together with peer=quanto4"]),
        ("device=gpu", ["gpu", "cuda"]),
        ("tiny", ["'tiny' cannot be read", "write key=value"]),
        ("data.path=[1", ["cannot be read"]),
        ("quant=nuq2,nuq3", ["quant=nuq2,nuq3 has several values: add -m"]),
        ("name=${nothing}", ["'nothing' not found"]),
        ("runs_root=fakes.py", ["fakes.py", "give another place with runs_root=..."]),
        ("run_dir=fakes.py", ["fakes.py", "run_dir=..."]),
        ("run_dir=/dev/null/run", ["/dev/null/run", "run_dir=..."]),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_1(kvcalib_command, argument, words):
    done = kvcalib_command(argument, "model=tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("kvcalib: ")
    assert done.stderr.count("\n") == 1
    assert "use +" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("name", ["mixed4.55", "k3.5v2"])
def test_a_dot_in_the_name_of_a_method_is_a_sentence(kvcalib_command, name):
    done = kvcalib_command("experiment=frontier", f"+frontier.sets.mine.{name}='quant=mixed4'", fake=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvcalib: {name} has a dot: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["/some/folder", "org/name-7b", "weights.gguf"])
def test_a_path_is_no_model_but_its_path(kvcalib_command, path):
    done = kvcalib_command(f"model={path}")
    assert done.returncode == 1
    assert done.stderr == f"kvcalib: model={path} is no option but looks like a path: use model.path={path}\n"


def test_judging_another_format_says_how_to_make_it(kvcalib_command):
    kvcalib_command("model=tiny")
    kvcalib_command("model=tiny", "stage=codebooks", "quant.key.bits=2")
    done = kvcalib_command("model=tiny", "stage=evaluate", "quant.key.bits=2")
    assert done.returncode == 1
    assert "export of" in done.stderr
    assert "evaluate judges what is there: type stage=export first" in done.stderr
    assert kvcalib_command("model=tiny", "stage=export", "quant.key.bits=2").returncode == 0
    assert kvcalib_command("model=tiny", "stage=evaluate", "quant.key.bits=2").returncode == 0


def test_full_error_shows_the_trace_of_a_mistake(kvcalib_command):
    done = kvcalib_command("quant=nuq9", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "MissingConfigException" in done.stderr


@pytest.mark.parametrize(
    ("typed", "handed_on"),
    [
        ("model=tiny -m quant=a,b", "-m model=tiny quant=a,b"),
        ("quant=kivi2 --cfg job -p quant.value", "--cfg job -p quant.value quant=kivi2"),
        ("-cd my=conf ~quant a=1 --multirun", "-cd my=conf --multirun ~quant a=1"),
        ("--help", "--help"),
    ],
)
def test_options_may_stand_anywhere(typed, handed_on):
    assert cli.options_first(typed.split()) == handed_on.split()


def test_a_full_run_prints_numbers_sample_paths_and_times(kvcalib_command, tmp_path):
    done = kvcalib_command("model=tiny")
    assert done.returncode == 0, done.stderr
    assert "perplexity, quantised cache" in done.stdout
    assert "10.500" in done.stdout
    assert "upon a time," in done.stdout
    run = tmp_path / "runs" / "tiny-mixed3"
    assert str(run / "export" / "kvcalib.safetensors") in done.stdout
    assert str(run / "report" / "report.html") in done.stdout
    assert re.search(r"stages   collect \d+\.\d s, fisher", done.stdout)
    assert "collect: running" in done.stderr
    assert "collect: running" not in done.stdout
    assert json.loads((run / "collect" / "stage.json").read_text())["stage"] == "collect"
    assert (run / ".hydra" / "overrides.yaml").is_file()
    assert (run / "kvcalib.log").read_text().count("collect: done") == 1


def test_a_second_run_resumes(kvcalib_command):
    kvcalib_command("model=tiny", "stage=fisher")
    kvcalib_command("model=tiny")
    done = kvcalib_command("model=tiny")
    assert "collect up to date" in done.stdout
    names = [line.split()[1] for line in kvcalib_command.ledger()]
    assert names == ["fisher", "collect", "outliers", "codebooks", "export", "evaluate", "report"]


def test_a_sweep_measures_the_model_once(kvcalib_command, tmp_path):
    done = kvcalib_command("-m", "model=tiny", "quant=nuq2,nuq3")
    assert done.returncode == 0, done.stderr
    ledger = kvcalib_command.ledger()
    once = [line for line in ledger if line.endswith(("collect", "fisher"))]
    assert once == ["tiny-nuq2 collect", "tiny-nuq2 fisher"]
    assert [line.split()[0] for line in ledger if line.endswith("export")] == [
        "tiny-nuq2",
        "tiny-nuq3",
    ]
    record = json.loads((tmp_path / "runs/tiny-nuq3/fisher/stage.json").read_text())
    assert record["reused_from"] == os.path.join("..", "tiny-nuq2", "fisher")


def test_a_sweep_names_its_runs_and_compares_them(kvcalib_command):
    done = kvcalib_command("model=tiny", "-m", "quant=nuq2,nuq3")
    assert done.returncode == 0, done.stderr
    first, second, last = (done.stdout.index(f"\n== {name}\n") for name in ("tiny-nuq2", "tiny-nuq3", "2 runs"))
    assert first < second < last
    table = done.stdout[last:].split("\n")[2:]
    assert table[0].split() == ["run", "ppl_fp", "ppl_cache"]
    assert table[2].split() == ["tiny-nuq3", "10.000", "10.500"]


def test_a_failing_cell_does_not_stop_the_sweep(kvcalib_command):
    done = kvcalib_command("-m", "model=tiny", "seed=13,14", "name='tiny-${seed}'")
    assert done.returncode == 1
    assert "kvcalib: weights of tiny are not there: give model.path=/folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert "tiny-14 report" in kvcalib_command.ledger()


def test_an_unknown_option_late_in_a_sweep_is_a_sentence(kvcalib_command):
    done = kvcalib_command("-m", "model=tiny", "quant=nuq2,nuq9")
    assert done.returncode == 1
    assert "kvcalib: quant=nuq9 is no option" in done.stderr
    assert "Traceback" not in done.stderr


def test_full_error_shows_the_traceback(kvcalib_command):
    done = kvcalib_command("model=tiny", "seed=13", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "MissingInput" in done.stderr


def test_a_changed_setting_in_the_same_run_is_refused(kvcalib_command):
    kvcalib_command("model=tiny")
    done = kvcalib_command("model=tiny", "quant.key.bits=4")
    assert done.returncode == 1
    assert "quant.key.bits 6 -> 4" in done.stderr
    assert "name=..." in done.stderr
    done = kvcalib_command("model=tiny", "quant.key.bits=4", "name=four")
    assert done.returncode == 0
    assert "collect reused" in done.stdout


def test_an_interrupt_is_a_sentence(kvcalib_command, tmp_path):
    waiting = FAKES.replace("return {}", "print('at work', flush=True); __import__('time').sleep(60)")
    (tmp_path / "waiting.py").write_text(waiting)
    process = subprocess.Popen(
        [sys.executable, "waiting.py", "model=tiny"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in the background
    )
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.endswith("kvcalib: interrupted; finished stages are kept\n")
    assert not list((tmp_path / "runs" / "tiny-mixed3").glob("*.partial"))


def test_relative_paths_belong_to_the_launch_directory(kvcalib_command, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("some text")
    arguments = ["model=tiny", "data=textfile", "data.path=notes.txt", "stage=collect"]
    done = kvcalib_command(*arguments, "runs_root=out", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    record = elsewhere / "out" / "tiny-mixed3" / "collect" / "stage.json"
    content = json.loads(record.read_text())["settings"]["data"]["path"]
    assert content
    assert "notes" not in content


def test_the_same_text_in_another_place_is_the_same_text(kvcalib_command, tmp_path):
    arguments = ["model=tiny", "data=textfile", "stage=collect"]
    for name, text in (("a.txt", "text"), ("b.txt", "text"), ("c.txt", "other")):
        (tmp_path / name).write_text(text)
    kvcalib_command(*arguments, "data.path=a.txt")
    kvcalib_command(*arguments, "data.path=b.txt")
    assert len(kvcalib_command.ledger()) == 1
    done = kvcalib_command(*arguments, "data.path=c.txt")
    assert "data.path" in done.stderr
    assert len(kvcalib_command.ledger()) == 2


def test_a_tilde_is_the_home_directory(kvcalib_command, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done = kvcalib_command("model=tiny", "stage=collect", "runs_root='~/kept'", HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert (home / "kept" / "tiny-mixed3" / "collect" / "stage.json").is_file()
    assert (home / "kept" / "tiny-mixed3" / "kvcalib.log").is_file()
    assert not (tmp_path / "~").exists()


def test_a_reader_that_stops_reading_is_no_error():
    command = [sys.executable, "-m", "kvcalib", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
