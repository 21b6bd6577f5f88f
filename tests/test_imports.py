"""Imports only go down, heavy libraries are loaded late: the table of packages, checked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvcalib

ROOT = Path(kvcalib.__file__).resolve().parent
ALLOWED = {
    "quant": {"errors"},
    "fit": {"quant", "errors"},
    "kernels": {"quant", "errors"},
    "artifact": {"quant", "hub", "errors"},
    "models": {"hub", "errors"},
    "data": {"hub", "errors"},
    "calib": {"fit", "quant", "artifact", "models", "data", "errors"},
    "runtime": {"kernels", "quant", "artifact", "models", "errors"},
    "eval": {"runtime", "kernels", "quant", "artifact", "models", "data", "errors"},
    "report": {"errors"},
    "hub": {"errors"},
    "errors": set(),
    "settings": {"errors"},
    "checks": {"settings", "errors"},
    "records": {"errors"},
    "planner": {"records", "settings", "errors"},
    "pipeline": {"planner", "records", "settings", "errors"},
}
"""What each package or module may import from kvcalib; those in TOP may import all of it."""
TOP = {"__init__", "__main__", "benchmark", "cli", "frontier", "reads", "session", "stages"}
PLACES = {
    "torch": {"quant", "fit", "kernels", "artifact", "models", "data", "calib", "runtime", "eval"},
    "transformers": {"models", "runtime", "calib", "data", "eval"},
    "triton": {"kernels"},
    "sklearn": {"fit"},
    "datasets": {"data"},
    "matplotlib": {"report"},
    "hydra": {"cli"},
    "omegaconf": {"cli"},
}
"""Third-party libraries and where they may be imported (at the top or inside a function)."""
FILES = sorted(ROOT.rglob("*.py"))


def owner(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imported(tree: ast.AST, *, top_level: bool = False) -> set[str]:
    """Dotted names of every import; relative ones do not exist in this code."""
    names = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    """First component below `kvcalib` (a package, or a module at the top)."""
    below = {name.split(".")[1] for name in names if name.startswith("kvcalib.")}
    return {name for name in below if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    names = imported(ast.parse(path.read_text(encoding="utf-8")))
    package = owner(path)
    if package not in TOP:
        above = ours(names) - ALLOWED[package] - {package}
        assert not above, f"{package} must not import {sorted(above)}"
    for library, places in PLACES.items():
        if any(name.split(".")[0] == library for name in names) and package not in TOP:
            assert package in places, f"{library} may be imported in {sorted(places)} only"


@pytest.mark.parametrize("module", sorted({*TOP, "pipeline", "planner", "records"} - {"__init__", "__main__"}))
def test_orchestration_imports_packages_late(module):
    tree = ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8"))
    packages = {name for name in ours(imported(tree, top_level=True)) if (ROOT / name).is_dir()}
    assert packages == set()


def test_hydra_is_known_to_one_file():
    knowing = {
        path.name
        for path in FILES
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[0] in ("hydra", "omegaconf")
    }
    assert knowing == {"cli.py"}


def loaded_after(code: str) -> set[str]:
    """Modules loaded by a fresh interpreter that ran `code`, as dotted names."""
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.strip().splitlines()[-1].split())


def test_showing_the_configuration_loads_nothing_heavy():
    code = "sys.argv = ['kvcalib', '--cfg', 'job']\nfrom kvcalib.cli import main\nmain()"
    heavy = {"torch", "transformers", "datasets", "sklearn", "matplotlib", "numpy"}
    assert not loaded_after(code) & heavy


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_after("import kvcalib") & {"torch", "transformers", "hydra", "numpy"}


def test_the_runtime_needs_no_calibration_library():
    loaded = loaded_after("from kvcalib import CalibratedCache, load_artifact")
    assert "kvcalib.runtime.cache" in loaded
    assert not loaded & {"hydra", "omegaconf", "datasets", "sklearn", "matplotlib"}
    assert not loaded & {"kvcalib.fit", "kvcalib.calib", "kvcalib.data", "kvcalib.settings"}


def test_public_names_resolve():
    assert {"CalibratedCache", "load_artifact"} <= set(dir(kvcalib))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvcalib.nothing  # noqa: B018
