# SPDX-License-Identifier: Apache-2.0
"""Whether the calling thread is in autocast, also during an operation: `autocast_depth`."""

from __future__ import annotations

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
