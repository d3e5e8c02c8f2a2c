# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers that have all their parameters in memory: `OptimizerSteps`.

`parameter_offload.py` opens it. An optimizer whose states are offloaded goes by units, and is left
alone.

Note [Steps that do not end]
torch calls the pre hook before the step of any optimizer, and the post hook only after a step that
returned. The open context of a step that raised is dropped, unused, at the next forward pass of a
layer or the next step of that optimizer: parameters that it updated are marked as changed already,
and gradients stay, so that the caller may try again. A step may also call the steps of other
optimizers, whose units push its own out of memory; `_after_step` brings these back.

A script that has caught the error may use parameters before that, in graphs that live on. torch has
the keyword arguments of a step in its frame, which ends when the error has been handled. So those
that we return notice it (`_Keywords`).

Note [Closures]
A closure runs forward and backward within the step: units come and go, and gradients are made. So
the step begins once more after each call of the closure.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.open_streams import OPEN, StepBy
from megatron.offload.parameters.window import ParameterWindow


class OptimizerSteps:
    """Keeps the parameters of an optimizer in memory while it updates them.

    Args:
        window: of parameters; those of an optimizer that are in no unit of it are left alone.
    """

    def __init__(self, window: ParameterWindow) -> None:
        self._window = window
        self._open: dict[torch.optim.Optimizer, contextlib.ExitStack] = {}  # the outer ones first
        # Weakly: torch keeps these hooks for good, and a model that is dropped would live on.
        before, after = (weakref.WeakMethod(one) for one in (self._before_step, self._after_step))
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *args: (before() or _do_nothing)(*args)),
            register_optimizer_step_post_hook(lambda *args: (after() or _do_nothing)(*args)),
        ]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def forget(self) -> None:
        """Layers compute: an open step has raised, or begins again after its closure."""
        self._open.clear()

    def close(self) -> None:
        """Takes the hooks off."""
        _remove(self._hooks)
        self.forget()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Brings all parameters of an optimizer that does not step by units into memory.

        Args:
            optimizer: that is about to step.
            args: of its step: itself, and perhaps a closure.
            kwargs: of its step: perhaps a closure too.

        Returns:
            What it is to step with.

        Raises:
            ConfigurationError: its step would copy them to the host before they are.
        """
        params = self._params_of(optimizer)
        step_by = OPEN.steps.get(optimizer)
        if params and step_by is StepBy.PARTS_ON_HOST:
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}a step on the host (step_on, --optimizer-step-on cpu) copies "
                "parameters of an accelerator before they are brought to it; with parameters on a "
                "tier use device"
            )
        if not params or step_by is not None:
            return None
        self._begin(optimizer)
        if callable(kwargs.get("closure")):
            kwargs = kwargs | {"closure": self._around(optimizer, kwargs["closure"])}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], self._around(optimizer, args[1]), *args[2:])
        return args, _Keywords(kwargs, functools.partial(self._end_keywords, self._open[optimizer]))

    def _end_keywords(self, step: contextlib.ExitStack) -> None:
        """A step has raised, or has come to its end before, or others gave it new keywords."""
        if any(one is step for one in self._open.values()):
            self._window.set_aside()  # a use of parameters is noticed again, also by that step

    def _around(
        self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A closure behind which the optimizer has its parameters again. Note [Closures]."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self._begin(optimizer)
            return result

        return call

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self._window.changing(self._params_of(optimizer)))
        self._open[optimizer] = stack  # in the place of one that did not end

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = self._open.pop(optimizer, None)
        if step is not None:
            step.close()
        for outer in list(self._open):
            self._begin(outer)

    def _params_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in params if self._window.has(p) and not _is_left_alone(p)]


class _Keywords(dict[str, Any]):
    """The keyword arguments of a step, which end with it: Note [Steps that do not end].

    Args:
        given: to the step.
        end: is called then.
    """

    _end: Callable[[], None] | None = None  # an interrupt may end `__init__`

    def __init__(self, given: dict[str, Any], end: Callable[[], None]) -> None:
        super().__init__(given)
        self._end = end

    def __del__(self) -> None:
        if self._end is not None:
            self._end()


def _is_left_alone(param: torch.Tensor) -> bool:
    """Whether it is frozen: no optimizer of PyTorch updates it, and it need not be brought.

    One that does so touches it, which brings it.
    """
    is_parameter = isinstance(param, torch.nn.Parameter)
    return is_parameter and not param.requires_grad and param.grad is None


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _do_nothing(*_: Any) -> None:
    """What is left of a hook until it is taken off."""
