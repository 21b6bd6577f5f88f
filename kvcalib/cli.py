"""The command line, and the only file that knows Hydra.

    find conf -> compose -> merge into the schema -> plain Settings -> pipeline.run -> print

The merge into a fresh schema is done although composing has used the same schema already: a forced
`+quant.bitz=3` passes composition, and only the merge refuses it. Nothing heavy is imported before
a stage runs, so that `--help`, `--cfg job` and shell completion stay quick. Hydra's own errors, several lines with
search paths and types, become one sentence; HYDRA_FULL_ERROR=1 shows the trace of any error.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from kvcalib import __version__
from kvcalib.checks import check
from kvcalib.errors import ConfigError, KvcalibError
from kvcalib.settings import Settings, absolute_paths, known_keys

log = logging.getLogger(__name__)

VALUED = ("-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")
"""Hydra's options that take the next word."""
OPTIONS = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-r", "--run", "-m", "--multirun"),
    *("-sc", "--shell-completion", "--experimental-rerun", "-i", "--info", *VALUED),
)
"""All of Hydra's options; its parser answers another one with a page of usage."""
OPTIONAL = {"frontier": "experiment=frontier", "peer": "peer=quanto4"}
"""Sections that are there only when a word brings them in."""
PATHS = {"model": "model.path={}", "data": "data=textfile data.path={}"}
"""Groups whose option is easily taken for a path, and what to type instead."""
TECHNICAL = ("full_key:", "reference_type=", "object_type=", "See http", "To append", "Config search", "provider=")
"""How the lines start that Hydra adds for those who know it."""


def conf_dir() -> str:
    """`kvcalib/conf` of a wheel if it is there, else `conf` beside the package (source tree)."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return str(packaged if (packaged / "config.yaml").is_file() else package.parent / "conf")


def register_schema() -> None:
    """Tell Hydra about the schema that `conf/config.yaml` names first, about `~`, and how a value is typed."""
    ConfigStore.instance().store(name="schema", node=Settings)
    OmegaConf.register_new_resolver("expanduser", os.path.expanduser, replace=True)
    OmegaConf.register_new_resolver("typed", typed, replace=True)


def typed(value: str | None) -> str:
    """How a value is written on the command line."""
    return "null" if value is None else "'" + value.replace("'", r"\'") + "'"


def to_settings(composed: DictConfig, launch: Path) -> Settings:
    """Plain settings with absolute paths; ConfigError names an unknown key or a bad value."""
    try:
        untyped = OmegaConf.to_container(composed, resolve=True)  # typed nodes would let keys pass
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), untyped))
    except ConfigKeyError as error:
        raise ConfigError(unknown_key(error.full_key)) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        where = f" (key {error.full_key})" if error.full_key else ""
        raise ConfigError(f"{reason}{where}; `kvcalib --cfg job` lists every key") from error
    check(settings)
    return absolute_paths(settings, launch)


def progress(items: Iterable, total: int | None = None, desc: str = "") -> Iterable:
    """A bar on stderr with rate and time left; rarely redrawn when stderr is a file."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(items, total=total, desc=desc, file=sys.stderr, mininterval=interval)


def options_first(arguments: list[str]) -> list[str]:
    """`model=tiny -m quant=a,b` as `-m model=tiny quant=a,b`: Hydra takes settings in one row only."""
    options, settings = [], []
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_setting = before not in VALUED and not word.startswith("-") and ("=" in word or word.startswith("~"))
        (settings if is_setting else options).append(word)
    return options + settings


def unknown_option(arguments: list[str]) -> str:
    """A sentence for the first word that looks like an option and is none; "" without one."""
    for word in arguments:
        name, _, value = word.partition("=")
        if not name.startswith("-") or name in OPTIONS or re.fullmatch("-(sc|[cpi]).+", name):
            continue
        close = [] if value else get_close_matches(name, OPTIONS, n=1)
        meant = close[0] if close else word.lstrip("-") if value else ""
        hint = f": did you mean {meant}?" if meant else ":"
        return f"there is no option {name}{hint} settings are written key=value, `kvcalib --help` lists them"
    return ""


