# SPDX-License-Identifier: Apache-2.0
"""One door for all that trains a model: `offload` opens what was asked for, in the right order.

`Offload` holds the handles of `offload_activations`, `offload_optimizer`, `offload_parameters` and
`LayerMajor`, and closes them. It moves nothing itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.open_streams import Handle
from megatron.offload.integration.torch.door import offload_activations
from megatron.offload.integration.torch.layer_major import LayerMajor
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.optimizer import OptimizerOffload, offload_optimizer
from megatron.offload.integration.torch.parameter_offload import (
    ParameterOffload,
    offload_parameters,
)
from megatron.offload.layer_major.config import LayerMajorConfig

B = TypeVar("B")
Settings = bool | str | Mapping[str, Any] | None


class Offload(Handle):
    """What `offload` has opened of one model and its optimizer. Also a context manager.

    Attributes:
        activations: the handle of `offload_activations`; None: activations stay.
        optimizer_states: the handle of `offload_optimizer`; None: states stay.
        parameters: the handle of `offload_parameters`; None: parameters and gradients stay.
        layer_major: runs steps unit by unit; None: the training loop runs them as usual.
    """

    def __init__(self) -> None:
        self.activations: ActivationOffload | None = None
        self.optimizer_states: OptimizerOffload | None = None
        self.parameters: ParameterOffload | None = None
        self.layer_major: LayerMajor | None = None

    def step(
        self, micro_batches: Iterable[B], loss_of: Callable[[B], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs a step unit by unit, see `LayerMajor.step`; the losses, detached.

        Raises:
            ConfigurationError: `offload` was not asked for layer-major steps.
        """
        if self.layer_major is None:
            raise ConfigurationError(
                "step() runs layer-major steps, which offload() was not asked for; give "
                "layer_major=True, or call the model and loss.backward() as usual"
            )
        return self.layer_major.step(micro_batches, loss_of)

    @property
    def statistics(self) -> dict[str, dict[str, int | float]]:
        """The counters of each stream by its name: bytes that moved, seconds that compute waited.

        Of activations those of the last step, see `StepStatistics`; of states and parameters those
        since the beginning.
        """
        return {name: dict(handle.statistics) for name, handle in self._streams()}

    def summary(self) -> str:
        """What the last step moved of activations, as a few lines; empty before the first."""
        return "" if self.activations is None else self.activations.summary()

    def report(self) -> str:
        """Where activations, states, parameters and gradients are, and what moved, as text."""
        return "\n\n".join(handle.report() for _, handle in self._streams())

    def close(self, *, restore: bool = True) -> None:
        """Leaves model and optimizer as they were, and gives memory and disk space back.

        Args:
            restore: brings states and parameters back to memory; without, those that are away are
                lost.

        Raises:
            LostStateError: states or parameters could not be read back. All else is closed.
        """
        with contextlib.ExitStack() as closing:  # the last one is called first, errors or not
            if self.parameters is not None:
                closing.callback(self.parameters.close, restore=restore)
            if self.optimizer_states is not None:
                closing.callback(self.optimizer_states.close, restore=restore)
            if self.activations is not None:
                closing.callback(self.activations.close)
            if self.layer_major is not None:
                closing.callback(self.layer_major.close)

    def _streams(
        self,
    ) -> Iterable[tuple[str, ActivationOffload | OptimizerOffload | ParameterOffload]]:
        for name in ("activations", "optimizer_states", "parameters"):
            handle = getattr(self, name)
            if handle is not None:
                yield name, handle


def offload(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    activations: Settings = True,
    optimizer_states: Settings = None,
    parameters: Settings = False,
    gradients: bool = False,
    layer_major: bool | int | Mapping[str, Any] = False,
    layers: Iterable[str | type[torch.nn.Module]] | None = None,
) -> Offload:
    """Moves what a training keeps in memory to SSDs or host memory, all through one handle.

        handle = offload(model, optimizer, "/mnt/nvme0")

    is all that a training loop needs: activations and the optimizer's states move. Losses,
    gradients, weights and states stay the same, bit for bit, until `close()` or the end of a `with`
    block. Each of the streams is False (it stays), True (it moves, on the SSD with a directory and
    else to host memory), a mode (`"host"`), or a dict of the settings that its own function takes
    (`{"mode": "auto", "memory_budget_bytes": "12GiB"}`).

    Args:
        model: any module; with `parameters` or `layer_major` as these ask for.
        optimizer: whose states move; None: none do.
        directory: an existing directory on an SSD, or several on different SSDs, for all streams
            whose settings name no other.
        activations: see `offload_activations`.
        optimizer_states: see `offload_optimizer`. Default: they move if there is an optimizer.
        parameters: of the layers, see `offload_parameters`.
        gradients: of the layers wait beside their parameters; needs `parameters`, `layer_major`.
        layer_major: `handle.step(micro_batches, loss_of)` runs a step unit by unit, see
            `LayerMajor`; a number: of units, which parameters then move in as well; a dict: of
            `units` and `order`, as the flags have them (`evaluation` is for the flags alone).
        layers: what counts as a layer, see `offload_activations`; of all streams whose settings say
            nothing else.

    Raises:
        ConfigurationError: a directory, a setting, the model or the optimizer cannot work; says
            why. Nothing is offloaded then.
    """
    units, alternates = _steps(layer_major)
    layer_major, units = bool(layer_major) and units != 0, units or None
    if optimizer_states is None:
        optimizer_states = optimizer is not None
    elif optimizer is None and _moves(optimizer_states):
        raise ConfigurationError("optimizer_states= needs the optimizer; give it after the model")
    if gradients and not (_moves(parameters) and layer_major):
        raise ConfigurationError(
            "gradients=True needs parameters= and layer_major=: gradients of a unit leave when all "
            "micro-batches have passed it"
        )
    if directory is not None and not isinstance(directory, str | os.PathLike):
        directory = list(directory)
    layers = None if layers is None else list(layers)
    handle = Offload()
    try:
        if _moves(parameters):  # before the optimizer's states, which follow its units
            settings = {"units": units, "layers": layers, **_settings(parameters, directory)}
            if gradients:
                settings.setdefault("gradients", "on")
            handle.parameters = offload_parameters(model, **settings)
        if _moves(activations):
            settings = {"layers": layers, **_settings(activations, directory)}
            handle.activations = offload_activations(model, **settings)
        if optimizer is not None and _moves(optimizer_states):
            settings = _settings(optimizer_states, directory)
            handle.optimizer_states = offload_optimizer(optimizer, **settings)
        if layer_major:
            handle.layer_major = LayerMajor(
                model, units, layers=layers, offload=handle.activations, alternates=alternates
            )
    except BaseException:
        handle.close()
        raise
    return handle


def _moves(settings: Settings) -> bool:
    return settings is not None and settings is not False and settings != "off"


def _steps(layer_major: bool | int | Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many units were asked for, and whether every second one takes the batches backwards.

    None: each layer is one; 0: steps are as usual.
    """
    if not isinstance(layer_major, Mapping):
        return None if isinstance(layer_major, bool) else layer_major, False
    with LayerMajorConfig.speaking_of_settings():
        config = LayerMajorConfig.from_settings({"units": "auto", **layer_major})
    return config.num_units if config.enabled else 0, config.alternates


def _settings(settings: Settings, directory: Any) -> dict[str, Any]:
    """The arguments of a stream's own function."""
    if isinstance(settings, Mapping):
        own = dict(settings)
    else:
        own = {} if settings is True else {"mode": settings}
    if own.get("mode") != "host" and "directories" not in own:  # a host tier takes no directory
        own.setdefault("directory", directory)
    return own
