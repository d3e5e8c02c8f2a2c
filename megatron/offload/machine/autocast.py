# SPDX-License-Identifier: Apache-2.0
"""Whether the calling thread is in autocast, also during an operation: `autocast_depth`.

And what it casts to on a kind of device, of which some (`meta`) have no autocast.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def autocast_depth() -> int:
    """How many contexts of autocast the calling thread is in.

    During an operation torch itself says that there is none, but its count of contexts stays. That
    can only be read by a change. Both calls are made within one of C's, so that no handler of a
    signal runs between them: a count that stayed too high would keep autocast's cache, and with it
    casts of weights that have changed since.
    """
    increment, decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    _, depth = next(zip(iter(increment, None), iter(decrement, None), strict=True))
    return int(depth)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts to on a kind of device; None: it is off, or there is none."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which nothing is cast on a kind of device."""
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
