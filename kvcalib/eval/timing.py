"""Honest timings: contenders in alternation, warm, median and quartiles.

    round 1:  A B C      round 2:  A B C      ...

so that whatever else the machine does meets all of them alike. A sample of a quick call is the mean of as many calls
as fill `SAMPLE_SECONDS`. Wall time decides; the CPU time of the process stands beside it, because it tells a busy
machine from a slow program.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch

SAMPLE_SECONDS = 0.02
"""Shortest sample: far above the resolution of clocks and the jitter of a scheduler."""
MOST_CALLS = 200


class Ticker:
    """A progress bar whose steps have different lengths: `tick(n)` moves it by n of the total."""

    def __init__(self, progress: Callable[[Iterable, int, str], Iterable], total: int, description: str):
        self._steps = iter(progress(range(total), total, description))

    def __call__(self, steps: int = 1) -> None:
        for _ in range(steps):
            next(self._steps, None)

    def close(self) -> None:
        """The bar shows that it is done."""
        for _ in self._steps:
            pass


def alternate(contenders: dict[str, Callable[[], object]], *, rounds: int, tick=lambda: None) -> dict[str, dict]:
    """Calls every contender in turn, `rounds` times over -> {name: {ms, ms_q1, ms_q3, cpu_ms, samples, calls}}.

    What a contender returns is dropped. The first calls, which warm up and decide how many calls make a sample, do
    not count.
    """
    calls = {name: _calls_per_sample(call) for name, call in contenders.items()}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            seconds, cpu_seconds = _sample(call, calls[name])
            wall[name].append(1000 * seconds)
            cpu[name].append(1000 * cpu_seconds)
        tick()
    return {name: summary(wall[name], cpu[name]) | {"calls": calls[name]} for name in contenders}


def summary(wall_ms: list[float], cpu_ms: list[float]) -> dict:
    """Median and quartiles of wall time, median of CPU time."""
    low, middle, high = quartiles(wall_ms)
    return {
        "ms": middle,
        "ms_q1": low,
        "ms_q3": high,
        "cpu_ms": statistics.median(cpu_ms),
        "samples": len(wall_ms),
    }


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile), all within the samples."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    return tuple(statistics.quantiles(samples, n=4, method="inclusive"))


def read_bandwidth(nbytes: int, *, rounds: int = 5) -> float:
    """Bytes per second at which torch's threads can read a buffer of this size again and again.

    The faster of two ways to read every byte once and do next to nothing with it. A buffer that fits a cache is read
    at the cache's speed, and so is a packed store of that size.
    """
    buffer = torch.ones(max(nbytes // 4, 1024))
    timings = alternate({"sum": buffer.sum, "dot": lambda: torch.dot(buffer, buffer)}, rounds=rounds)
    return 1000 * 4 * buffer.numel() / min(timing["ms_q1"] for timing in timings.values())


def _calls_per_sample(call: Callable[[], object]) -> int:
    call()  # builds, allocates, fills caches
    seconds, _ = _sample(call, 1)
    return min(max(1, round(SAMPLE_SECONDS / max(seconds, 1e-7))), MOST_CALLS)


def _sample(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """(wall, CPU) seconds of one call."""
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls


def differences(stamps: list[float]) -> Iterator[float]:
    """Time between each stamp and the one before."""
    return (after - before for before, after in zip(stamps, stamps[1:], strict=False))
