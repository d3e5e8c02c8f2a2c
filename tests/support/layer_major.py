# SPDX-License-Identifier: Apache-2.0
"""What tests of layer-major steps share: the loop to compare with, and hooks that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


def one_by_one(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A step that runs one micro-batch after the other; its losses."""
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def failing_at(number: int, error: Exception) -> Callable[..., None]:
    """A hook that raises at one of its calls, counted from 1."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error

    return fail


def waiting_threads() -> list[str]:
    """Names of those in which forward passes run."""
    return [t.name for t in threading.enumerate() if t.name.startswith("micro-batch")]
