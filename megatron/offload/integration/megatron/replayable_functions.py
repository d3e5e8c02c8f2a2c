# SPDX-License-Identifier: Apache-2.0
"""Says what Megatron's fused activations compute, so that their results need not be saved.

`connect.py` calls it. Their classes are autograd functions, whose nodes do not show it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.activations.saved.replayable_nodes import add_function

# Module below `megatron.core.fusions`, autograd function, the function that its forward pass calls,
# and in which order that one takes what was saved.
_FUNCTIONS = (
    ("fused_bias_gelu", "GeLUFunction", "bias_gelu", (1, 0)),
    ("fused_bias_geglu", "BiasGeGLUFunction", "bias_geglu", (1, 0)),
    ("fused_bias_geglu", "GeGLUFunction", "geglu", (0,)),
    ("fused_bias_swiglu", "BiasSwiGLUFunction", "bias_swiglu", (0, 1)),
    ("fused_bias_swiglu", "SwiGLUFunction", "swiglu", (0,)),
    ("fused_bias_swiglu", "WeightedSwiGLUFunction", "weighted_swiglu", (0, 1)),
    ("fused_weighted_squared_relu", "WeightedSquaredReLUFunction", "weighted_squared_relu", (0, 1)),
)


def add_functions() -> None:
    """Those that this version of Megatron has."""
    for file, name, computed_by, order in _FUNCTIONS:
        try:
            module = importlib.import_module(f"megatron.core.fusions.{file}")
            function, compute = getattr(module, name), getattr(module, computed_by)
        except (ImportError, AttributeError):
            continue
        add_function(function, _in_order(compute, order))


def _in_order(
    compute: Callable[..., torch.Tensor], order: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    def computed(*saved: Any) -> torch.Tensor:
        return compute(*(saved[number] for number in order))

    return computed
