"""What pip installs: every requirement is pinned, and whatever the code imports is required."""

import ast
import re
import sys
from pathlib import Path

import pytest

import kvcalib

ROOT = Path(kvcalib.__file__).resolve().parent.parent
INDIRECT = {"gguf", "accelerate", "sentencepiece"}
"""Imported by transformers, to read GGUF files and SentencePiece tokenizers."""
PACKAGES = {"scikit-learn": "sklearn", "hydra-core": "hydra"}
BROUGHT = {"huggingface_hub", "threadpoolctl"}
"""Come with transformers and scikit-learn."""
SOFT = {"triton", "fcntl", "resource"}
"""Imported where they are there."""

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not in a source tree")


def required(section: str) -> set[str]:
    """Names of the requirements in a list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(rf"^{section} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL).group(1)
    return {re.match(r"[\w-]+", item).group().lower() for item in re.findall(r'"([^"]+)"', block)}


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}


@pytest.mark.parametrize("section", ["dependencies", "dev", "peers", "requires"])
def test_every_requirement_is_pinned(section):
    assert required(section) - pinned() == set()


def test_what_is_imported_is_required():
    names = set()
    for path in (ROOT / "kvcalib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
    third_party = names - set(sys.stdlib_module_names) - SOFT - {"kvcalib"}
    installed = {PACKAGES.get(name, name.replace("-", "_")) for name in required("dependencies")}
    assert third_party <= installed | BROUGHT
    assert installed - third_party <= INDIRECT
