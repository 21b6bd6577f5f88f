"""Where and under which conditions something was timed: without them a timing says nothing.

`Watch` counts, from /proc/stat, how many cores other programs used meanwhile. Where there is no such file (not Linux)
the load average alone has to do.
"""

import os
import platform
import time
from pathlib import Path

import torch
import transformers

from kvcalib.kernels import dispatch

BUSY_CORES = 0.15
"""Cores in use by other programs from which on timings are called disturbed."""


def conditions(model) -> dict:
    """Machine, libraries and settings that decide how fast something is; JSON types."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernel": kernel_path(model.device.type),
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "memory_bytes": _total_memory(),
        "load_average": _load_average(),
    }


def kernel_path(device: str) -> str:
    """Which code attends over packed pages on a kind of device: "reference" or an instruction set."""
    return dispatch.kernel_name(device, os.environ.get(dispatch.VARIABLE) or "auto")


class Watch:
    """Cores that other programs (and other guests of the machine) use while this one works."""

    def __init__(self):
        self._start = self._now()

    def others(self) -> float | None:
        """Mean number of cores since the watch was made; None where that cannot be known."""
        now = self._now()
        if now is None or self._start is None or now[0] - self._start[0] < 0.05:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, busy - own) / wall

    def _now(self) -> tuple[float, float, float] | None:
        """(wall, busy CPU time of all, CPU time of this process), seconds."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, soft, steal = (int(field) for field in fields[:8])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()


def others_now(seconds: float = 1.0) -> float | None:
    """Cores that other programs use at this moment."""
    watch = Watch()
    time.sleep(seconds)
    return watch.others()


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where that cannot be known."""
    return _meminfo("MemAvailable")


def _total_memory() -> int | None:
    return _meminfo("MemTotal")


def _meminfo(field: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def _load_average() -> list[float] | None:
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
