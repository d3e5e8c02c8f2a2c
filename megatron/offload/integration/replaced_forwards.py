# SPDX-License-Identifier: Apache-2.0
"""Takes the place of modules' `forward`, and gives it back: `ReplacedForwards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.offload.integration.hook import Hook
from megatron.offload.integration.own_attributes import put


class Forward(Protocol):
    """What runs in place of a module's `forward`."""

    @property
    def module(self) -> torch.nn.Module:
        """The module."""
        ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        ...


class ReplacedForwards:
    """Has modules run otherwise until it is closed; copies of them have their own `forward`.

    Args:
        forwards: one for each module.
    """

    def __init__(self, forwards: Sequence[Forward]) -> None:
        self._forwards = forwards
        self._undo: list[Callable[[], None]] = []

    def connect(self) -> None:
        """Takes the place of the modules' `forward`."""
        for one in self._forwards:
            self._undo.append(put(one.module, "forward", Hook(one.forward, one.module.forward)))

    def close(self) -> None:
        """Puts the modules' own `forward` back."""
        while self._undo:
            self._undo.pop()()