def absent_section(arguments: list[str]) -> str:
    """A sentence for the first key inside a section that no word has brought in; "" without one."""
    for key in map(override_key, arguments):
        section, _, inner = key.partition(".")
        if inner and section in OPTIONAL:
            return f"{key} can be set together with {OPTIONAL[section]}: add that, or leave it out"
    return ""


def unknown_key(key: str) -> str:
    """A sentence with the known keys that look most like `key`."""
    if re.fullmatch(r"frontier\.sets\.[^.]+\.[^.]+", key):
        return f"there is no method {key} yet: write +{key}='...' to add it"
    known = list(known_keys())
    same_end = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    close = same_end[:2] or get_close_matches(key, known, n=1)
    meant = f": did you mean {' or '.join(close)}?" if close else ":"
    return f"there is no key {key}{meant} `kvcalib --cfg job` lists every key"


def explain(error: Exception) -> str:
    """An error of Hydra or OmegaConf, or of making the run folder, as one sentence."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).partition("/")
        if group in PATHS and ("/" in option or "." in option):
            return f"{group}={option} is no option but looks like a path: use {PATHS[group].format(option)}"
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={option} is no option: use {group}= one of {', '.join(error.options)}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; give another place with runs_root=... or run_dir=..."
    lines = _telling(error)
    if dotted := re.search(r"frontier\.sets\.[^.=]+\.([^=]*\.[^=]*)=", str(getattr(error, "override", lines[0]))):
        return f"{dotted[1]} has a dot: write a method's name without, as in +frontier.sets.mine.NAME='quant=...'"
    if isinstance(error, OverrideParseException):
        how = r"quote what has commas or spaces, and put \ before an apostrophe"
        return f"{error.override!r} cannot be read ({lines[-1]}): write key=value, {how}"
    if unknown := re.match(r"Could not override '([^']+)'", lines[0]):
        return unknown_key(unknown[1])
    if several := re.match(r"Ambiguous value for argument '(.+)'", lines[0]):
        return f"{several[1]} has several values: add -m to run one after the other, or write key=[a,b] for a list"
    if wrong := re.match(r"Error merging override (.+)", lines[0]):
        reason = lines[1][0].lower() + lines[1][1:]
        return f"{wrong[1]}: {'a value is needed' if 'is not Optional' in reason else reason}"
    return "; ".join(lines[:2])


def _telling(error: BaseException | None) -> list[str]:
    """The lines of an error and of its causes that tell the user something."""
    lines = []
    while error is not None:
        lines += [line.strip() for line in str(error).splitlines()]
        error = error.__cause__
    return [line for line in lines if line and not line.startswith(TECHNICAL)]


def run_cell(composed: DictConfig) -> tuple[str, dict]:
    """One run, alone or as a cell of a sweep; returns its name and metrics."""
    from kvcalib import pipeline, stages
    from kvcalib.records import read_json
    from kvcalib.report import frontier, speed
    from kvcalib.report.tables import overview
    from kvcalib.session import Session

    settings = to_settings(composed, Path(HydraConfig.get().runtime.cwd))
    log.info("kvcalib %s: run %s", __version__, settings.name)
    session, table = Session(settings), stages.table_of(settings)
    done = pipeline.run(settings, table, session, progress=progress, prepare=stages.prepare)
    metrics = (read_json(done["evaluate"].path / "metrics.json") if "evaluate" in done else None) or {}
    folders = {name: (str(result.path), result.describe()) for name, result in done.items()}
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        print(f"\n== {settings.name}")
    if "bench" in done:
        print(speed.text(read_json(done["bench"].path / "bench.json")), end="\n\n")
    if "measure" in done and not metrics:
        measured = read_json(done["measure"].path / "metrics.json") or {}
        print(frontier.line({"method": settings.name} | measured), end="\n\n")
    print(overview(metrics, folders, exact=_exact(settings)))
    return settings.name, metrics


def run_frontier(composed: DictConfig) -> tuple[str, dict]:
    """All the methods of a comparison; returns its name and no metrics."""
    from kvcalib import frontier

    launch, task = Path(HydraConfig.get().runtime.cwd), list(HydraConfig.get().overrides.task)
    settings = to_settings(composed, launch)
    frontier.check_typed({override_key(word) for word in task})

    def member_settings(words: list[str]) -> Settings:
        own = {override_key(word) for word in words}
        kept = [word for word in task if override_key(word) not in own]
        try:
            return to_settings(hydra.compose("config", overrides=kept + words), launch)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error)) from error

    log.info("kvcalib %s: frontier %s", __version__, settings.name)
    print(frontier.run(settings, member_settings, progress=progress))
    return settings.name, {}


def override_key(word: str) -> str:
    """`+quant.key.bits=3` -> `quant.key.bits`"""
    return word.lstrip("+~").split("=")[0].split("@")[0]


def _exact(settings: Settings) -> str:
    """Which tokens are not quantised, and the type that they are kept in."""
    kept = [("last", settings.quant.window), ("first", settings.quant.sink)]
    counts = " and the ".join(f"{end} {count}" for end, count in kept if count)
    dtype = settings.model.dtype.value
    return f"the {counts} tokens are exact" + (f" in {dtype}" if dtype != "auto" else "") if counts else ""


class App:
    """What `main` hands to Hydra, and what became of it: failures, and (name, metrics) of finished runs."""

    def __init__(self, full_errors: bool):
        self.full_errors = full_errors
        self.started = False
        self.failures: list[KvcalibError] = []
        self.finished: list[tuple[str, dict]] = []

    def __call__(self, composed: DictConfig) -> float | None:
        """Turn a user's mistake into one sentence; the other cells of a sweep still run."""
        self.started = True
        try:
            name, metrics = (run_frontier if composed.get("frontier") else run_cell)(composed)
        except KvcalibError as error:
            if self.full_errors:
                raise
            print(f"kvcalib: {error}", file=sys.stderr)
            self.failures.append(error)
            return None
        self.finished.append((name, metrics))
        return metrics.get("ppl_cache")  # what an optimising sweeper makes small


