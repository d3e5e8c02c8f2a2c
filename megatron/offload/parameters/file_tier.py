# SPDX-License-Identifier: Apache-2.0
"""Files that others have written, as a tier that is only read: `FileTier`, and its `FileBlock`s.

A CPU's memory is filled in place. To an accelerator bytes go through staging buffers, as those of a
drive do: `tiers/access.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.device import Device, memory_at
from megatron.offload.parameters.weight_files import SavedPiece, SavedTensor
from megatron.offload.tiers.access import Access, InPlace, Staged, View
from megatron.offload.tiers.direct_io import BUFFERED, Cut
from megatron.offload.tiers.io_threads import IoThreads, usual_num_threads
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.purpose import PARAMETERS
from megatron.offload.tiers.staging import StagingPool
from megatron.offload.tiers.tier import Block, TierStatistics
from megatron.offload.tiers.transfer import Transfer, when_all


class FileBlock(Block):
    """Tensors in files, and where in a storage each of them begins.

    Args:
        tier: reads them.
        num_bytes: of the storage.
        pieces: the tensors, each with its first byte in the storage.
    """

    tier: FileTier
    remedy = "put the saved model's files back as they were"

    def __init__(self, tier: FileTier, num_bytes: int, pieces: Sequence[SavedPiece]) -> None:
        super().__init__(tier, num_bytes)
        self.pieces = [one for one in pieces if one.tensor.num_bytes]

    def __str__(self) -> str:
        return f"{self.pieces[0].tensor.path}" if self.pieces else "no file"

    def read(self, storage: torch.UntypedStorage) -> None:
        """Fills a storage in host memory. Raises OSError."""
        for tensor, start in self.pieces:
            self.tier.read(tensor, memory_at(storage.data_ptr() + start, tensor.num_bytes))

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage, in whatever memory, has the bytes of the files. Raises OSError."""
        for tensor, start in self.pieces:
            size = tensor.num_bytes
            read = own_pages(size)
            self.tier.read(tensor, memory_at(read.data_ptr(), size))
            nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
            ours = nothing.set_(storage, start, (size,), (1,)).cpu()
            if not torch.equal(ours, torch.empty(0, dtype=torch.uint8).set_(read)):
                return False
        return True


class FileTier:
    """Reads blocks of files. It takes no storages; see `Tier`.

    Args:
        path: of the files, for sentences.
        device: in whose memory they are used.
    """

    degraded = False
    used_bytes = 0
    capacity_bytes = 0
    limit_bytes: int | None = 0

    def __init__(self, path: Path, device: Device) -> None:
        self._path = path
        self.statistics = TierStatistics()
        self._open: dict[Path, tuple[int, tuple[int, int]]] = {}
        num_threads = usual_num_threads(1)
        self._staging: StagingPool | None = None
        self._access: Access = InPlace(BUFFERED, in_pages=True)
        if not device.is_host:  # as many buffers to copy from as threads that fill them
            self._staging = StagingPool(2 * num_threads, device, purpose=PARAMETERS)
            self._access = Staged(BUFFERED, device, self._staging)
        name = f"{PARAMETERS.thread_name} files"
        self._threads = IoThreads(num_threads, name, purpose=PARAMETERS)

    def __str__(self) -> str:
        return f"the files in {self._path}"

    def open(self, saved: SavedTensor) -> None:
        """Opens a tensor's file; from now on it must not change. Raises OSError."""
        if saved.path not in self._open:
            fd = os.open(saved.path, os.O_RDONLY)
            self._open[saved.path] = fd, _state_of(fd)

    def read(self, saved: SavedTensor, memory: memoryview, skipped_bytes: int = 0) -> None:
        """Reads a tensor, or what is behind its first bytes, into host memory.

        Raises:
            OSError: it cannot be read, or its file has changed.
        """
        fd, state = self._open[saved.path]
        if _state_of(fd) != state:
            raise OSError(f"{saved.path} has changed since it was opened")
        with self.statistics.reads.moving(len(memory)):
            saved.read_into(fd, memory, skipped_bytes)

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Any, Transfer] | None:
        """None: files are only read."""
        return None

    def begin_read(
        self, block: FileBlock, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block; its tensors are read side by side."""
        whole = Cut(block.num_bytes, b"", block.num_bytes, b"")
        target, view = self._access.for_reading(whole, into)

        def read(piece: SavedPiece) -> Transfer:
            work = functools.partial(self._fill, piece, view)
            return self._threads.submit_read(work, deadline, piece.tensor.num_bytes)

        transfer = when_all([read(piece) for piece in block.pieces])
        transfer.events = view.events
        return target, transfer

    # Runs in an I/O thread.
    def _fill(self, piece: SavedPiece, view: View) -> None:
        tensor, done = piece.tensor, 0
        with contextlib.closing(view.pieces_to_fill(piece.start, tensor.num_bytes)) as parts:
            for memory in parts:
                self.read(tensor, memory, done)
                done += len(memory)

    def view(self, block: FileBlock) -> torch.UntypedStorage:
        """Raises OSError: what others have written is not shown to be written to."""
        raise OSError(f"{block} is only read")

    def copy_view(self, block: FileBlock, into: torch.UntypedStorage) -> None:
        """Reads the block."""
        block.read(into)

    def renew(self, block: FileBlock) -> None:
        """Raises OSError as `view` does."""
        raise OSError(f"{block} is only read")

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Returns at once: nothing is written."""
        return True

    def trim(self) -> None:
        """Does nothing: each read fills memory of its reader."""

    def free(self, block: FileBlock) -> None:
        """Leaves the files as they are."""

    def close(self) -> None:
        """Waits for reads under way, and closes the files."""
        self._threads.close()
        if self._staging is not None:
            self._staging.close()
        while self._open:
            _, (fd, _) = self._open.popitem()
            os.close(fd)


def _state_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
