# SPDX-License-Identifier: Apache-2.0
"""Storages that are submitted together: `WriteBatch`. The capture fills it while compute runs."""

from __future__ import annotations

from megatron.offload.activations.transfer.writer import Outgoing, Writer
from megatron.offload.sizes import MIB

_ENOUGH_BYTES = 8 * MIB  # writing these takes a drive far longer than waking a thread takes


class WriteBatch:
    """Storages for one `Writer.submit`.

    Waking the dispatcher takes as long as several saves, and its thread then competes for the GIL.
    So what operations save waits here until there is enough of it.

    Args:
        writer: it is submitted to this writer.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._outgoing: list[Outgoing] = []
        self._held_bytes = 0

    def append(self, one: Outgoing, held_bytes: int) -> None:
        """Adds a storage.

        Args:
            one: to be written.
            held_bytes: memory that is held until then: of a part, all that it is part of.
        """
        self._outgoing.append(one)
        self._held_bytes += held_bytes

    def submit_if_enough(self) -> None:
        """Submits what was collected, unless it is too little."""
        if self._held_bytes >= _ENOUGH_BYTES:
            self.submit()

    def submit(self) -> None:
        """Submits what was collected."""
        outgoing, self._outgoing, self._held_bytes = self._outgoing, [], 0
        self._writer.submit(outgoing)
