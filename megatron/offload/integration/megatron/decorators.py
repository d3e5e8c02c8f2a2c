# SPDX-License-Identifier: Apache-2.0
"""Where Megatron calls us: `around_layer`, `around_forward_step`, `around_backward_step`.

Three decorators. `install` puts them on Megatron's functions at run time; a patched Megatron
(`patches/`) has them in its source. As long as nothing is connected they pass the call on.
"""

from __future__ import annotations

import functools
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

    def backward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the backward pass of a micro-batch and returns its result."""
        ...


# Decorated functions are called by Megatron, which hands nothing of ours in: the one global state.
_connection: TrainingHooks | None = None


def connect(connection: TrainingHooks | None) -> None:
    """Has the decorated functions call `connection` from now on, or nobody if it is None."""
    global _connection
    _connection = connection


def is_decorated(function: Function) -> bool:
    """Whether one of the three decorators is on it."""
    return getattr(function, "has_activation_offload", False)


def around_layer(forward: Function) -> Function:
    """Decorates `TransformerLayer.forward`: the connection, if there is one, runs the layer."""

    @functools.wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _connection is None:
            return forward(layer, *args, **kwargs)
        return _connection.layer(forward, layer, args, kwargs)

    return _marked(call)


def around_forward_step(step: Function) -> Function:
    """Decorates `schedules.forward_step`: the connection, if there is one, runs the pass."""

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _connection is None:
            return step(*args, **kwargs)
        return _connection.forward_step(step, args, kwargs)

    return _marked(call)


def around_backward_step(step: Function) -> Function:
    """Decorates `schedules.backward_step`: the connection, if there is one, runs the pass."""

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _connection is None:
            return step(*args, **kwargs)
        return _connection.backward_step(step, args, kwargs)

    return _marked(call)


def _marked(call: Function) -> Function:
    call.has_activation_offload = True  # type: ignore[attr-defined]
    return call
