# SPDX-License-Identifier: Apache-2.0
"""Seconds of compute, as the device saw them: `Clock`.

Profiles, steps, stalls and logs ask one how long compute took and what it waited for.
It never makes the host wait for the device, unless `wait` is called.

Note [Device time]
A device runs behind the host that queues its operations. The time from one line of Python to
another says how long they took to queue, not how long they take. So a moment is a timing event in
the stream that computes, and its time is read later, when the device has passed it: usually a step
later. What a wait of the host, or of a stream, costs compute is the time between two events
around it: nothing is queued between them, so the device stood still for so long. Where the device
was behind and had enough to do, that time is zero. On a CPU a moment is a clock reading, and all is
known at once.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megatron.offload.device.device import Device

Moment = Any  # a timestamp of the device
Hearing = Callable[[float], None]


class Clock:
    """Tells how many seconds lay between two moments of compute, once that is known."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._untold: collections.deque[tuple[Moment, Moment, Hearing]] = collections.deque()
        # Held while `tell` hears: in the order in which they were noted, each once. Several threads
        # may compute. Nothing but a device's event is waited for under it.
        self._telling = threading.RLock()

    def now(self) -> Moment:
        """This moment in the stream that the calling thread is on."""
        return self._device.timestamp()

    def tell(self, began: Moment, ended: Moment, hears: Hearing) -> None:
        """Calls `hears` with the seconds between two moments, in the order of such calls.

        On a CPU that is at once, on other devices in the first `read` after both have passed.
        """
        self._untold.append((began, ended, hears))
        if self._device.is_host:
            self.read()

    @contextlib.contextmanager
    def timed(self, hears: Hearing) -> Iterator[None]:
        """Calls `hears` with the seconds that compute took in this context."""
        began = self.now()
        try:
            yield
        finally:
            self.tell(began, self.now(), hears)

    def read(self) -> None:
        """Tells what is known by now. Waits for nothing."""
        self._tell_all(lambda ended: self._device.has_passed(ended))

    def wait(self) -> None:
        """Tells everything, and waits for the device to pass it."""
        self._tell_all(lambda ended: True)

    def _tell_all(self, is_time: Callable[[Moment], bool]) -> None:
        with self._telling:
            while self._untold and is_time(self._untold[0][1]):
                began, ended, hears = self._untold.popleft()
                hears(self._device.seconds_between(began, ended))
