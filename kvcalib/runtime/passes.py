"""Forward passes of a model: whether one still runs, came to its end, or was ended by an error.

No hook of torch is called when Ctrl-C ends a pass, so whether it runs is read off the stack of its thread.
"""

import inspect
import sys
import threading
from types import FrameType

import torch

_CALL = inspect.unwrap(torch.nn.Module._call_impl).__code__
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""A frame of such code has no caller between two turns, and another thread may take one while its stack is read."""


class Pass:
    """call: the frame of the call of the model that it belongs to; None for one that is over from the start.

    watchers: weak references to those who could go back until it is finished; positions: its position ids; inside:
    whether an attention module of the model runs; base: the call of the model's base that belongs to it, while it runs.
    """

    def __init__(self, call: FrameType | None = None):
        self._frame = id(call)  # the frame itself would keep all its tensors
        self._thread = threading.current_thread()  # not its ident, which the next thread gets
        self._module = None if call is None else id(call.f_locals["self"])
        self._over = self.finished = call is None
        self.watchers, self.positions, self.inside, self.base = [], None, False, None

    def end(self) -> None:
        """It no longer runs, which its frame alone cannot tell: a later one may have its address."""
        self._over = True

    def finish(self) -> None:
        self.finished = True
        self._over = True  # in this order: another thread asks first whether it runs, then whether it is finished
        for reference in self.watchers:
            if (watcher := reference()) is not None:
                watcher.commit()
        self.watchers = []

    def is_of(self, call: FrameType | None) -> bool:
        return id(call) == self._frame

    @property
    def running(self) -> bool:
        if self._over:
            return False
        mine = self._thread is threading.current_thread()
        if not (mine or self._thread.is_alive()):
            return False
        while True:
            frame, last = sys._getframe(1) if mine else sys._current_frames().get(self._thread.ident), None
            while frame is not None and not (id(frame) == self._frame and frame.f_code is _CALL):
                frame, last = frame.f_back, frame
            if frame is not None or last is None or not last.f_code.co_flags & _SUSPENDS:
                return frame is not None and id(frame.f_locals.get("self")) == self._module


def call_of(module: torch.nn.Module) -> FrameType | None:
    """The innermost call of `module` in this thread."""
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code is _CALL and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame
