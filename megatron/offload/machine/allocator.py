# SPDX-License-Identifier: Apache-2.0
"""The allocator under torch's CPU tensors: which one to start with, and how to empty it.

On a CPU, memory that a tensor gives up lowers the process's resident set only if the allocator
returns it, and memory that was returned costs page faults when it is needed again. Launch scripts
run this file and start training with the environment that it prints; the engine and the memory
statistics call `return_freed_memory`.

Note [Why mimalloc]
glibc either maps each large block on its own, which costs a page fault for every 4 KiB of every
activation, or keeps them in a heap, where torch's aligned requests (posix_memalign) do not fit the
holes that equal requests left, so the heap grows as if nothing had been freed (glibc 2.36: of 20
freed 4 MiB blocks between live ones, none served one of 20 equal aligned requests; with mimalloc 19
did). mimalloc reuses a freed block of equal size as it is and returns what stays free. It comes
from the package `cmeel-mimalloc`; without it glibc maps blocks one by one: slower, never wrong.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from pathlib import Path

MIMALLOC = "mimalloc"
# What to do about an allocator that keeps what offload frees: the end of a sentence for people.
START_WITH_ENVIRONMENT = "start training with the environment that `megatron-offload doctor` prints"
_MIMALLOC_PACKAGE = "cmeel-mimalloc"
_GLIBC_ENVIRONMENT = {
    # Blocks from 64 KiB up are mapped on their own and unmapped when freed.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # Huge pages where a block holds one: fewer page faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_MIMALLOC_ENVIRONMENT = {
    # Milliseconds that a free block waits for reuse before it is returned: as long as a step takes,
    # so that what one gives up serves the next without a page fault. With a second, what a step
    # that keeps everything has freed is gone before the next one wants it.
    "MIMALLOC_PURGE_DELAY": "10000",
}
_AT_ONCE = {"MIMALLOC_PURGE_DELAY": "0"}


def allocator_environment(*, keeps_for_reuse: bool = True) -> dict[str, str]:
    """Environment variables with which a process on a CPU gives freed memory back.

    Args:
        keeps_for_reuse: after some seconds, which is faster. Else at once: then a step's peak has
            nothing that is only kept for reuse.
    """
    library = _mimalloc_library()
    if library is None:
        return dict(_GLIBC_ENVIRONMENT)
    environment = {"LD_PRELOAD": str(library), **_MIMALLOC_ENVIRONMENT}
    return environment if keeps_for_reuse else environment | _AT_ONCE


def return_freed_memory() -> None:
    """Makes the allocator in use return what it keeps for reuse to the system."""
    process = ctypes.CDLL(None)
    if hasattr(process, "mi_collect"):
        process.mi_collect(True)
    elif hasattr(process, "malloc_trim"):
        process.malloc_trim(0)


def keeps_freed_memory() -> bool:
    """Whether the allocator in use may keep for long what tensors give up: see the Note above."""
    return allocator_name() != MIMALLOC and not set(_GLIBC_ENVIRONMENT) <= set(os.environ)


def allocator_name() -> str:
    """Names the memory allocator that this process runs on, for people."""
    return MIMALLOC if hasattr(ctypes.CDLL(None), "mi_collect") else "the C library's malloc"


def _mimalloc_library() -> Path | None:
    try:
        files = importlib.metadata.files(_MIMALLOC_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libmimalloc.so":
            path = Path(str(file.locate())).resolve()
            return path if path.is_file() else None
    return None


if __name__ == "__main__":
    for name, value in allocator_environment().items():
        print(f"{name}={value}")
