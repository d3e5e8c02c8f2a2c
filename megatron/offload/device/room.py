# SPDX-License-Identifier: Apache-2.0
"""What makes room where a device's memory runs out while bytes come back: `Room`, one a device.

Each stream of bytes (activations, optimizer states, parameters, gradients) reads ahead into the
device's memory, and adds itself here. Where memory runs out for bytes that compute needs now, all
of them give up what they have read ahead, and the read is tried once more. What is given up is on
its tier, and is read when it is needed. Knows nothing of what else takes memory, and frees none of
that.
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class ReadsAhead(Protocol):
    """A stream of bytes that come back before compute needs them."""

    def give_up_reads(self) -> None:
        """Frees the memory of all that was read ahead and not used yet. Waits for what is moving.

        Called in the thread that computes; raises nothing.
        """
        ...


class Room:
    """The streams of bytes that read ahead into one device's memory."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[ReadsAhead] = weakref.WeakSet()
        self._has_warned = False

    def add(self, stream: ReadsAhead) -> None:
        """A stream of bytes reads ahead into this device's memory, as long as it is alive."""
        self._streams.add(stream)

    def read(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work`, which takes memory for bytes that compute needs now; once more if memory is
        short.

        Args:
            work: may be done again where it has ended with an error.

        Raises:
            torch.OutOfMemoryError: as torch has raised it, or because the host has no memory; there
                is no room without what was read ahead either.
        """
        try:
            return work()
        except Exception as error:
            if not _is_lack_of_memory(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "offload: device memory ran out while bytes came back (%s); what "
                    "was read ahead is given up, and is read again when it is needed; leave more "
                    "memory free, or offload more",
                    str(error).partition("\n")[0],
                )
        for stream in list(self._streams):
            stream.give_up_reads()
        try:
            return work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not _is_lack_of_memory(error):
                raise
            raise torch.OutOfMemoryError(f"the host has no memory: {error}") from error


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether an error is about memory, the host's included, and not about a drive."""
    if isinstance(error, OSError):  # of `mmap`, or of a read that the system has no memory for
        return error.errno == errno.ENOMEM
    is_of_torch = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    return is_of_torch or isinstance(error, MemoryError)
