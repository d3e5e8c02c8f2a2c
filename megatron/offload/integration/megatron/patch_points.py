# SPDX-License-Identifier: Apache-2.0
"""The functions of megatron-core that call us: `decorate`.

`install` calls it. One that carries our decorator already, in a patched Megatron, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.offload.integration.megatron import decorators
from megatron.offload.integration.megatron.patch_point import PatchPoint

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_DECORATORS = (
    (
        PatchPoint(
            "megatron.core.transformer.transformer_layer", "TransformerLayer.forward", ("self",)
        ),
        decorators.around_layer,
    ),
    (
        PatchPoint(
            _SCHEDULES, "forward_step", ("num_microbatches", "current_microbatch", "vp_stage")
        ),
        decorators.around_forward_step,
    ),
    (
        PatchPoint(_SCHEDULES, "backward_step", ("input_tensor", "output_tensor")),
        decorators.around_backward_step,
    ),
    (
        PatchPoint(_SCHEDULES, "check_first_val_step", ("first_val_step", "forward_only", "cond")),
        decorators.around_first_val_step,
    ),
)


def decorate() -> list[Callable[[], None]]:
    """Decorates Megatron's functions. Nothing is changed unless all are as expected.

    Returns:
        A function that undoes the decoration.

    Raises:
        ConfigurationError: a function is missing or lacks a parameter.
    """
    found = [(patch_point, patch_point.find(), decorator) for patch_point, decorator in _DECORATORS]
    return [
        patch_point.replace(decorator(function))
        for patch_point, function, decorator in found
        if not decorators.is_decorated(function)
    ]
