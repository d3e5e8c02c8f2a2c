# SPDX-License-Identifier: Apache-2.0
"""What direct I/O (O_DIRECT) requires of a file, and how a buffer is cut to meet it.

The SSD tier calls it. Direct I/O moves bytes between memory and drive without the page cache, but
only between aligned addresses. The memory of a torch tensor starts 64 bytes past a page, so a
tensor is cut in three: a short head up to the first aligned address, the aligned body, a short
tail. Only the body goes to the drive, straight from the tensor's own memory; the two edges (under
5 KiB) stay in memory with the record. No byte is copied through a staging buffer.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

import torch

from megatron.offload.tiers.mapped import storage_at

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_MASK_AT, _MEM_ALIGN_AT, _OFFSET_ALIGN_AT = 0x00, 0x98, 0x9C  # struct statx
_UNKNOWN_ALIGNMENT = 4096  # if the kernel does not say: a page suits every drive


@dataclass(frozen=True)
class Alignment:
    """What an address and a file offset must be multiples of, in bytes."""

    memory: int
    offset: int


@dataclass(frozen=True)
class Cut:
    """A storage cut in three: the body can go to a drive, the two edges stay in memory."""

    num_bytes: int  # of the storage
    head: bytes
    body_bytes: int  # may reach beyond the storage's end, if the buffer is larger
    tail: bytes


BUFFERED = Alignment(memory=1, offset=1)


def direct_alignment(fd: int) -> Alignment | None:
    """The alignment that direct I/O on this open file needs; None: it has no direct I/O.

    The offset is also a multiple of the file system's block: a write that ends inside a block
    makes ext4 and XFS take the file's lock exclusively, one writer at a time.
    """
    block = os.fstat(fd).st_blksize or _UNKNOWN_ALIGNMENT
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    buffer = ctypes.create_string_buffer(256)
    answered = statx is not None and not statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    if not answered or not struct.unpack_from("=I", buffer, _MASK_AT)[0] & _STATX_DIOALIGN:
        return Alignment(_UNKNOWN_ALIGNMENT, max(block, _UNKNOWN_ALIGNMENT))
    memory = struct.unpack_from("=I", buffer, _MEM_ALIGN_AT)[0]
    offset = struct.unpack_from("=I", buffer, _OFFSET_ALIGN_AT)[0]
    if not offset:
        return None
    return Alignment(max(memory, 1), max(offset, min(block, _UNKNOWN_ALIGNMENT)))


def cut(address: int, num_bytes: int, alignment: Alignment) -> Cut:
    """Cuts the `num_bytes` at `address`; copies the bytes of the edges."""
    head, body, tail = parts(address, num_bytes, alignment)
    return Cut(
        num_bytes,
        ctypes.string_at(address, head) if head else b"",
        body,
        ctypes.string_at(address + head + body, tail) if tail else b"",
    )


def parts(address: int, num_bytes: int, alignment: Alignment) -> tuple[int, int, int]:
    """Bytes of head, aligned body and tail of the `num_bytes` at `address`."""
    head = min(-address % alignment.memory, num_bytes)
    body = (num_bytes - head) // alignment.offset * alignment.offset
    return head, body, num_bytes - head - body


def aligned_storage(num_bytes: int, head_bytes: int, alignment: Alignment) -> torch.UntypedStorage:
    """A new storage whose body, after `head_bytes`, has this alignment.

    Its memory comes from torch's own allocator, so activations reuse it, saved or restored. It is
    uninitialised.
    """
    owner = torch.empty(num_bytes + alignment.memory, dtype=torch.uint8)
    start = owner.data_ptr() + -(owner.data_ptr() + head_bytes) % alignment.memory
    return storage_at(start, num_bytes, owner)
