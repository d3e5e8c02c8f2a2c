# SPDX-License-Identifier: Apache-2.0
"""Says a sentence before SIGBUS ends the process, where a mapped file fails: `explain`.

A read of mapped memory cannot return an error. Where the file cannot be read or written, or others
have cut it short, the system sends SIGBUS, and the operation that touched the memory cannot go on.
`mapped.py` gives each mapping its sentence. This file catches no error: the signal still ends the
process, or reaches the handler that was there before, such as `faulthandler`'s. A handler that a
script installs later takes the place of this one.

Note [A handler in Python]
Python's own handlers run between two instructions of Python, and behind this signal there is no
next one: the system repeats the read. So the handler is a function of `ctypes`, which runs within
the read, in whatever thread that is. Its thread holds Python's lock or waits for it: torch's
operations release that lock, and so do the threads that wait for them. It writes to standard error
itself, because the thread that it interrupts may hold a lock of `logging`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any, ClassVar

_SA_SIGINFO = 4  # <asm-generic/signal-defs.h>
_SIGSET_BYTES = 128
_FROM_KERNEL = 1  # smallest `code` of a signal that a memory access has caused


class _Action(ctypes.Structure):
    """`struct sigaction` of <signal.h>."""

    _fields_: ClassVar[Any] = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * _SIGSET_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class _Cause(ctypes.Structure):
    """The beginning of `siginfo_t`."""

    _fields_: ClassVar[Any] = [
        ("number", ctypes.c_int),
        ("errno", ctypes.c_int),
        ("code", ctypes.c_int),
        ("address", ctypes.c_void_p),
    ]


# By address, for as long as something is mapped there: its size, and what to say. Children that are
# forked inherit it, as they inherit mappings and handler.
_sentences: dict[int, tuple[int, str]] = {}
_saying = threading.Lock()  # of the handler alone, which a signal of its own does not interrupt
_installed: list[Any] = []  # the function of ctypes, which must live as long as the process


def explain(address: int, num_bytes: int, sentence: str) -> None:
    """From now on the sentence is said if a file that is mapped there fails.

    The first call installs the handler, for as long as the process lives.
    """
    _sentences[address] = num_bytes, sentence
    if not _installed:
        _install()


def forget(address: int) -> None:
    """Nothing is mapped there any more."""
    _sentences.pop(address, None)


def _install() -> None:
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = _Action()

    def handle(_: int, info: int, __: int) -> None:
        cause = _Cause.from_address(info)
        try:
            with _saying:  # a thread that has nothing left to say ends the process: not before
                for start, (num_bytes, sentence) in list(_sentences.items()):
                    if start <= (cause.address or 0) < start + num_bytes:
                        os.write(2, f"{sentence}\n".encode())
                        forget(start)  # other threads may wait here for the same file
        finally:  # the instruction is repeated, and the signal goes to the handler of before
            sigaction(signal.SIGBUS, ctypes.byref(before), None)
            if cause.code < _FROM_KERNEL:  # another process sent it: nothing is repeated
                signal.raise_signal(signal.SIGBUS)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    function = kind(handle)
    action = _Action(handler=ctypes.cast(function, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    if sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before)) == 0:
        _installed.append(function)
