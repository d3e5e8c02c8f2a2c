# SPDX-License-Identifier: Apache-2.0
"""Offload of all streams of one training with Megatron: `Requested`, and `OffloadedTraining`.

The launcher and the bundled trainer go through these: which checks run before a model is built, and
in which order streams are opened and closed, is said here alone.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import (
    config_from_args,
    layer_major_config_from_args,
    parameters_config_from_args,
    states_config_from_args,
)
from megatron.offload.integration.megatron.connect import MegatronOffload, check, install
from megatron.offload.integration.megatron.model_states import (
    ModelStates,
    check_model_states,
    offload_model_states,
)
from megatron.offload.integration.megatron.parameters import (
    ModelParameters,
    check_model_parameters,
    offload_model_parameters,
)
from megatron.offload.integration.megatron.refused import CHUNKED_LOSS, TILED_MLP
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig


@dataclass(frozen=True)
class Requested:
    """What the flags of a training ask for."""

    activations: OffloadConfig
    states: StatesConfig
    parameters: ParametersConfig
    layer_major: LayerMajorConfig

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Of parsed flags.

        Raises:
            ConfigurationError: our flags contradict each other.
        """
        return cls(
            config_from_args(args),
            states_config_from_args(args),
            parameters_config_from_args(args),
            layer_major_config_from_args(args),
        )

    @property
    def changes_passes(self) -> bool:
        """Whether forward and backward run in another way than Megatron's."""
        return self.activations.enabled or self.activations.in_pieces or self.layer_major.enabled

    @property
    def moves(self) -> bool:
        """Whether any bytes go to a tier."""
        return self.activations.enabled or self.states.enabled or self.parameters.enabled

    @property
    def enabled(self) -> bool:
        """Whether anything is asked for."""
        return self.changes_passes or self.moves

    def check_flags(self, args: argparse.Namespace) -> None:
        """Checks what is asked for against Megatron's flags, before a model is built.

        Raises:
            ConfigurationError: they do not fit together.
        """
        if self.activations.chunks_loss:
            CHUNKED_LOSS.check(args)
        if self.activations.tiles_mlps:
            TILED_MLP.check(args)
        check_model_states(self.states, args)
        check_model_parameters(self.parameters, args)

    def check_passes(self, settings: Any, *, reserve_bytes: int, num_local_ranks: int) -> None:
        """Checks the rest against the model's `TransformerConfig`; see `check`.

        Args:
            settings: of the model.
            reserve_bytes: SSD space that each rank will allocate for activations.
            num_local_ranks: ranks on this machine.

        Raises:
            ConfigurationError: the version, a setting or the directory cannot work.
        """
        check(
            self.activations,
            settings,
            reserve_bytes=reserve_bytes,
            num_local_ranks=num_local_ranks,
            layer_major=self.layer_major,
        )


class OffloadedTraining:
    """All streams of one training, opened in the order in which they have to be.

    Args:
        requested: by the flags.
        run_directory: with `auto`, what was measured is written there; None: nowhere.

    Attributes:
        states: of the optimizer; none before `offload_states`.
        parameters: of the model; none before `install`.
    """

    def __init__(self, requested: Requested, run_directory: Path | None = None) -> None:
        self.requested = requested
        self.states = ModelStates()
        self.parameters = ModelParameters()
        self._passes: MegatronOffload | None = None
        self._run_directory = run_directory

    def offload_states(self, optimizer: Any) -> None:
        """Has the states of an optimizer move from now on, once.

        A checkpoint is loaded behind this: else all that is loaded would be in memory first.

        Args:
            optimizer: what `get_megatron_optimizer` gave.

        Raises:
            ConfigurationError: the optimizer, a setting or the directory cannot work.
        """
        if not self.states.enabled:
            self.states = offload_model_states(self.requested.states, optimizer)

    def install(
        self,
        model_chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        reserve_bytes: int,
        num_local_ranks: int,
    ) -> None:
        """Has everything else move, once a checkpoint was loaded; states too if they do not yet.

        Args:
            model_chunks: of this rank, wrapped in DistributedDataParallel or not.
            optimizer: what `get_megatron_optimizer` gave.
            reserve_bytes: SSD space to allocate for activations.
            num_local_ranks: ranks on this machine, which share its memory.

        Raises:
            ConfigurationError: the version, the model, a setting or a directory cannot work.
        """
        requested = self.requested
        self.offload_states(optimizer)
        self.parameters = offload_model_parameters(
            requested.parameters,
            model_chunks,
            optimizer,
            layer_major=requested.layer_major,
            updates_by_units=requested.states.enabled,
        )
        self._passes = install(
            requested.activations,
            model_chunks,
            reserve_bytes=reserve_bytes,
            num_local_ranks=num_local_ranks,
            run_directory=self._run_directory,
            states=self.states,
            layer_major=requested.layer_major,
        )

    @property
    def passes(self) -> MegatronOffload:
        """What goes around forward and backward.

        Raises:
            ConfigurationError: a model trains that `install` has not got.
        """
        if self._passes is None:
            raise ConfigurationError(
                "a model trains for which offload was not installed; call install() with it before"
            )
        return self._passes

    def summary(self) -> str:
        """A few lines for the end of a run; empty where nothing moved."""
        activations = "" if self._passes is None else self._passes.summary()
        return "\n".join(filter(None, (activations, self.parameters.summary())))

    def close(self) -> None:
        """Ends all streams: activations, then parameters, then states, which were opened first.

        States and parameters that are on a tier are gone: training has ended.
        """
        with contextlib.ExitStack() as last_first:  # each, also if one before it raises
            last_first.callback(self.states.close, restore=False)
            last_first.callback(self.parameters.close, restore=False)
            if self._passes is not None:
                last_first.callback(self._passes.close)
