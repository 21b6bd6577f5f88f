"""Modes of torch that a caller may be in and that must not reach the cache.

Buffers outlive an inference_mode that ends and would then refuse to be written. autocast would do the arithmetic of the
format, which is meant in float32, in half of that.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_DEVICES = ("cpu", "cuda")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither inference_mode nor autocast, and no graph: for all that makes or changes what a cache holds."""
    with torch.inference_mode(False), torch.no_grad(), in_full_precision():
        yield


def in_full_precision() -> AbstractContextManager:
    """Without autocast."""
    cast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not cast:
        return nullcontext()
    stack = ExitStack()
    for device in cast:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
