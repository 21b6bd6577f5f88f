"""Modes of torch that a caller may be in and that must not reach the cache.

Buffers outlive an inference_mode that ends and would then refuse to be written. autocast would do the arithmetic of the
format, which is meant in float32, in half of that. Under a default device, tensors that the kernels on the CPU read and
write would be made elsewhere.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_DEVICES = ("cpu", "cuda")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither inference_mode nor these, and no graph: for all that makes or changes what a cache holds."""
    with torch.inference_mode(False), torch.no_grad(), plain():
        yield


def plain() -> AbstractContextManager:
    """Without autocast or a default device."""
    cast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    elsewhere = torch.empty(0).device.type != "cpu"  # eight times as fast as asking for the default device
    if not cast and not elsewhere:
        return nullcontext()
    stack = ExitStack()
    for device in cast:
        stack.enter_context(torch.autocast(device, enabled=False))
    if elsewhere:
        stack.enter_context(torch.device("cpu"))
    return stack
