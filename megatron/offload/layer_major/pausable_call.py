# SPDX-License-Identifier: Apache-2.0
"""A call that pauses in its middle, while others like it run: `PausableCall`.

Note [A forward pass that pauses]
We cannot change the code of a model's forward pass, and it is to stop between two layers, let that
of another micro-batch run up to there, and go on. So each runs in a thread of its own, of which
never more than one runs: the caller of `go_on` waits until the call pauses or ends. What a pass has
entered (autocast, hooks of saved tensors, a profiler's range) is the thread's and stays as it was.
What the thread that made the call has entered holds in it too, see `ThreadState`.

Note [Autocast's cache]
Autocast keeps what it has cast a weight to until its outermost context ends. That context is a
thread's; the cache is one for all threads. So a pass would find what another one has cast, with the
node of that one's graph: of another thread, and, if that one wanted no gradients of the weight,
without a way to it. Therefore the cache is emptied whenever another thread goes on. Each call casts
a weight once between two pauses, and all uses of it there share the node, as in a call that does
not pause: their gradients are added before they are cast back. What no graph has kept is free.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from megatron.offload.layer_major.thread_state import ThreadState

T = TypeVar("T")

_of_thread = threading.local()  # `.call`: that runs in it


class _Abandoned(BaseException):
    """Ends an abandoned call. No `Exception`: models may catch those."""


class PausableCall(Generic[T]):
    """A function that runs up to its next pause each time it is told to go on.

    Args:
        function: runs in a thread of its own.
        name: of the thread.
        device: whose current stream, of the thread that makes this, is current in it.
    """

    def __init__(self, function: Callable[[], T], name: str, device: torch.device) -> None:
        self._function = function
        self._state_of_caller = ThreadState(device)
        # A signal's handler may raise in the middle of `threading.Semaphore`; these are of C.
        self._goes_on: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_abandoned = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=name, daemon=True
        )

    def go_on(self) -> bool:
        """Runs it up to its next pause, or to its end; whether it has ended.

        Raises: as the function. If the wait is interrupted, the call is abandoned first.
        """
        try:
            if self._thread.ident is None:
                self._thread.start()
            torch.clear_autocast_cache()  # of the caller's casts, see Note [Autocast's cache]
            self._goes_on.put(None)
            self._has_stopped.get()
        except BaseException:  # Ctrl-C: the caller does not return before the call has ended
            self.abandon()
            raise
        torch.clear_autocast_cache()  # of the call's
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose frames refer to this one: nothing of the step would be freed
        return bool(self._result)

    def pause(self) -> None:
        """Called in it: waits until it is told to go on."""
        self._has_stopped.put(None)
        self._goes_on.get()
        if self._is_abandoned:
            raise _Abandoned

    def take_result(self) -> T:
        """What the function gave, once it has ended; forgotten here from now on."""
        return self._result.pop()

    def abandon(self) -> None:
        """Ends it where it pauses next, unless it has ended. Waits for that."""
        self._is_abandoned = True
        self._goes_on.put(None)  # also to a thread that a signal kept `start` from waiting for
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        _of_thread.call = self
        self._goes_on.get()
        try:
            if not self._is_abandoned:
                with self._state_of_caller.entered():
                    self._result.append(self._function())
        except BaseException as error:
            if not self._is_abandoned:
                self._error = error
        finally:
            del self._function  # and what it refers to
            self._has_stopped.put(None)


def running_call() -> PausableCall[Any] | None:
    """The call that runs in this thread, if there is one."""
    return getattr(_of_thread, "call", None)
