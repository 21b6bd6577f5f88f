"""The compiled library: built on first use with the C++ compiler of the machine, kept in the user's cache.

    $XDG_CACHE_HOME or ~/.cache / kvcalib / kernels / <key> / kernels.so

where the key covers the sources, the compiler and its version, the flags and torch. The library has a plain C
interface and includes no header of torch or Python, so it builds in a minute and knows no ABI. Its threads are torch's
own: it is linked to the very OpenMP library that torch brings, because a second pool of threads fights the first.

One process builds, under a lock; others wait for it. The folder is renamed into place when it is complete.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
_COMMON = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-w"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi", "-mprefer-vector-width=512"]
_X86 = {
    "avx2": ["-DKV_ISA=2", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DKV_ISA=512", "-mfma", "-mf16c", *_AVX512],
}


class CannotBuild(Exception):
    """No library can be had; the message says why."""


def library() -> ctypes.CDLL:
    """Raises CannotBuild."""
    found = _library_or_reason()
    if type(found) is str:
        raise CannotBuild(found)
    return found


@cache
def _library_or_reason() -> ctypes.CDLL | str:
    """A build that fails is not tried again in the same process."""
    try:
        return _library(_compiler())
    except CannotBuild as error:
        return str(error)


def _library(compiler: str) -> ctypes.CDLL:
    try:
        target = cache_home() / "kernels" / _key(compiler) / "kernels.so"
    except RuntimeError as error:  # a container without HOME
        raise CannotBuild(f"no place to keep the library ({error}): set XDG_CACHE_HOME or HOME") from error
    try:
        with _lock(target.parent.parent):
            if not _is_intact(target):
                shutil.rmtree(target.parent, ignore_errors=True)
                _build(compiler, target)
            return ctypes.CDLL(str(target))
    except OSError as error:
        raise CannotBuild(f"{target.parent} cannot be used: {error}") from error


def has_compiler() -> bool:
    try:
        return bool(_compiler())
    except CannotBuild:
        return False


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcalib"


def objects() -> dict[str, list[str]]:
    """Source and flags of every object: the item loop once per instruction set, and the C interface."""
    variants = {"portable": ["-DKV_ISA=0"]} | (_X86 if platform.machine() in ("x86_64", "AMD64") else {})
    units = {name: ["isa.cpp", *_COMMON, *flags] for name, flags in variants.items()}
    exact = ["-ffp-contract=off"]  # bytes must not depend on the instruction set
    units |= {f"pack_{name}": ["pack.cpp", *_COMMON, *flags, *exact] for name, flags in variants.items()}
    return units | {"entry": ["entry.cpp", *_COMMON, *(["-DKV_GOMP"] if torch_openmp() else [])]}


def torch_openmp() -> Path | None:
    """The OpenMP library that torch has loaded; None: the kernel runs on one thread."""
    folder = Path(torch.__file__).parent
    found = sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])
    return found[0] if found else None


def _is_intact(target: Path) -> bool:
    """Loading a file that a crash has cut short would kill the process."""
    with contextlib.suppress(FileNotFoundError):
        return _digest(target) == target.with_suffix(".sha256").read_text()
    return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compiler() -> str:
    name = os.environ.get("CXX") or next((n for n in ("g++", "c++", "clang++") if shutil.which(n)), None)
    if name is None or shutil.which(name) is None:
        raise CannotBuild(f"no C++ compiler ({name or 'g++, c++, clang++'}) was found; install one, or set CXX")
    return shutil.which(name)


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [compiler, version, torch.__version__, platform.machine(), str(objects()), str(torch_openmp())]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, target: Path) -> None:
    log.info("building the CPU kernel, once for this machine, in %s", target.parent)
    start = time.monotonic()
    for left in target.parent.parent.glob(".partial-*"):  # of a build that was killed: under the lock there is no other
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent.parent) as folder:
        partial = Path(folder) / "build"
        partial.mkdir()
        _compile(compiler, partial, target.name)
        built = partial / target.name
        built.with_suffix(".sha256").write_text(_digest(built))
        partial.rename(target.parent)
    log.info("built the CPU kernel in %.1f s", time.monotonic() - start)


def _compile(compiler: str, folder: Path, name: str) -> None:
    """Compiles all objects at once into `folder` and leaves the library there alone."""
    commands = {
        unit: [compiler, "-c", str(SOURCES / source), "-o", str(folder / f"{unit}.o"), *flags]
        for unit, (source, *flags) in objects().items()
    }
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands.values()
    ]
    errors = [process.communicate()[1].decode(errors="replace") for process in running]
    failed = [text for process, text in zip(running, errors, strict=True) if process.returncode]
    if failed:
        lines = failed[0].strip().splitlines() or ["no message"]
        raise CannotBuild(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    link = [compiler, "-shared", "-o", str(folder / name), *(str(folder / f"{unit}.o") for unit in commands)]
    link += [str(torch_openmp())] if torch_openmp() else []
    done = subprocess.run(link, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{compiler} failed to link: {done.stderr.strip().splitlines()[-1]}")
    for unit in commands:
        (folder / f"{unit}.o").unlink()


@contextlib.contextmanager
def _lock(folder: Path):
    """One process at a time; without locks (no fcntl) two may build, and the later finds the earlier's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
