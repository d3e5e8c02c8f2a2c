# SPDX-License-Identifier: Apache-2.0
"""Transforms of torch.func (`grad`, `jvp`, `vmap`) around code of ours: `outside_of_transforms`.

Within one, each operation gives a tensor of the transform's own kind, whose end is that of the
transform: torch then reads memory that is gone. What we make for later has to be plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def in_transform() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms(function: F) -> F:
    """Decorates a function whose tensors belong to no transform."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not in_transform():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
