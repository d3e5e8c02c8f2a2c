# SPDX-License-Identifier: Apache-2.0
"""Where a signal's handler can raise within the package, and a handler that raises just there.

CPython runs a signal's handler in the main thread, where a function of Python's begins and where
one of C's has returned: those are the moments at which it calls a profiler. So a profiler that
raises is a handler that raises, at a moment that the test chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

import megatron.offload

_PACKAGE = str(Path(megatron.offload.__file__).parent)
_CALLED_BY_IT = ("threading.py", "contextlib.py", "weakref.py", "functools.py", "queue.py")


class Moment(NamedTuple):
    """Where a handler can run: a function that begins, or a call of C's that has returned."""

    code: CodeType
    instruction: int  # its offset in the code
    event: str  # "call" or "c_return"

    def __str__(self) -> str:
        file = self.code.co_filename.removeprefix(_PACKAGE)
        lines = (n for start, end, n in self.code.co_lines() if start <= self.instruction < end)
        where = f"{file}:{next(lines, None)}, {self.code.co_qualname}"
        return f"{where}, {'at its start' if self.event == 'call' else 'behind a call'}"


def _moment(frame: FrameType, event: str) -> Moment | None:
    if event not in ("call", "c_return"):
        return None
    file = frame.f_code.co_filename
    if not file.startswith(_PACKAGE) and Path(file).name not in _CALLED_BY_IT:
        return None
    return Moment(frame.f_code, frame.f_lasti, event)


def moments_of(work: Callable[[], Any]) -> dict[Moment, int]:
    """The moments of a piece of work in the calling thread, and how often it came to each."""
    found: dict[Moment, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if (moment := _moment(frame, event)) is not None:
            found[moment] = found.get(moment, 0) + 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


class Raising:
    """Raises once while it is entered.

    Args:
        kind: what it raises.

    Attributes:
        has_come: it has raised.
        was_dropped: within a finalizer, out of which Python lets no exception.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self.has_come = False
        self.was_dropped = False

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._drop
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook

    def _drop(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, self._kind):
            self.was_dropped = True
        else:
            self._hook(unraisable)


class Interrupt(Raising):
    """Raises when the thread that enters it comes to a moment for the n-th time.

    Args:
        moment: the moment.
        number: n, from 1.
        kind: what it raises.
    """

    def __init__(self, moment: Moment, number: int, kind: type[BaseException]) -> None:
        super().__init__(kind)
        self._moment = moment
        self._left = number

    def __enter__(self) -> Self:
        super().__enter__()
        code, instruction, awaited = self._moment

        def look(frame: FrameType, event: str, _: object) -> None:
            # Called tens of thousands of times in a step.
            if frame.f_code is code and event == awaited and frame.f_lasti == instruction:
                self._come()

        sys.setprofile(look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        super().__exit__()

    def _come(self) -> None:
        self._left -= 1
        if not self._left:
            sys.setprofile(None)
            self.has_come = True
            raise self._kind
