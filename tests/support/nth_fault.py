# SPDX-License-Identifier: Apache-2.0
"""An error at the n-th read, write or allocation of space of all files of tiers: `NthFault`."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from megatron.offload.tiers import drive
from megatron.offload.tiers.extents import ExtentAllocator
from megatron.offload.tiers.file import UnlinkedFile

READ, WRITE, ALLOCATION = KINDS = "read", "write", "allocation"
_METHODS = {"read": READ, "read_cached": READ, "write": WRITE, "sync": WRITE}


class NthFault:
    """Counts the calls of each kind from `begin` on, and has some of one kind fail.

    Files begin empty and grow by what is asked for, so that an allocation is one of the disk too.

    Attributes:
        num_calls: by kind, since `begin`.
        num_failed: that were made to fail since then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = dict.fromkeys(KINDS, 0)
        self.num_failed = 0
        self._kind, self._number, self._for_ever, self._errno = "", 0, False, 0
        self._lock = threading.Lock()
        self._refuses = threading.local()  # whether its thread's allocation is to fail
        for name, kind in _METHODS.items():
            self._wrap(monkeypatch, name, kind)
        self._wrap_allocations(monkeypatch)

    def begin(self, kind: str, number: int, errno: int, *, for_ever: bool = False) -> None:
        """From now on the calls of a kind are counted, and the n-th fails; or all from there on."""
        with self._lock:
            self.num_calls = dict.fromkeys(KINDS, 0)
            self.num_failed = 0
            self._kind, self._number, self._errno, self._for_ever = kind, number, errno, for_ever

    def end(self) -> None:
        """All is well again."""
        with self._lock:
            self._kind = ""

    def _is_due(self, kind: str) -> bool:
        with self._lock:
            self.num_calls[kind] += 1
            number = self.num_calls[kind]
            is_due = number == self._number or (self._for_ever and number > self._number)
            is_due = is_due and kind == self._kind
            self.num_failed += is_due
            return is_due

    def _error(self) -> OSError:
        return OSError(self._errno, os.strerror(self._errno))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
        call = getattr(UnlinkedFile, name)

        def counted(file: UnlinkedFile, *args: Any) -> None:
            if self._is_due(kind):
                raise self._error()
            call(file, *args)

        monkeypatch.setattr(UnlinkedFile, name, counted)

    def _wrap_allocations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocate, make_room = ExtentAllocator.allocate, drive.Drive._make_room

        def counted(extents: ExtentAllocator, num_bytes: int) -> int | None:
            self._refuses.now = self._is_due(ALLOCATION)
            return None if self._refuses.now else allocate(extents, num_bytes)

        def refused(one: drive.Drive, num_bytes: int) -> bool:
            if not self._refuses.now:
                return make_room(one, num_bytes)
            if one.health is drive.Health.GOOD:  # as if the file had no room and could not grow
                one._become_full(str(self._error()))
            return False

        monkeypatch.setattr(ExtentAllocator, "allocate", counted)
        monkeypatch.setattr(drive.Drive, "_make_room", refused)
        monkeypatch.setattr(drive, "GROWTH_BYTES", 1)
