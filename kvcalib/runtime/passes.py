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
_TURNS = 100
"""How often that is read again; a thread that begins with such a frame has no other end of its stack."""


class Pass:
    """call: the frame of the call of the model that it belongs to; None for one that is over from the start.

    watchers: weak references to those who could go back until it is finished; positions: its position ids; inside:
    whether an attention module of the model runs; base: the call of the model's base that belongs to it, while it runs.
    """

    def __init__(self, call: FrameType | None = None):
        # the frame itself would keep the variables of all its callers, and its address is its own until `end`: what
        # begins in its place ends it first
        self._call, self._thread = None if call is None else id(call), threading.current_thread()
        self._module = None if call is None else id(call.f_locals["self"])
        self.finished = call is None
        self.watchers, self.positions, self.inside, self.base = [], None, False, None

    def end(self) -> None:
        """It no longer runs."""
        self._call = self.base = None

    def finish(self) -> None:
        self.finished = True  # first: another thread asks whether it runs, then whether it is finished
        self.end()
        for reference in self.watchers:
            if (watcher := reference()) is not None:
                watcher.commit()
        self.watchers = []

    def is_of(self, call: FrameType | None) -> bool:
        return call is not None and id(call) == self._call

    @property
    def of_others(self) -> bool:
        """Whether it belongs to another thread that is still there."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    @property
    def running(self) -> bool:
        call = self._call
        if call is None:
            return False
        mine = self._thread is threading.current_thread()
        if not (mine or self._thread.is_alive()):
            return False
        for _ in range(1 if mine else _TURNS):
            frame, last = sys._getframe(1) if mine else sys._current_frames().get(self._thread.ident), None
            while frame is not None and not (id(frame) == call and frame.f_code is _CALL):
                frame, last = frame.f_back, frame
            if frame is not None or last is None or not last.f_code.co_flags & _SUSPENDS:
                break
        return frame is not None and id(frame.f_locals.get("self")) == self._module


def call_of(module: torch.nn.Module) -> FrameType | None:
    """The innermost call of `module` in this thread."""
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code is _CALL and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame
