# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that stay with their model and not with its copies: `ModuleHooks`.

What calls us in a PyTorch model: nothing of its code is replaced.

Note [Copies of a model]
Trainers copy models (`deepcopy` for a reference model or an average of the weights) and pickle
them (`torch.save(model)`). Hooks would go along, and the copy would tell of its passes as if it
were the model. Ours turn into ones that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleHooks:
    """The hooks on the modules of a model, to be taken off together."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def add(
        self,
        module: torch.nn.Module,
        begin: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
        end: Callable[[torch.nn.Module, Any], None],
        *,
        outside_of_graphs: bool,
    ) -> None:
        """Has functions called around a module's forward, whether it raises or not.

        Args:
            module: whose forward.
            begin: gets the module and the arguments; runs before hooks that are there already.
            end: gets the module and the result; None if it raised.
            outside_of_graphs: `torch.compile` ends its graph before them; else it leaves them out.
        """
        hook = _OutsideOfGraphs if outside_of_graphs else _Hook

        def begin_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            begin(module, args, kwargs)

        def end_call(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
            end(module, result)

        self._handles += [
            module.register_forward_pre_hook(hook(begin_call), prepend=True, with_kwargs=True),
            module.register_forward_hook(hook(end_call), always_call=True),
        ]

    def add_before(self, module: torch.nn.Module, call: Callable[[torch.nn.Module], None]) -> None:
        """Has a function called just before a module's forward, after hooks that are there."""

        def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            call(module)

        self._handles.append(module.register_forward_pre_hook(_OutsideOfGraphs(before)))

    def remove(self) -> None:
        """Takes all of them off."""
        while self._handles:
            self._handles.pop().remove()


def do_nothing(*_: Any) -> None:
    """What a hook becomes in a copy of its model; see Note [Copies of a model]."""


def _get_do_nothing() -> Callable[..., None]:
    return do_nothing


class _Hook:
    """Calls a function, unless torch.compile traces it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:  # of pickle and of deepcopy
        return _get_do_nothing, ()


class _OutsideOfGraphs(_Hook):
    """Calls a function that torch.compile does not look into."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        self._call(*args)
