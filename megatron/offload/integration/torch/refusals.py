# SPDX-License-Identifier: Apache-2.0
"""What the door cannot serve, each with a sentence that says why: `check_models` and others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.offload.device.cuda import is_graphed
from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError

_REFUSED = {
    "DataParallel": (
        "it runs copies of the model in threads of one process; use DistributedDataParallel"
    ),
    "PipelineEngine": (
        "it runs forward and backward passes by a schedule of its own, past the model's forward; "
        "use DeepSpeed's other engines, or Megatron's pipelines with the launcher"
    ),
}


def check_models(models: Sequence[torch.nn.Module]) -> None:
    """Makes sure that forward hooks can serve these models.

    Raises:
        ConfigurationError: they cannot, or one of them is offloaded already.
    """
    if not models:
        raise ConfigurationError("there is no model; give a module or a list of modules")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"{type(model).__name__} is no torch.nn.Module; give the model that is trained"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{type(model).__name__} is a TorchScript module, which takes no Python hooks; "
                "give the module that it was made of"
            )
        for one in type(model).__mro__:
            if one.__name__ in _REFUSED:
                raise ConfigurationError(
                    f"{one.__name__} cannot be combined with offload: {_REFUSED[one.__name__]}"
                )


def check_not_graphed(layers: Iterable[torch.nn.Module]) -> None:
    """Makes sure that no part of layers whose parameters are to leave replays a CUDA graph.

    Raises:
        ConfigurationError: one does.
    """
    for part in (part for layer in layers for part in layer.modules()):
        if is_graphed(part):
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}{type(part).__name__} is replayed from a CUDA graph, which "
                "has the addresses of its parameters in it, and on a tier they have none; leave "
                "out make_graphed_callables"
            )
