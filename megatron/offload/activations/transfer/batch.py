# SPDX-License-Identifier: Apache-2.0
"""What is handed over together: `Batch`. Whoever captures fills one in the thread that computes."""

from __future__ import annotations

from megatron.offload.activations.transfer.writer import Outgoing, Writer
from megatron.offload.sizes import MIB

_ENOUGH_BYTES = 8 * MIB  # a drive takes far longer for so much than it takes to wake a thread


class Batch:
    """Storages for one `Writer.submit`.

    To wake the thread that starts transfers takes as long as several saves, and that thread wants
    the interpreter then. So what operations save waits here until it is worth it.

    Args:
        writer: gets them.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._outgoing: list[Outgoing] = []
        self._held_bytes = 0

    def append(self, one: Outgoing, held_bytes: int) -> None:
        """Adds a storage.

        Args:
            one: that is to be written.
            held_bytes: of memory that cannot be freed before: of a part, all that it is part of.
        """
        self._outgoing.append(one)
        self._held_bytes += held_bytes

    def submit_if_enough(self) -> None:
        """Hands over what has come together, unless it is too little."""
        if self._held_bytes >= _ENOUGH_BYTES:
            self.submit()

    def submit(self) -> None:
        """Hands over what has come together."""
        outgoing, self._outgoing, self._held_bytes = self._outgoing, [], 0
        self._writer.submit(outgoing)
