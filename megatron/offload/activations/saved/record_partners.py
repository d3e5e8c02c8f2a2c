# SPDX-License-Identifier: Apache-2.0
"""What a record needs of those that it deals with: `Pending`, a transfer, and `View`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A transfer under way, as a record needs it; `tiers.transfer.Transfer` implements it."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""

    def cancel(self) -> bool:
        """Takes it off the queue; False if it has started: it then ends soon by itself."""

    def abandon(self) -> None:
        """Says that its result is not needed: the thread that has it may cancel it. No lock."""

    def wait(self) -> None:
        """Blocks until the end; raises what the I/O thread raised."""

    def wait_until_done(self) -> None:
        """Blocks until the end; raises nothing."""


class View(Protocol):
    """A view of a record's bytes, as the record needs it; `view.SavedView` implements it.

    Attributes:
        is_used: backward has asked for it, and not for the record's bytes again since.
        built: its tensor, if the dispatcher has built it before backward asks; None: it has not.
        ready: events after which that tensor may be used.
    """

    is_used: bool
    built: list[torch.Tensor] | None
    ready: Sequence[Any] | None

    def rebuild(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """Its tensor, of memory that holds the record's bytes."""
