"""Every option of every group composes into valid settings; each kind of mistake is refused."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from kvcalib import cli
from kvcalib.errors import ConfigError

CONF = Path(cli.conf_dir())
GROUPS = ("model", "data", "quant", "stage", "eval", "bench", "peer", "experiment")
OPTIONS = [(g, p.stem) for g in GROUPS for p in sorted((CONF / g).glob("*.yaml"))]


def settings_of(*overrides):
    cli.register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return cli.to_settings(compose("config", overrides=list(overrides)), Path("/launch"))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    extra = {"textfile": ["data.path=text.txt"]}.get(option, ["stage=measure"] if group == "peer" else [])
    settings = settings_of(f"{group}={option}", *extra)
    if group in ("model", "data", "quant"):
        assert getattr(settings, group).name == option


@pytest.mark.parametrize("quant", sorted(p.stem for p in (CONF / "quant").glob("*.yaml")))
def test_every_format_fits_the_tiny_model(quant):
    settings = settings_of("model=tiny", f"quant={quant}")
    assert settings.name == f"tiny-{quant}"
    assert settings.run_dir == f"/launch/runs/tiny-{quant}"
    assert settings.data.length == settings.eval.length == settings.model.window == 256


METHODS = [
    (experiment, name, line)
    for experiment in ("frontier", "generalisation")
    for group in yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())["frontier"]["sets"].values()
    for name, line in group.items()
]


@pytest.mark.parametrize(("experiment", "name", "line"), METHODS)
def test_every_method_of_a_comparison_composes(experiment, name, line):
    line = line.replace("${data.name}", "wikitext2")
    line = line.replace("${typed:${data.path}}", "null").replace("${typed:${data.eval_path}}", "null")
    settings = settings_of(f"experiment={experiment}", "stage=measure", f"name={name}", *line.split())
    assert settings.quant.sink == (int(name[-1]) if name.startswith("sink") else 1)
    assert settings.quant.window == (int(name.split("-")[1].strip("w")) if "w128" in name or "window" in name else 0)


def test_a_peer_is_not_calibrated():
    with pytest.raises(ConfigError, match="peer=hqq4 is another library's cache: it is for stage=measure"):
        settings_of("peer=hqq4")


def test_the_required_options_exist():
    models = "smollm2 llama7b llama2_7b llama3_8b mistral7b qwen2_5_7b qwen3_8b gemma3_270m tiny"
    quants = "nuq4 nuq3 nuq2 kivi4 kivi2 int4_token int3_token int2_token fp8 identity"
    wanted = {("model", m) for m in models.split()} | {("quant", q) for q in quants.split()}
    wanted |= {("data", d) for d in ["pydoc", "wikitext2", "c4", "textfile"]}
    assert wanted <= set(OPTIONS)


def test_inherited_formats_differ_only_where_they_say():
    four, two = settings_of("quant=nuq4").quant, settings_of("quant=nuq2").quant
    assert (four.key.bits, two.key.bits, two.value.bits) == (4, 2, 2)
    two.key.bits = two.value.bits = 4
    assert (two.key, two.value, two.window, two.sink) == (four.key, four.value, 128, 4)
    kivi = settings_of("quant=kivi2").quant
    assert (kivi.key.bits, kivi.key.range.value, kivi.key.rope.value) == (2, "group", "post")
    assert (kivi.value.scope.value, kivi.value.group, kivi.sink) == ("channels", 32, 0)


def test_kvquant_takes_the_gradients_that_it_published():
    for name, labels, repeat in [("kvquant3", "text", 0), ("nuq3", "text", 0), ("mixed2", "model", 0.25)]:
        quant = settings_of(f"quant={name}").quant
        assert (quant.labels.value, quant.repeat) == (labels, repeat)


def test_experiment_beats_config_and_command_line_beats_both():
    assert settings_of("experiment=smoke").data.windows == 4
    settings = settings_of("experiment=smoke", "data.windows=5", "name=mine")
    assert (settings.data.windows, settings.name, settings.model.name) == (5, "mine", "tiny")


@pytest.mark.parametrize(
    "override",
    ["quant.key.bitz=3", "quant.key.bits=three", "quant.key.levels=nuk", "quant=nuq9", "sed=1"],
)
def test_mistakes_are_refused_while_composing(override):
    with pytest.raises(ConfigCompositionException):
        settings_of(override)


@pytest.mark.parametrize("override", ["+foo=1", "+quant.bitz=3", "++quant.key.bitz=3"])
def test_a_forced_unknown_key_is_refused_at_the_edge(override):
    with pytest.raises(ConfigError, match=r"foo|bitz"):
        settings_of(override)


@pytest.mark.slow
def test_the_wheel_holds_the_configuration(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling (extra `dev`) builds the wheel")
    root = Path(cli.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not in a source tree")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, root], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("kvcalib-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"kvcalib/conf/{p.relative_to(CONF)}" for p in CONF.rglob("*.yaml")}
    assert shipped <= names
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = "import kvcalib.cli as c; print(c.__file__); c.main()"
    shown = subprocess.run(
        [sys.executable, "-c", script, "--info", "searchpath"],
        cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert str(site / "kvcalib" / "conf") in shown
