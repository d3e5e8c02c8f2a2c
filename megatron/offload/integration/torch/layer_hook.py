# SPDX-License-Identifier: Apache-2.0
"""A hook on a module of a model whose parameters are offloaded: `LayerHook`.

`copy.deepcopy` copies the hooks of a module with it. That tells us of copies, which are to be whole
and have nothing to do with where the parameters of the model wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.parameters.window import ParameterWindow


class LayerHook:
    """A hook. A copy of its module has the parameters, and another hook that does nothing.

    Args:
        function: what the hook does.
        window: of the model's parameters.
    """

    def __init__(self, function: Callable[..., Any], window: ParameterWindow) -> None:
        self._function = function
        self._window = window

    def __call__(self, *args: Any) -> Any:
        """What the hook does."""
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """The hook of a copy.

        Args:
            memo: of `copy.deepcopy`: what it has copied, by the identity of what it was copied of.

        Raises:
            LostStateError: parameters could not be read.
            InterruptedStepError: the last step ended in its middle.
        """
        window = self._window
        if id(window) not in memo:  # the first hook of the model
            memo[id(window)] = window
            window.expose()
            with torch.no_grad():
                for param in (param for unit in window.units for param in unit.params):
                    if id(param) in memo:  # copied before, perhaps while it was away
                        memo[id(param)].copy_(param)
        return _nothing


def _nothing(*_: Any) -> None:
    pass
