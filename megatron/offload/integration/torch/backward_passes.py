# SPDX-License-Identifier: Apache-2.0
"""Backward passes through layers whose parameters move: `BackwardPasses`, `hook_first`.

Note [A pass within a pass]
A hook of a tensor may run a backward pass of its own: a deep equilibrium model solves for its
gradient so, and so do adjoints of equations. That pass comes through layers, of other units too,
and brings these. The pass around it goes on within the layer that it was in, and autograd tells
nothing of that. So the unit of that layer comes again when the pass within has ended. The same of a
layer whose forward asks for a gradient.

Note [A pass that an error ends]
Autograd calls back at the end of a pass, but not of one that an error ends. A script that catches
the error may use parameters before its next forward pass, and the layer that the pass had come to
does not compute any more. Autograd drops the callback in both cases, which `_Ending` notices; on an
accelerator this may be a little after the script has caught the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.integration.torch.surroundings import in_backward
from megatron.offload.parameters.window import ParameterWindow


class BackwardPasses:
    """Brings the units that forward and backward passes come to.

    Args:
        window: of the units.
    """

    def __init__(self, window: ParameterWindow) -> None:
        self._window = window
        # Passes that run, each within the one before it, and the unit that each has come to.
        self._passes: list[tuple[int, int]] = []
        self._forward: int | None = None  # the unit whose layer is under way, in no backward pass

    def enter_forward(self, number: int) -> None:
        """A layer of this unit is called, in a backward pass where it is recomputed."""
        if in_backward():
            self._window.use(number, -1)
            return
        self._passes, self._forward = [], number  # an error may have ended a pass
        self._window.use(number, 1)

    def leave_forward(self, number: int) -> None:
        """The call of a layer of this unit has ended."""
        if not in_backward():  # else backward of this layer comes next
            self._forward = None
            self._window.set_aside([number])

    def enter_backward(self, number: int) -> None:
        """The pass that runs has come to a layer of this unit, from behind it."""
        self._window.use(number, -1)
        now = torch._C._current_graph_task_id()
        self._passes, is_new = self._around(now), all(one != now for one, _ in self._passes)
        self._passes.append((now, number))
        if is_new:
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(self, now))

    def end(self, ended: int) -> None:
        """A pass has ended; see the Notes."""
        if all(one != ended for one, _ in self._passes):  # known, or a forward pass runs since
            return
        self._passes = self._around(ended)
        self._window.set_aside()
        if self._passes:
            self._window.use(self._passes[-1][1], -1)
        elif self._forward is not None:
            self._window.use(self._forward, 1)

    def _around(self, one: int) -> list[tuple[int, int]]:
        """The passes that one runs in."""
        known = [number for number, _ in self._passes]
        return self._passes[: known.index(one)] if one in known else self._passes


class _Ending:
    """Says when a pass ends. Held by autograd alone: Note [A pass that an error ends]."""

    _pass: tuple[BackwardPasses, int] | None = None  # an interrupt may end `__init__`

    def __init__(self, passes: BackwardPasses, number: int) -> None:
        self._pass = passes, number

    def __call__(self) -> None:
        """The pass has come to its end."""
        if self._pass is not None:
            passes, number = self._pass
            passes.end(number)

    def __del__(self) -> None:
        self()


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Registers a hook that runs before others: a layer's own may compute with its weights."""
    torch.utils.hooks.unserializable_hook(hook)  # else torch warns where a script saves the tensor
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    others = [(key, other) for key, other in hooks.items() if key != handle.id]
    for key, _ in others:
        del hooks[key]
    hooks.update(others)  # autograd goes by the order of insertion: `move_to_end` changes another
