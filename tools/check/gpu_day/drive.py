# SPDX-License-Identifier: Apache-2.0
"""Job: what the drive does past the page cache, from one thread and from several. `parts.py`."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from check.gpu_day.machine import Note
from check.gpu_day.settings import Settings
from megatron.offload.sizes import MIB

_BLOCK_BYTES = 16 * MIB  # as the tiers write
_THREADS = (1, 4)


def rates(settings: Settings, note: Note) -> dict[str, Any]:
    """GB/s of writes and of reads, by the number of threads."""
    block = settings.few(_BLOCK_BYTES, 1 * MIB)
    num_blocks = settings.few(192, 4)
    path = settings.directory / "gpu-day-probe"
    found: dict[str, Any] = {"GB_per_s": {}}
    try:
        descriptor, found["io"] = _open(path)
        path.unlink()  # nothing stays, however this ends
        for threads in _THREADS:
            for name, call in {"write": _write, "read": _read}.items():
                seconds = _seconds(descriptor, call, block, num_blocks, threads)
                rate = block * num_blocks / seconds / 1e9
                found["GB_per_s"][f"{name}, {threads} at a time"] = rate
                note(found)
        os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return found


def _open(path: Path) -> tuple[int, str]:
    flags = os.O_CREAT | os.O_RDWR
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), "past the page cache"
    except OSError:  # the file system has none
        return os.open(path, flags, 0o600), "through the page cache"


def _write(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    return os.pwrite(descriptor, buffer, offset)


def _read(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def _seconds(
    descriptor: int,
    call: Callable[[int, mmap.mmap, int], int],
    block: int,
    num_blocks: int,
    num_threads: int,
) -> float:
    """Seconds until all blocks are done and on the drive."""
    errors: list[Exception] = []

    def work(first: int) -> None:  # each thread has blocks of its own and waits for none
        buffer = mmap.mmap(-1, block)
        buffer.write(os.urandom(MIB) * (block // MIB))
        try:
            for number in range(first, num_blocks, num_threads):
                if call(descriptor, buffer, number * block) != block:
                    raise OSError(f"block {number} is short")
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    seconds = time.perf_counter() - began_s
    if errors:
        raise errors[0]
    return seconds
