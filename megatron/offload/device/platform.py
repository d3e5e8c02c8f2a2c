# SPDX-License-Identifier: Apache-2.0
"""What torch has no generic name for, by kind of accelerator: `Platform`, `register_platform`.

`AcceleratorDevice` does everything else through `torch.get_device_module`, the same lines for every
kind. To offload from a kind of accelerator takes one of these: `cuda.py` has CUDA's,
`open.py` registers it and looks others up.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch


class PeakReader(Protocol):
    """Reads the peak of one device's allocated memory, as if no other reader reset it."""

    def reset(self) -> None:
        """Makes `peak_bytes` count from now on."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes of tensors at any moment since `reset`."""
        ...


class Platform(Protocol):
    """One kind of accelerator. Callers set the current device of their thread before a call."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-locks a range of host memory, so that copies to and from it overlap compute.

        Raises:
            RuntimeError: the system or the driver refuses; nothing of that is left behind.
        """
        ...

    def unpin(self, address: int) -> None:
        """Ends what `pin` began at this address. Raises nothing: at exit a driver may be gone."""
        ...

    def new_event(self) -> Any:
        """An event that is not recorded yet. A thread that waits for it sleeps, where it can."""
        ...

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in the vendor's own profiler, as a context."""
        ...

    def peak_reader(self, device: torch.device) -> PeakReader:
        """Reads the peak of a device's memory without disturbing others that do; from now on."""
        ...


_platforms: dict[str, Platform] = {}


def register_platform(kind: str, platform: Platform) -> None:
    """Lets users offload from devices of a kind (`torch.device.type`); the last call for it counts.

    Args:
        kind: torch must have a module of that name, with streams, events and memory counters.
        platform: thread-safe.
    """
    _platforms[kind] = platform


def platform_of(kind: str) -> Platform | None:
    """What was registered for a kind of device; None: nothing."""
    return _platforms.get(kind)


def registered_kinds() -> list[str]:
    """The kinds of devices that something was registered for."""
    return list(_platforms)
