# SPDX-License-Identifier: Apache-2.0
"""Takes the place of modules' `forward`, and gives it back: `ReplacedForwards`, `InPlaceOf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.offload.integration.hook import Hook
from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.torch.surroundings import frame_of_module_call


class InPlaceOf(Hook):
    """What a module has as its `forward` for a while.

    A copy of the module's attributes has it too (Note [Copied attributes] in `module_hooks.py`):
    that one computes with its own weights, and as without us. `torch.compile` traces no such copy.

    Args:
        module: whose forward it takes the place of.
        forward: runs instead.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__(forward, module.forward)
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = None if torch.compiler.is_compiling() else self._called()
        if called is None or called is self._module:
            return self._function(*args, **kwargs)
        own = getattr(self._original, "__func__", None)
        return self._original(*args, **kwargs) if own is None else own(called, *args, **kwargs)

    def _called(self) -> Any:
        """The module whose forward this is in the call under way; None: it was called directly."""
        frame = frame_of_module_call()
        called = None if frame is None else frame.f_locals["self"]
        return called if called is not None and vars(called).get("forward") is self else None


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
            self._undo.append(put(one.module, "forward", InPlaceOf(one.module, one.forward)))

    def close(self) -> None:
        """Puts the modules' own `forward` back."""
        while self._undo:
            self._undo.pop()()
