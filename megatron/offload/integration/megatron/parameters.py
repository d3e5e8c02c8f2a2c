# SPDX-License-Identifier: Apache-2.0
"""Parameters of a Megatron model's layers on tiers: `offload_model_parameters`.

Hooks of its layers bring them, as for any model (`integration/torch/parameter_offload.py`). With
optimizer states that are offloaded too, or the distributed optimizer, they are updated unit by
unit; else all of them are in memory during the optimizer's step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.errors import GRADIENTS_PREFIX, PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.megatron import refused
from megatron.offload.integration.megatron.bucket_gradients import BucketGradients
from megatron.offload.integration.megatron.gathered_parameters import GatheredParameters
from megatron.offload.integration.megatron.main_weights import optimizers_in
from megatron.offload.integration.megatron.model_states import LOADING, READING
from megatron.offload.integration.megatron.scaling import scale_in_place
from megatron.offload.integration.megatron.unit_steps import check_steps_by_units, step_by_units
from megatron.offload.integration.megatron.versions import check_version
from megatron.offload.integration.open_parameters import changing
from megatron.offload.integration.own_attributes import beginning_with, put, within
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.units import units_of
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.parameters.parameter_places import Part


def _nothing() -> None:
    pass


class ModelParameters:
    """Offload of a Megatron model's parameters, from `offload_model_parameters` until `close`.

    Args:
        offload: what moves them; None: they stay.
        undo: called at the end, the last one first.
        restored: called when parameters are in memory again.
    """

    def __init__(
        self,
        offload: ParameterOffload | None = None,
        undo: Sequence[Callable[[], None]] = (),
        restored: Callable[[], None] = _nothing,
    ) -> None:
        self._offload = offload
        self._undo = contextlib.ExitStack()
        for one in undo:
            self._undo.callback(one)
        self._restored = restored

    def bring_gradients(self) -> None:
        """Reads all gradients back into `main_grad`, where they stay until the optimizer's step.

        Raises:
            LostStateError: some could not be read back.
        """
        if self._offload is not None:
            self._offload.bring_gradients()

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
        if offload is None:
            return
        self._undo.close()
        try:
            offload.close(restore=restore)
        finally:
            if restore:
                self._restored()


def check_model_parameters(config: ParametersConfig, settings: Any) -> None:
    """Raises ConfigurationError for flags that cannot be combined with parameter offload.

    Args:
        config: what the flags ask for.
        settings: Megatron's flags, or its settings of the model or of data parallelism.
    """
    if not config.enabled:
        return
    refused.PARAMETERS.check(settings)
    if config.offloads_gradients:
        refused.GRADIENTS.check(settings)
        if not getattr(settings, "overlap_grad_reduce", True):
            raise ConfigurationError(
                f"{GRADIENTS_PREFIX}--gradient-offload on needs --overlap-grad-reduce: without, "
                "Megatron has all gradients in one bucket, and reduces it when backward is over"
            )
    if getattr(settings, "use_distributed_optimizer", False):
        refused.SHARDED_PARAMETERS.check(settings)


def check_gradients(ddp_config: Any, layer_major: LayerMajorConfig | None) -> None:
    """Raises ConfigurationError where gradients of a built model cannot leave.

    Args:
        ddp_config: of DistributedDataParallel; None: the model is not wrapped in it.
        layer_major: how steps run.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if ddp_config is None:
        raise ConfigurationError(
            f"{GRADIENTS_PREFIX}--gradient-offload on needs a model wrapped in Megatron's "
            "DistributedDataParallel, which adds gradients up; wrap it, or leave it off"
        )
    if layer_major is None or not layer_major.enabled:
        raise ConfigurationError(
            f"{GRADIENTS_PREFIX}--gradient-offload on needs --layer-major-units: in other steps "
            "gradients are complete when the last micro-batch's backward is over; give both"
        )
    if clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm:
        raise ConfigurationError(
            f"{GRADIENTS_PREFIX}--gradient-offload on cannot be combined with the norm kernel of "
            "Transformer Engine or Apex, which wants all gradients in memory at once; uninstall "
            "both, or leave it off"
        )


