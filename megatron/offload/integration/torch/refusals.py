# SPDX-License-Identifier: Apache-2.0
"""What the doors cannot serve, and why: models and optimizers by the names of their classes.

`docs/refusals.md` is generated from these tables, among others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.offload.device.cuda import is_graphed
from megatron.offload.errors import PARAMETERS_PREFIX, PREFIX, ConfigurationError
from megatron.offload.layer_set import LayerSet

MODELS = {
    "DataParallel": (
        "it runs copies of the model in threads of one process; use DistributedDataParallel"
    ),
    "PipelineEngine": (
        "it runs forward and backward passes by a schedule of its own, past the model's forward; "
        "use DeepSpeed's other engines, or Megatron's pipelines with the launcher"
    ),
}
_LOOKS_AT_ALL = "its update of a parameter needs sums over all parameters"
# Whose update of a parameter needs more than that parameter's gradient and state.
OPTIMIZERS = {
    **dict.fromkeys(
        [
            *("Prodigy", "ProdigyPlusScheduleFree"),
            *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
            *("FusedLAMB", "FusedMixedPrecisionLamb", "Lamb"),
        ],
        _LOOKS_AT_ALL,
    ),
    "LBFGS": "it looks at all parameters as one vector",
    "SparseAdam": "its states change where its sparse gradients are only",
    "DeepSpeedOptimizerWrapper": "DeepSpeed has its own, `offload_optimizer` in its configuration",
}
# Wrappers that count the passes of a whole model, and what runs layer-major steps in their place.
STEP_WRAPPERS = {
    "DistributedDataParallel": "FSDP2 (fully_shard)",
    "FullyShardedDataParallel": "FSDP2 (fully_shard)",
    "DeepSpeedEngine": "a plain model",
}


def check_models(models: Sequence[torch.nn.Module], prefix: str = PREFIX) -> None:
    """Makes sure that forward hooks can serve these models.

    Args:
        models: one or several.
        prefix: of a refusal, that of what was asked for.

    Raises:
        ConfigurationError: they cannot, or one of them is offloaded already.
    """
    if not models:
        raise ConfigurationError(f"{prefix}there is no model; give a module or a list of modules")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"{prefix}{type(model).__name__} is no torch.nn.Module; give the model that is "
                "trained"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{prefix}{type(model).__name__} is a TorchScript module, which takes no Python "
                "hooks; give the module that it was made of"
            )
        for one in type(model).__mro__:
            if one.__name__ in MODELS:
                raise ConfigurationError(
                    f"{prefix}{one.__name__} cannot be combined with offload: "
                    f"{MODELS[one.__name__]}"
                )


def check_parts(layers: Iterable[torch.nn.Module]) -> None:
    """Makes sure that parameters of these layers can leave.

    Raises:
        ConfigurationError: a part of a layer replays a CUDA graph, or is TorchScript.
    """
    for part in (part for layer in layers for part in layer.modules()):
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}{part.original_name} is TorchScript, which takes no hooks and "
                "finds no parameters that come and go; give its layer the module that the script "
                "was made of, or name other layers with layers="
            )
        if is_graphed(part):
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}{type(part).__name__} is replayed from a CUDA graph, which "
                "has the addresses of its parameters in it, and on a tier they have none; leave "
                "out make_graphed_callables"
            )


def check_named(layers: Iterable[str], **sets: LayerSet | None) -> None:
    """Makes sure that the layers which settings name are there.

    Args:
        layers: the names of those that were found.
        sets: by the name of the setting; None: it names none.

    Raises:
        ConfigurationError: one is not.
    """
    layers = list(layers)
    for name, chosen in sets.items():
        if chosen is None or (missing := chosen.missing(layers)) is None:
            continue
        without = [one for one in layers if not one.rpartition(".")[2].isdecimal()]
        if len(without) == len(layers) > 0:
            raise ConfigurationError(
                f"{name} names layers by numbers, and {without[0] or 'the model itself'} has none "
                "in its name; put the layers into a torch.nn.ModuleList or Sequential"
            )
        there = f"the layers are {layers[0]} to {layers[-1]}" if layers else "no layers were found"
        raise ConfigurationError(
            f"{name} names layer {missing}, and {there}; numbers are those in the names of "
            "modules, and 'all' names every layer"
        )
