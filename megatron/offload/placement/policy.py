# SPDX-License-Identifier: Apache-2.0
"""Where an activation goes: the `Placement` words and the policies that choose among them.

The engine asks its policy once per saved storage, in the hot path; a policy never does I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from megatron.offload.saved.scope import Scope


class Placement(enum.Enum):
    """What happens to an activation between the forward pass that saves it and its use."""

    KEEP = "keep"  # stays in device memory
    RECOMPUTE = "recompute"  # dropped; its layer's forward runs again in backward
    HOST = "host"  # host DRAM
    SSD = "ssd"  # files on SSDs
    TIERED = "tiered"  # host DRAM or SSD, whichever is behind its share


class Policy(Protocol):
    """Chooses a placement for each saved storage."""

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """The placement of a storage of `num_bytes` that `scope` saved."""
        ...


@dataclass(frozen=True)
class OffloadAll:
    """Everything of at least `min_bytes` gets one placement."""

    min_bytes: int
    placement: Placement = Placement.SSD

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """The placement from `min_bytes` up, else `KEEP`."""
        return self.placement if num_bytes >= self.min_bytes else Placement.KEEP
