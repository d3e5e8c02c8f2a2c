# SPDX-License-Identifier: Apache-2.0
"""What this process has open: `OPEN`, the one object that knows, whatever was opened first.

Doors and handles add what they open and take it out when they close it. A handle that is dropped
goes out by itself: nothing here keeps one alive.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

import torch

from megatron.offload.parameters.window import ParameterWindow

_T = TypeVar("_T")


class Handle:
    """What a door gives. It is closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what it has opened."""
        raise NotImplementedError


class StepBy(enum.Enum):
    """How the step of an optimizer runs that is no longer its own."""

    PARTS = "parts"  # it brings what it updates part by part
    PARTS_ON_HOST = "parts, on the host"


class Open(Generic[_T]):
    """Those of one kind that are open, in the order in which they were opened."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[_T]] = []
        self._lock = threading.Lock()  # several threads open and close; nothing waits under it

    def add(self, one: _T) -> None:
        """It is open from now on."""
        with self._lock:
            self._all = [ref for ref in self._all if ref() is not None] + [weakref.ref(one)]

    def discard(self, one: _T) -> None:
        """It is closed, or was not open."""
        with self._lock:
            self._all = [ref for ref in self._all if ref() not in (None, one)]

    def __iter__(self) -> Iterator[_T]:
        with self._lock:
            found = [ref() for ref in self._all]
        return (one for one in found if one is not None)


class OpenStreams:
    """What is open in a process, by kind.

    Attributes:
        activations: handles of `offload_activations`.
        parameters: windows of parameters, of whatever models.
        trainers: callbacks in a training.
        frozen: handles of `cache_frozen`.
        steps: how an optimizer steps whose `step` was replaced.
    """

    def __init__(self) -> None:
        self.activations: Open[Any] = Open()
        self.parameters: Open[ParameterWindow] = Open()
        self.trainers: Open[Any] = Open()
        self.frozen: Open[Any] = Open()
        self.steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepBy] = (
            weakref.WeakKeyDictionary()
        )


OPEN = OpenStreams()
