"""The command line, and the only file that knows Hydra.

    find conf -> compose -> merge into the schema -> plain Settings -> pipeline.run -> print

The merge into a fresh schema is done although composing has used the same schema already: a forced
`+quant.bitz=3` passes composition, and only the merge refuses it. Nothing heavy is imported before
a stage runs, so that `--help`, `--cfg job` and shell completion stay quick.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvcalib import __version__
from kvcalib.errors import ConfigError, KvcalibError
from kvcalib.settings import Settings, absolute_paths, check

log = logging.getLogger(__name__)


def conf_dir() -> str:
    """`kvcalib/conf` of a wheel if it is there, else `conf` beside the package (source tree)."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return str(packaged if (packaged / "config.yaml").is_file() else package.parent / "conf")


def register_schema() -> None:
    """Tell Hydra about the schema that `conf/config.yaml` names first, and about `~`."""
    ConfigStore.instance().store(name="schema", node=Settings)
    OmegaConf.register_new_resolver("expanduser", os.path.expanduser, replace=True)


def to_settings(composed: DictConfig, launch: Path) -> Settings:
    """Plain settings with absolute paths; ConfigError names an unknown key or a bad value."""
    try:
        untyped = OmegaConf.to_container(composed, resolve=True)  # typed nodes would let keys pass
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), untyped))
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


def run_cell(composed: DictConfig) -> float | None:
    """One run, alone or as a cell of a sweep; returns the perplexity for optimising sweepers."""
    from kvcalib import pipeline, stages
    from kvcalib.records import read_json
    from kvcalib.report.tables import overview
    from kvcalib.session import Session

    settings = to_settings(composed, Path(HydraConfig.get().runtime.cwd))
    log.info("kvcalib %s: run %s", __version__, settings.name)
    session = Session(settings)
    done = pipeline.run(settings, stages.TABLE, session, progress=progress, prepare=stages.prepare)
    metrics = read_json(done["evaluate"].path / "metrics.json") if "evaluate" in done else {}
    print(overview(metrics, {name: (str(r.path), r.describe()) for name, r in done.items()}))
    return metrics.get("ppl_cache")


def _guarded(composed: DictConfig, failures: list[KvcalibError]) -> float | None:
    """Turn a user's mistake into one sentence; the other cells of a sweep still run."""
    try:
        return run_cell(composed)
    except KvcalibError as error:
        if os.environ.get("HYDRA_FULL_ERROR", "0") != "0":
            raise
        print(f"kvcalib: {error}", file=sys.stderr)
        failures.append(error)
        return None


def main() -> None:
    """Entry of `python -m kvcalib` and of the console script."""
    register_schema()
    sys.stdout.reconfigure(errors="replace")  # a continuation may hold what a terminal cannot show
    failures: list[KvcalibError] = []

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(composed: DictConfig) -> float | None:
        return _guarded(composed, failures)

    try:
        app()
    except KeyboardInterrupt:
        print("kvcalib: interrupted; finished stages are kept", file=sys.stderr)
        sys.exit(130)
    if failures:
        sys.exit(1)
