# SPDX-License-Identifier: Apache-2.0
"""The three functions of megatron-core that call us: `decorate`.

`install` calls it. One that carries our decorator already, in a patched Megatron, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.offload.integration.megatron import calls
from megatron.offload.integration.megatron.seam import Seam

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_DECORATORS = (
    (
        Seam("megatron.core.transformer.transformer_layer", "TransformerLayer.forward", ("self",)),
        calls.around_layer,
    ),
    (
        Seam(_SCHEDULES, "forward_step", ("num_microbatches", "current_microbatch", "vp_stage")),
        calls.around_forward_step,
    ),
    (
        Seam(_SCHEDULES, "backward_step", ("input_tensor", "output_tensor")),
        calls.around_backward_step,
    ),
)


def decorate() -> list[Callable[[], None]]:
    """Decorates Megatron's functions. Nothing is changed unless all are as expected.

    Returns:
        What puts the functions back that were decorated.

    Raises:
        ConfigurationError: a function is missing or lacks a parameter.
    """
    found = [(seam, seam.find(), decorator) for seam, decorator in _DECORATORS]
    return [
        seam.replace(decorator(function))
        for seam, function, decorator in found
        if not calls.is_decorated(function)
    ]
