# SPDX-License-Identifier: Apache-2.0
"""Files that others have written, as a tier that is only read: `FileTier`, and its `FileBlock`s."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.device import memory_at
from megatron.offload.parameters.weight_files import SavedTensor
from megatron.offload.tiers.io_threads import IoThreads, usual_num_threads
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.purpose import PARAMETERS
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

    def __init__(
        self, tier: FileTier, num_bytes: int, pieces: Sequence[tuple[SavedTensor, int]]
    ) -> None:
        super().__init__(tier, num_bytes)
        self.pieces = pieces

    def __str__(self) -> str:
        return f"{self.pieces[0][0].path}" if self.pieces else "no file"

    def read(self, storage: torch.UntypedStorage) -> None:
        """Fills a storage in host memory. Raises OSError."""
        for saved, start in self.pieces:
            self.tier.read(saved, storage, start)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage in host memory has the bytes of the files. Raises OSError."""
        for saved, start in self.pieces:
            read = own_pages(saved.num_bytes)
            self.tier.read(saved, read, 0)
            ours = torch.empty(0, dtype=torch.uint8).set_(storage, start, (saved.num_bytes,), (1,))
            theirs = torch.empty(0, dtype=torch.uint8).set_(read, 0, (saved.num_bytes,), (1,))
            if not torch.equal(ours, theirs):
                return False
        return True


class FileTier:
    """Reads blocks of files into host memory. It takes no storages; see `Tier`."""

    degraded = False
    used_bytes = 0
    capacity_bytes = 0
    limit_bytes: int | None = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self.statistics = TierStatistics()
        self._open: dict[Path, tuple[int, tuple[int, int]]] = {}
        name = f"{PARAMETERS.thread_name} files"
        self._threads = IoThreads(usual_num_threads(1), name, purpose=PARAMETERS)

    def __str__(self) -> str:
        return f"the files in {self._path}"

    def open(self, saved: SavedTensor) -> None:
        """Opens a tensor's file; from now on it must not change. Raises OSError."""
        if saved.path not in self._open:
            fd = os.open(saved.path, os.O_RDONLY)
            self._open[saved.path] = fd, _state_of(fd)

    def read(self, saved: SavedTensor, storage: torch.UntypedStorage, start: int) -> None:
        """Reads a tensor to a place in a storage in host memory.

        Raises:
            OSError: it cannot be read, or its file has changed.
        """
        fd, state = self._open[saved.path]
        if _state_of(fd) != state:
            raise OSError(f"{saved.path} has changed since it was opened")
        if not saved.num_bytes:
            return
        with self.statistics.reads.moving(saved.num_bytes):
            saved.read_into(fd, memory_at(storage.data_ptr() + start, saved.num_bytes))

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Any, Transfer] | None:
        """None: files are only read."""
        return None

    def begin_read(
        self, block: FileBlock, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block; its tensors are read side by side."""
        target = own_pages(block.num_bytes) if into is None else into

        def read(saved: SavedTensor, start: int) -> Transfer:
            def work() -> None:
                self.read(saved, target, start)

            return self._threads.submit_read(work, deadline, saved.num_bytes)

        return target, when_all([read(*piece) for piece in block.pieces])

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

    def free(self, block: FileBlock) -> None:
        """Leaves the files as they are."""

    def close(self) -> None:
        """Waits for reads under way, and closes the files."""
        self._threads.close()
        while self._open:
            _, (fd, _) = self._open.popitem()
            os.close(fd)


def _state_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
