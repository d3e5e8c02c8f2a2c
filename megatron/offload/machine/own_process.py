# SPDX-License-Identifier: Apache-2.0
"""The process that has the threads which move bytes: `OwnProcess`.

A child that was forked from it has none of them, and would wait for ever. Each stream of bytes asks
here before it moves any, and the child gets a sentence. Moves nothing itself.
"""

from __future__ import annotations

import os

from megatron.offload.errors import OffloadError


class OwnProcess:
    """The process in which this is made."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether the process that calls is the one in which this was made."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises OffloadError in a child that was forked from the process."""
        if not self.is_this:
            raise OffloadError(
                f"{self._prefix}process {os.getpid()} was forked from process {self._pid}, which "
                "has the threads that move bytes, and cannot move any; use the model in process "
                f"{self._pid}, or load its checkpoint in a model of this process"
            )
