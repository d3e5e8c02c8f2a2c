# SPDX-License-Identifier: Apache-2.0
"""A file of frozen features: `Entry`, one row of what a part computed, with what describes it.

A magic word, the length of a JSON header, the header, the bytes of the row, and a digest of all of
these. A file that ends early or has changed is no entry, and is as good as not there.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from typing import Any

import xxhash

_MAGIC = b"MOFROZ3\n"
_LENGTH_BYTES, _CHECK_BYTES = 4, 16


class Entry:
    """One row.

    Args:
        header: JSON: how results are made of rows.
        payload: the row's bytes of each tensor, one behind the other.
    """

    def __init__(self, header: dict[str, Any], payload: memoryview) -> None:
        self.header, self.payload = header, payload

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return len(self.payload)


def encode(header: dict[str, Any], payload: Sequence[memoryview | bytes]) -> list[memoryview]:
    """The pieces of a file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    pieces = [_MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *payload]
    check = xxhash.xxh3_128()
    for piece in pieces:
        check.update(piece)
    return [memoryview(piece) for piece in (*pieces, check.digest())]


def decode(body: bytearray) -> Entry:
    """What a file holds. Raises OSError: it is not whole, or not what was written."""
    view = memoryview(body)
    begin = len(_MAGIC) + _LENGTH_BYTES
    inner, check = view[:-_CHECK_BYTES], view[-_CHECK_BYTES:]
    if len(body) < begin + _CHECK_BYTES or view[: len(_MAGIC)] != _MAGIC:
        raise OSError(errno.EIO, "the file holds no frozen features")
    if xxhash.xxh3_128_digest(inner) != check:
        raise OSError(errno.EIO, "the file is not what was written")
    length = int.from_bytes(view[len(_MAGIC) : begin], "little")
    header = json.loads(bytes(inner[begin : begin + length]))
    return Entry(header, inner[begin + length :])
