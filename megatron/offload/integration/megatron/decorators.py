# SPDX-License-Identifier: Apache-2.0
"""Where Megatron calls us: `around_layer`, `around_forward_step`, `around_backward_step`.

`install` puts these decorators, and `around_first_val_step`, on Megatron's functions at run time; a
patched Megatron (`patches/`) has them in its source. As long as nothing is connected they pass the
call on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

Function = Callable[..., Any]


class TrainingHooks(Protocol):
    """What the decorated functions call; `forward` and `step` are Megatron's own functions."""

    def layer(self, forward: Function, layer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a layer's forward and returns its result."""
        ...

    def forward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the forward pass of a micro-batch and returns its result."""
        ...

    def evaluation_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a forward pass that no backward pass follows and returns its result."""
        ...

    def backward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the backward pass of a micro-batch and returns its result."""
        ...


# Megatron calls the decorated functions and passes no object of ours: the one global state.
_connection: TrainingHooks | None = None
# And beside it: no backward pass follows the forward pass that comes next.
_is_forward_only = False


def connect(connection: TrainingHooks | None) -> None:
    """Has the decorated functions call `connection` from now on; None: only Megatron's own code."""
    global _connection, _is_forward_only
    _connection, _is_forward_only = connection, False


def is_decorated(function: Function) -> bool:
    """Whether one of the decorators is on it, also beneath others'."""
    return _is_ours(inspect.unwrap(function, stop=_is_ours))


def _is_ours(function: Function) -> bool:
    """Whether a decorator has made it: its code stands in this file."""
    return getattr(function, "__globals__", None) is globals()


def around_layer(forward: Function) -> Function:
    """Decorates `TransformerLayer.forward`: the connection, if there is one, runs the layer."""

    @functools.wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _connection is None:
            return forward(layer, *args, **kwargs)
        return _connection.layer(forward, layer, args, kwargs)

    return call


def around_forward_step(step: Function) -> Function:
    """Decorates `schedules.forward_step`: the connection, if there is one, runs the pass.

    A pass that no backward pass follows (`forward_only`), with gradients or without, is an
    evaluation's.
    """

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _is_forward_only
        is_forward_only, _is_forward_only = _is_forward_only, False
        if _connection is None:
            return step(*args, **kwargs)
        run = _connection.evaluation_step if is_forward_only else _connection.forward_step
        return run(step, args, kwargs)

    return call


def around_backward_step(step: Function) -> Function:
    """Decorates `schedules.backward_step`: the connection, if there is one, runs the pass."""

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _connection is None:
            return step(*args, **kwargs)
        return _connection.backward_step(step, args, kwargs)

    return call


def around_first_val_step(check: Function) -> Function:
    """Decorates `schedules.check_first_val_step`: notes whether a backward pass follows.

    All schedules call it just before each forward step, and give their `forward_only` to nothing
    else that is called there. We do not wrap the schedule itself: a trainer may have looked it up
    before `install`.
    """

    @functools.wraps(check)
    def call(first_val_step: Any, forward_only: Any, cond: Any) -> Any:
        global _is_forward_only
        _is_forward_only = bool(forward_only)
        return check(first_val_step, forward_only, cond)

    return call
