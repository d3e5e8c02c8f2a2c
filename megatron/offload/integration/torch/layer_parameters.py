# SPDX-License-Identifier: Apache-2.0
"""Whether a layer still has the parameters that were offloaded: `LayerParameters`.

`parameter_offload.py` asks before the layer computes, and before its state is saved or loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError

logger = logging.getLogger(__name__)


class LayerParameters:
    """The parameters of a layer, as they are now."""

    def __init__(self, layer: torch.nn.Module, moves: Callable[[torch.nn.Parameter], bool]) -> None:
        self._found = [
            (f"{prefix}.{name}".lstrip("."), module, name, param, param.dtype)
            for prefix, module in layer.named_modules()
            for name, param in module.named_parameters(recurse=False)
        ]
        self._moves = moves
        self._has_warned = False

    def check(self) -> None:
        """Warns once if one has another parameter in its place, which is in memory.

        `load_state_dict(assign=True)` puts others there, and so does a script that sets one.
        `torch.export` puts some without values there while it looks at the model.

        Raises:
            ConfigurationError: one has another type, or `torch.jit.trace` runs the layer.
        """
        if torch._C._is_tracing():
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}torch.jit.trace, and the ONNX export on top of it, takes "
                "parameters from their places, where those that are on a tier have no values; "
                "call close() of the handle before, or use torch.export"
            )
        if torch.compiler.is_exporting():
            return
        for name, module, attribute, param, had in self._found:
            if param.dtype != had:
                raise ConfigurationError(
                    f"{PARAMETERS_PREFIX}{name} had type {had} when it was offloaded and has "
                    f"{param.dtype} now; call close() of the handle, then model.to(...), then "
                    "offload_parameters"
                )
            now = module._parameters.get(attribute)
            is_other = now is not None and now is not param
            if is_other and self._moves(param) and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s%s of a %s is another parameter than the one that was offloaded, and stays "
                    "in memory; to offload it, call close() of the handle, then "
                    "offload_parameters; to keep the one that was, fill it in place "
                    "(load_state_dict without assign)",
                    PARAMETERS_PREFIX,
                    name,
                    type(module).__name__,
                )


_ADAPTER_PART = 1 / 16  # of the bytes of a unit's frozen parameters


def adapters_of(layers: Mapping[torch.nn.Module, int]) -> set[torch.nn.Parameter]:
    """The few trained parameters of units that are frozen but for them (LoRA): they stay.

    With them the whole unit would be written after each step of the optimizer.
    """
    units: dict[int, set[torch.nn.Parameter]] = {}
    for layer, number in layers.items():
        units.setdefault(number, set()).update(layer.parameters())
    adapters: set[torch.nn.Parameter] = set()
    for params in units.values():
        trained = {one for one in params if one.requires_grad}
        num_bytes = sum(one.nbytes for one in trained)
        if 0 < num_bytes <= _ADAPTER_PART * sum(one.nbytes for one in params - trained):
            adapters |= trained
    return adapters
