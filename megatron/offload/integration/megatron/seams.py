# SPDX-License-Identifier: Apache-2.0
"""The three functions of megatron-core that call us, found and checked: `decorate`.

A function is taken only if it has the name and the parameters that we know; anything else is
refused. One that carries our decorator already, in a patched Megatron, is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron import calls


@dataclass(frozen=True)
class Seam:
    """A function of Megatron, and how it was before we decorated it."""

    owner: Any  # the module or class that has it
    name: str
    original: Callable[..., Any]

    def restore(self) -> None:
        """Puts Megatron's own function back."""
        setattr(self.owner, self.name, self.original)


def decorate() -> list[Seam]:
    """Decorates Megatron's functions. Nothing is changed unless all are as expected.

    Returns:
        What was decorated, to restore.

    Raises:
        ConfigurationError: a function is missing or has other parameters.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = [
        (TransformerLayer, "forward", ("self",), calls.around_layer),
        (
            schedules,
            "forward_step",
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
            calls.around_forward_step,
        ),
        (
            schedules,
            "backward_step",
            ("input_tensor", "output_tensor", "output_tensor_grad"),
            calls.around_backward_step,
        ),
    ]
    for owner, name, parameters, _ in found:
        _check(owner, name, parameters)
    seams = []
    for owner, name, _, decorator in found:
        original = getattr(owner, name)
        if not calls.is_decorated(original):
            setattr(owner, name, decorator(original))
            seams.append(Seam(owner, name, original))
    return seams


def _check(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Raises ConfigurationError unless `owner` has that function, with those parameters first."""
    function = getattr(owner, name, None)
    what = f"{owner.__name__}.{name}"
    if not callable(function):
        raise ConfigurationError(
            f"this megatron-core has no {what}; use megatron-core 0.16.1 or a patched source tree"
        )
    present = tuple(inspect.signature(function).parameters)
    if present[: len(parameters)] != parameters:
        raise ConfigurationError(
            f"{what} of this megatron-core takes ({', '.join(present)}), expected "
            f"({', '.join(parameters)}, ...); use megatron-core 0.16.1 or a patched source tree"
        )
