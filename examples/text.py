# SPDX-License-Identifier: Apache-2.0
"""Text to train on without a download: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

NUM_WORDS = 256  # a byte each


def rows_of_text(num_rows: int, num_tokens: int) -> torch.Tensor:
    """Rows of bytes of text, one after the other.

    Args:
        num_rows: wanted; the library has some tens of millions of bytes.
        num_tokens: of a row.

    Returns:
        Whole numbers below `NUM_WORDS`, of shape (rows, tokens).
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_rows * num_tokens:
            break
    rows = min(num_rows, len(text) // num_tokens)
    tokens = torch.frombuffer(text, dtype=torch.uint8)[: rows * num_tokens]
    return tokens.long().view(rows, num_tokens)