def offload_model_parameters(
    config: ParametersConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    layer_major: LayerMajorConfig | None = None,
    updates_by_units: bool = False,
) -> ModelParameters:
    """Keeps the parameters of a model's layers where `config` says while others compute.

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
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    check_model_parameters(config, ddp_config)
    settings = next(m.config for m in model_chunks[0].modules() if hasattr(m, "config"))
    check_model_parameters(config, settings)
    # Imported here, because it imports megatron-core, which not every user has installed.
    from megatron.offload.integration.megatron.layer_hooks import layer_names

    num_units = layer_major.num_units if layer_major is not None and layer_major.enabled else None
    layers = list(layer_names(model_chunks))
    if not layers:
        return _of_no_layers(settings)
    units = units_of(layers, num_units)
    if config.offloads_gradients:
        check_gradients(ddp_config, layer_major)
    if config.offloads_gradients or getattr(ddp_config, "use_distributed_optimizer", False):
        return _by_units(config, units, model_chunks, optimizer, updates_by_units)
    offload = ParameterOffload(units, config)
    if updates_by_units:
        return ModelParameters(offload)
    params = [param for layer in layers for param in layer.parameters()]
    return ModelParameters(offload, [within(optimizer, "step", lambda: changing(params))])


def _of_no_layers(settings: Any) -> ModelParameters:
    """What a pipeline stage of the embedding or the loss alone has: all stays in memory.

    Raises:
        ConfigurationError: there are no other stages.
    """
    if settings.pipeline_model_parallel_size == 1:
        raise ConfigurationError(
            f"{PARAMETERS_PREFIX}the model has no TransformerBlock of megatron-core with layers, "
            "whose parameters are what is offloaded; use --parameter-offload off"
        )
    return ModelParameters()


def _by_units(
    config: ParametersConfig,
    units: Mapping[torch.nn.Module, int],
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    updates_by_units: bool,
) -> ModelParameters:
    """The same where the optimizer's step goes unit by unit, and gradients perhaps too.

    With the distributed optimizer ranks update shards and bring them together.
    """
    optimizers = optimizers_in(optimizer)
    for one in optimizers:
        check_steps_by_units(one)
    gathered: GatheredParameters | None = None
    if model_chunks[0].ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
        gathered = GatheredParameters(model_chunks, optimizers)
    parts = {} if gathered is None else gathered.parts
    offload = ParameterOffload(
        units,
        config,
        parts=parts,
        gradients=functools.partial(BucketGradients, model_chunks, optimizers, parts),
        gradient_bytes=_gradient_bytes(units, None if gathered is None else parts),
    )
    assert offload.window is not None
    undo: list[Callable[[], None]] = []
    if gathered is not None:
        gathered.connect(offload.window, optimizer)
        undo.append(gathered.disconnect)
    if config.offloads_gradients:
        undo.append(scale_in_place())
    for one in optimizers:
        undo += [] if updates_by_units else [step_by_units(one)]
        shown = beginning_with(offload.expose)
        undo += [within(one, name, shown) for name in (*READING, *LOADING)]
        undo.append(_read_beside(one, parts))
    return ModelParameters(offload, undo, gathered.restore if gathered is not None else _nothing)


def _read_beside(optimizer: Any, parts: Mapping[torch.Tensor, Part]) -> Callable[[], None]:
    """Has a checkpoint be read into new memory where Megatron would have it read into shards.

    Megatron copies what was read to the optimizer once the model's parameters are loaded. These
    move then, unit by unit, and what a shard has shown before is no longer its memory.

    Args:
        optimizer: Megatron's.
        parts: this rank's shards, by the model's parameters.

    Returns:
        A function that undoes it.
    """
    build = optimizer.sharded_state_dict
    signature = inspect.signature(build)

    @functools.wraps(build)
    def call(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        found = build(*args, **kwargs)
        if signature.bind(*args, **kwargs).arguments.get("is_loading"):
            shown = {part.tensor.data_ptr() for part in parts.values()}
            tensors = [one for one in nested_values(found) if isinstance(one, ShardedTensor)]
            for one in tensors:
                if one.data is not None and one.data.data_ptr() in shown:
                    one.data = torch.empty_like(one.data)
        return found

    return put(optimizer, "sharded_state_dict", call)


def _gradient_bytes(
    units: Mapping[torch.nn.Module, int], parts: Mapping[torch.Tensor, Part] | None
) -> int:
    """Bytes of the layers' gradients on this rank, in fp32."""
    params = {param for layer in units for param in layer.parameters()}
    if parts is None:
        return sum(4 * param.numel() for param in params)
    return sum(4 * (parts[one].end - parts[one].start) for one in params if one in parts)