def main() -> None:
    """Entry of `python -m kvcalib` and of the console script."""
    register_schema()
    sys.stdout.reconfigure(errors="replace")  # a continuation may hold what a terminal cannot show
    app = App(os.environ.get("HYDRA_FULL_ERROR", "0") != "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors instead of printing them
    sys.argv[1:] = options_first(sys.argv[1:])
    if "--version" in sys.argv[1:]:
        print(f"kvcalib {__version__}")  # Hydra's own option tells its own
        return
    if wrong := unknown_option(sys.argv[1:]):
        print(f"kvcalib: {wrong}", file=sys.stderr)
        sys.exit(1)

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def entry(composed: DictConfig) -> float | None:
        return app(composed)

    try:
        entry()
    except KeyboardInterrupt:
        print("kvcalib: interrupted; finished stages are kept", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `kvcalib --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except AssertionError:  # how OmegaConf refuses a key inside of null
        if app.full_errors or app.started or not (wrong := absent_section(sys.argv[1:])):
            raise
        print(f"kvcalib: {wrong}", file=sys.stderr)
        sys.exit(1)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        if app.full_errors or (app.started and not isinstance(error, HydraException | OmegaConfBaseException)):
            raise  # an OSError inside a stage is not about the run folder
        print(f"kvcalib: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    if len(app.finished) > 1:
        from kvcalib.report.tables import comparison

        print(f"\n== {len(app.finished)} runs\n{comparison(app.finished)}")
    if app.failures:
        sys.exit(1)
