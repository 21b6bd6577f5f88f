"""Going back to before a forward pass that did not come to its end."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Protocol

from kvcalib.errors import ConfigError
from kvcalib.runtime.attention import Attachment


class Held(Protocol):
    """What a pass changes. `restore` takes what `state` gave before, once."""

    def state(self) -> object: ...

    def restore(self, state) -> None: ...


class Undo:
    """`begin` wherever a pass is about to change `held`, `settle` before anything else does."""

    def __init__(self, held: Held, attachment: Attachment):
        self._held, self._attachment = held, attachment
        self._lock = threading.RLock()  # who goes back, or notes where to, changes what it has looked at
        self._ahead = None  # a pass that has not come to its end, and the state before it
        self.begun = 0
        """How often `begin` was called: who looks twice knows whether something has happened in between."""

    def __deepcopy__(self, memo) -> Undo:
        return Undo(copy.deepcopy(self._held, memo), self._attachment)

    def begin(self) -> None:
        """Notes how a pass finds the state, after taking back an earlier one."""
        self.begun += 1
        current = self._attachment.current_pass()
        with self._lock:
            if self._ahead is not None and self._ahead[0] is current:
                return
            self.settle()
            if current is not None:
                self._ahead = current, self._held.state()
                current.watchers.append(weakref.ref(self))

    def commit(self) -> None:
        """The pass is finished: there is no way back to before it."""
        self._ahead = None

    @property
    def before(self):
        """The state before a pass that an error ended; None where there is nothing to take back."""
        ahead = self._ahead  # read once: another thread may look on while the pass comes to its end
        return None if ahead is None or ahead[0].running or ahead[0].finished else ahead[1]

    def settle(self) -> None:
        """Takes back a pass that an error ended. Raises ConfigError while one runs."""
        with self._lock:
            self.take_back()
            if self._ahead is not None and not self._ahead[0].finished:
                raise in_the_middle()

    def take_back(self) -> None:
        """Takes back a pass that an error ended; does nothing while one runs."""
        with self._lock:
            before = self.before
            if before is not None:
                self._held.restore(before)
                self._ahead = None

    def tidy(self) -> None:
        """`take_back` for one who only looks: not while the thread of that pass may do so itself."""
        ahead = self._ahead
        if ahead is not None and not ahead[0].of_others:
            self.take_back()


def in_the_middle() -> ConfigError:
    return ConfigError(
        "this cache is in the middle of a forward pass: change, copy or save it when the call has returned,"
        " and give a call inside of it a cache of its own"
    )
