# SPDX-License-Identifier: Apache-2.0
"""Parameters of a Megatron model's layers on tiers: `offload_model_parameters`.

Hooks of its layers bring them, as for any model (`integration/torch/parameter_offload.py`). With
optimizer states that are offloaded too, the optimizer updates them unit by unit; else all of them
are in memory during its step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.megatron.versions import check_version
from megatron.offload.integration.torch.parameter_offload import ParameterOffload, changing
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.units import units_of
from megatron.offload.parameters.config import ParametersConfig


class ModelParameters:
    """Offload of a Megatron model's parameters, from `offload_model_parameters` until `close`.

    Args:
        offload: what moves them; None: they stay.
        undo: called at the end.
    """

    def __init__(
        self, offload: ParameterOffload | None = None, undo: Callable[[], None] = lambda: None
    ) -> None:
        self._offload = offload
        self._undo = undo

    @property
    def statistics(self) -> dict[str, int | float]:
        """See `ParameterOffload.statistics`; empty with offload off."""
        return self._offload.statistics if self._offload is not None else {}

    def summary(self) -> str:
        """A line for the end of a run; empty with offload off."""
        return self._offload.report() if self._offload is not None else ""

    def expose(self) -> None:
        """Shows all parameters in their places until the next forward pass or step."""
        if self._offload is not None:
            self._offload.expose()

    def close(self, *, restore: bool = True) -> None:
        """Ends it.

        Args:
            restore: brings all parameters back to memory before; else those that are away are gone.

        Raises:
            LostStateError: some could not be read back.
        """
        offload, self._offload = self._offload, None
        if offload is not None:
            self._undo()
            offload.close(restore=restore)


def check_model_parameters(config: ParametersConfig, settings: Any) -> None:
    """Raises ConfigurationError for flags that cannot be combined with parameter offload.

    Args:
        config: what the flags ask for.
        settings: Megatron's flags, or its settings of the model or of data parallelism.
    """
    if not config.enabled:
        return
    graphs = getattr(settings, "cuda_graph_impl", None) or "none"
    names = ("enable_cuda_graph", "external_cuda_graph")
    if graphs != "none" or any(getattr(settings, name, False) for name in names):
        raise ConfigurationError(
            f"{PARAMETERS_PREFIX}CUDA graphs cannot be combined with --parameter-offload: a "
            "captured graph has the addresses that parameters had then; drop one"
        )
    if config.offloads_gradients:
        raise ConfigurationError(
            f"{PARAMETERS_PREFIX}--gradient-offload on cannot be used with Megatron, whose "
            "gradients are in one buffer that is never given back; leave it off"
        )
    if getattr(settings, "use_distributed_optimizer", False):
        raise ConfigurationError(
            f"{PARAMETERS_PREFIX}--use-distributed-optimizer cannot be combined with "
            "--parameter-offload: its all-gather wants all parameters in one buffer; drop one"
        )


def offload_model_parameters(
    config: ParametersConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    layer_major: LayerMajorConfig | None = None,
    updates_by_units: bool = False,
) -> ModelParameters:
    """Has the parameters of a model's layers wait where `config` says.

    Call it once the model is trained from: after a checkpoint was loaded, before `install`.

    Args:
        config: with mode `off` nothing is touched.
        model_chunks: the model chunks of this rank, wrapped in DistributedDataParallel or not.
        optimizer: of `get_megatron_optimizer`.
        layer_major: gives the units; without, each layer is one.
        updates_by_units: the optimizer's states are offloaded.

    Raises:
        ConfigurationError: the version, the model or the directory cannot work; says why.
    """
    if not config.enabled:
        return ModelParameters()
    check_version()
    check_model_parameters(config, getattr(model_chunks[0], "ddp_config", None))
    settings = next(m.config for m in model_chunks[0].modules() if hasattr(m, "config"))
    check_model_parameters(config, settings)
    # Here, because it imports megatron-core, which not everybody who imports us has.
    from megatron.offload.integration.megatron.layer_hooks import layer_names

    num_units = layer_major.num_units if layer_major is not None and layer_major.enabled else None
    layers = list(layer_names(model_chunks))
    offload = ParameterOffload(units_of(layers, num_units), config)
    if updates_by_units:
        return ModelParameters(offload)
    params = [param for layer in layers for param in layer.parameters()]
    step = optimizer.step

    @functools.wraps(step)
    def step_with_all(*args: Any, **kwargs: Any) -> Any:
        with changing(params):
            return step(*args, **kwargs)

    optimizer.step = step_with_all
    return ModelParameters(offload, undo=functools.partial(optimizer.__dict__.pop, "step", None))
