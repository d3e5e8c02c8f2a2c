# SPDX-License-Identifier: Apache-2.0
"""Says what Liger's fused norms and MLPs compute, so that their results need not be saved.

`ActivationOffload` calls it. Their classes are autograd functions, whose nodes do not show it.

Note [Kernels that write into what is saved]
Liger's MLPs write gradients into the tensors that they have saved, behind autograd's back. Their
result, which is computed of these, may be asked for later, where gradients of weights come in a
pass of their own: it would be computed of gradients. What is returned has the versions of what was
written, so these are counted, and such a use is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

# Module below `liger_kernel.ops`, autograd function, and how many tensors its result is computed
# of: its first arguments, and the first ones that it saves, as rows.
_FUNCTIONS = (
    ("swiglu", "LigerSiLUMulFunction", 2),
    ("geglu", "LigerGELUMulFunction", 2),
    ("rms_norm", "LigerRMSNormFunction", 2),
    ("layer_norm", "LigerLayerNormFunction", 3),
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONSTANTS = (bool, float, int, str, type(None))

_told: set[type] = set()


def add_liger_functions() -> None:
    """Those of Liger's functions that the process has imported, each once.

    From then on the context of each call has what computes its result again (`function_of`).
    """
    for file, name, num_tensors in _FUNCTIONS:
        function: Any = getattr(sys.modules.get(f"liger_kernel.ops.{file}"), name, None)
        if function is not None and function not in _told:
            _told.add(function)
            function.forward = staticmethod(_telling(function.forward, num_tensors))
            function.backward = staticmethod(_counting(function.backward))


def _telling(forward: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
    """A forward pass that also notes how its result is computed again."""

    @functools.wraps(forward)
    def telling(ctx: Any, *args: Any) -> Any:
        result = forward(ctx, *args)
        tensors, constants = args[:num_tensors], args[num_tensors:]
        is_known = (
            not torch.compiler.is_compiling()
            and len(tensors) == num_tensors
            and all(type(one) in _PLAIN for one in tensors)
            and all(type(one) in _CONSTANTS for one in constants)
        )
        if is_known:
            ctx.replayed_by = _Again(forward, tuple(one.shape for one in tensors), constants)
        return result

    return telling


def _counting(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose writes autograd sees: Note [Kernels that write into what is saved]."""

    @functools.wraps(backward)
    def counting(ctx: Any, *gradients: Any) -> Any:
        result = backward(ctx, *gradients)
        if not torch.compiler.is_compiling():
            for one in result if isinstance(result, tuple) else (result,):
                if type(one) is torch.Tensor and not one.is_inference():
                    torch.autograd.graph.increment_version(one)
        return result

    return counting


@dataclasses.dataclass(frozen=True)
class _Again:
    """The same forward pass once more; two of the same arguments are equal.

    Attributes:
        forward: of the function.
        shapes: of the tensors.
        constants: the other arguments.
    """

    forward: Callable[..., torch.Tensor]
    shapes: tuple[torch.Size, ...]
    constants: tuple[Any, ...]

    def __call__(self, *saved: torch.Tensor) -> torch.Tensor:
        tensors = [one.view(shape) for one, shape in zip(saved, self.shapes, strict=False)]
        return self.forward(_NoContext(), *tensors, *self.constants)


class _NoContext:
    """Takes what a forward pass notes for its backward pass, and keeps nothing."""

    def save_for_backward(self, *tensors: Any) -> None:
        """No backward pass follows."""
