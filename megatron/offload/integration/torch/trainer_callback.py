# SPDX-License-Identifier: Apache-2.0
"""What callbacks of trainers share: `TrainerOffload` opens with a training and closes with it.

The callbacks for transformers and Lightning are made of it; it calls `offload_activations`,
`offload_optimizer`, `offload_parameters` and `cache_frozen`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, Unpack

import torch

from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.open_streams import OPEN
from megatron.offload.integration.settings_file import read_settings
from megatron.offload.integration.torch.door import offload_activations
from megatron.offload.integration.torch.frozen_features import FrozenFeatures, cache_frozen
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.optimizer import OptimizerOffload, offload_optimizer
from megatron.offload.integration.torch.parameter_offload import (
    ParameterOffload,
    offload_parameters,
)
from megatron.offload.integration.torch.step_log import StepLog
from megatron.offload.integration.torch.trainer_figures import TrainerFigures
from megatron.offload.keywords import ActivationMode, ActivationSettings
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig
from megatron.offload.values import parse_path, paths_of

logger = logging.getLogger(__name__)

Settings = bool | Mapping[str, Any]
# The offload of an interrupted training, which no trainer ends at a Ctrl-C, would refuse that of
# the next one, which usually has another callback.

# Arguments of the doors that are no settings of their configs.
_OF_DOORS = frozenset(
    {"mode", "layers", "inside_graphs", "run_directory", "metrics_file", "directory"}
    | {"units", "device", "weights", "in_place"}
)


class ActivationArguments(ActivationSettings, total=False):
    """The keywords of `offload_activations`."""

    mode: ActivationMode | None
    layers: Iterable[str | type[torch.nn.Module]] | None
    inside_graphs: bool
    run_directory: str | os.PathLike[str] | None
    metrics_file: str | os.PathLike[str] | None


class TrainerOffload:
    """A training's offload, which a callback opens and closes.

    Args:
        directory: as of `offload_activations`, like everything else.
        optimizer_states: the optimizers' states move too; settings of `offload_optimizer` by name,
            which moves them to the same directory unless one is among them.
        parameters: the same of `offload_parameters`.
        frozen_cache: a directory of `cache_frozen`, or its settings by name, `directory` among
            them; None: frozen parts are computed in every epoch.
        settings: of `offload_activations`, by name.

    Attributes:
        offload: the handle of the training under way, or of the last one.
        others: while one is under way, the handles of parameters and optimizers, in this order.
        figures: of that training; None before the first one.
        log: of its steps, where there is a metrics file.
        frozen: the handle of `cache_frozen`, likewise.

    Raises:
        ConfigurationError: a setting has no such name or value; the directory is looked at when a
            training begins.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        *,
        optimizer_states: Settings = False,
        parameters: Settings = False,
        frozen_cache: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **settings: Unpack[ActivationArguments],
    ) -> None:
        self.offload: ActivationOffload | None = None
        self.frozen: FrozenFeatures | None = None
        self.figures: TrainerFigures | None = None
        self.log: StepLog | None = None
        self._device = torch.device("cpu")
        # As they are called now: the working directory may be another one when training begins.
        self._directory = directory = None if directory is None else paths_of(directory)
        self._settings = settings
        self._of_states = _given(optimizer_states, directory)
        self._of_parameters = _given(parameters, directory)
        self._of_frozen: dict[str, Any] | None = None
        if frozen_cache is not None:
            if not isinstance(frozen_cache, Mapping):
                frozen_cache = {"directory": frozen_cache}
            place = parse_path(frozen_cache.get("directory"))
            self._of_frozen = {**frozen_cache, "directory": place}
        _check(OffloadConfig, {"directory": directory, **settings})
        _check(StatesConfig, self._of_states)
        _check(ParametersConfig, self._of_parameters)
        if self._of_parameters is not None and self._of_parameters.get("gradients") == "on":
            raise ConfigurationError(
                "a trainer runs its own steps, and gradients wait on a tier in layer-major steps "
                "alone; leave gradients out of the settings of parameters"
            )
        self.others: list[OptimizerOffload | ParameterOffload] = []

    @classmethod
    def from_settings(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], **others: Any
    ) -> Self:
        """The callback with the settings of a TOML file, or of a mapping like it.

            callbacks=[OffloadCallback.from_settings("offload.toml")]

        Args:
            source: as of `read_settings`.
            others: arguments that no file has, such as `layers` or `frozen_cache`.

        Raises:
            ConfigurationError: the file cannot be read, or one of its settings cannot be.
        """
        given = read_settings(source)
        if given.pop("layer_major"):
            raise ConfigurationError(
                "a trainer runs its own steps; leave layer_major out of the settings"
            )
        activations = given.pop("activations") or {"mode": "off"}
        return cls(**given, **activations, **others)

    def open(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        *,
        counts_tokens: bool = True,
    ) -> None:
        """Offloads this model, and ends what a training of it that failed has left open.

        Args:
            model: that is about to be trained.
            optimizers: of its parameters.
            device: where it computes.
            counts_tokens: the metrics file counts the tokens that the model is called with; False:
                `begin_step` is told the batch.
        """
        self.close()
        modules = set(model.modules())
        for other in OPEN.trainers:
            if other.offload is not None and other.offload.is_of(modules):
                logger.warning(
                    "activation offload: a training of %s began before and has not ended; the one "
                    "that begins now ends its offload",
                    type(model).__name__,
                )
                other.close()
        OPEN.trainers.add(self)
        try:
            self._open(model, optimizers)
        except BaseException:  # not all trainers tell their callbacks of an error
            self.close()
            raise
        assert self.offload is not None
        self._device = device
        self.log = self.offload.told_steps(counts_tokens=counts_tokens)
        self.figures = TrainerFigures(device)

    def _open(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        if self._of_parameters is not None:  # before the states, which follow its units
            self.others.append(offload_parameters(model, **self._of_parameters))
        if self._of_frozen is not None:
            self.frozen = cache_frozen(model, **self._of_frozen)
        self.offload = offload_activations(model, self._directory, **self._settings)
        if self._of_states is not None:
            for optimizer in optimizers:
                self.others.append(offload_optimizer(optimizer, **self._of_states))

    def close(self) -> None:
        """Ends it; the handle still has its statistics and its summary."""
        OPEN.trainers.discard(self)
        if self.offload is not None:
            self.offload.close()
        if self.frozen is not None:
            self.frozen.close()
        while self.others:
            self.others.pop().close()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, and of what is pickled with a trainer: the settings, none of the handles."""
        none = dict.fromkeys(("offload", "frozen", "figures", "log"))
        return vars(self) | none | {"others": []}

    def end_training(self, say: Callable[[str], object], *, is_first: bool) -> None:
        """Ends it and says what its steps moved: in a line by `say`, in full in the log.

        Args:
            say: shows a person a line.
            is_first: this process writes the log.
        """
        self.close()
        if self.offload is None or self.figures is None:
            return
        say(self.figures.closing())
        if is_first:
            logger.info("%s", self.offload.summary())
        if self.frozen is not None and is_first:
            logger.info("%s", self.frozen.report())

    def begin_step(self, batch: Any = None) -> None:
        """Begins to measure an optimizer step, or the next micro-batch of one.

        Args:
            batch: that comes next, where the model's calls do not show its tokens.
        """
        if self.figures is not None:
            self.figures.begin_step()
        if self.log is not None:
            if not self.log.is_under_way:
                self.log.begin(self._device)
            if batch is not None:
                self.log.add_tokens(batch)

    def add_micro_batch(self, loss: Any = None) -> None:
        """Adds what the last micro-batch moved to the figures.

        Args:
            loss: the part of the step's loss that is this micro-batch's; None: it is not known.
        """
        if self.figures is not None and self.offload is not None:
            self.figures.add(self.offload.statistics)
            if self.log is not None:
                self.log.add(self.offload.statistics)
                self.log.add_loss(loss)

    def end_step(self, number: int | None) -> None:
        """Adds the peaks of what `begin_step` began.

        Args:
            number: of the optimizer step that has ended; None: it goes on.
        """
        if self.figures is None:
            return
        peaks = self.figures.end_step()
        if self.log is not None:
            self.log.add_peaks(peaks)
            if number is not None:
                self.log.end(number)

    def end_epoch(self) -> None:
        """Says so if no row of the epoch was found; see `FrozenFeatures.end_epoch`."""
        if self.frozen is not None:
            self.frozen.end_epoch()

    def opening(self) -> str:
        """One line for the beginning of a training: what was found, and where it goes."""
        assert self.offload is not None, "open comes first"
        streams = (("optimizer states", self._of_states), ("parameters", self._of_parameters))
        moving = " and ".join(name for name, own in streams if own is not None)
        if not moving:
            return self.offload.opening()
        is_off = self._settings.get("mode") == "off"
        return f"{self.offload.opening()}; {moving} {'move' if is_off else 'too'}"

    def told_of_compilation(self) -> str:
        """A sentence for a trainer that compiles the model as a whole; empty: nothing to say."""
        said = []
        if self._settings.get("mode") not in ("off", "keep") and not self._settings.get(
            "inside_graphs"
        ):
            said.append(
                "what activations move comes back before its compiled backward pass begins and "
                "stays until the end; give inside_graphs=True (PyTorch 2.11 or newer)"
            )
        if self._of_parameters is not None:
            said.append(
                "parameters that move end its graphs at each layer, so results are those of "
                "compiled without offload within rounding alone; leave torch_compile out, and "
                "compile the layers one by one, to have the same bits"
            )
        if not said:
            return ""
        return f"activation offload: the trainer compiles the model as a whole: {'; '.join(said)}"


def _given(settings: Settings, directory: Any) -> dict[str, Any] | None:
    """The arguments of a stream's door; None: the stream stays."""
    if settings is False:
        return None
    own = {} if settings is True else dict(settings)
    if own.get("mode") != "host" and "directories" not in own:  # a host tier takes no directory
        own.setdefault("directory", directory)
    return own


def _check(config: type[OffloadConfig | StatesConfig | ParametersConfig], given: Any) -> None:
    """Raises ConfigurationError where a door would, before data and model are there."""
    if given is None:
        return
    own = {name: value for name, value in given.items() if name not in _OF_DOORS}
    with config.speaking_of_settings():
        config.of_door(given.get("directory"), given.get("mode"), own)
