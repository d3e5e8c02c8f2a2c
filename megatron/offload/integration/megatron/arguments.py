# SPDX-License-Identifier: Apache-2.0
"""The flags in a Megatron-style argument parser. Trainers call these three functions."""

from __future__ import annotations

import argparse
import copy

from megatron.offload.config import OffloadConfig
from megatron.offload.integration.settings_file import add_settings_argument
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig


def add_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of activations and of model states; returns the parser, as Megatron's own do.

    They are `--activation-offload*`, `--optimizer-state-*` and `--layer-major-*`,
    `--parameter-offload*`, and a few more; `--offload-settings` names a file of all of them.
    """
    OffloadConfig.add_arguments(parser)
    StatesConfig.add_arguments(parser)
    LayerMajorConfig.add_arguments(parser)
    ParametersConfig.add_arguments(parser)
    add_settings_argument(parser)
    return parser


def make_plain(args: argparse.Namespace) -> None:
    """Writes what our flags hold as text where it is no number.

    Checkpoints hold the flags. They are read where this package is not installed, and torch reads
    no class from them that it does not know.
    """
    for action in add_offload_arguments(argparse.ArgumentParser())._actions:
        value = getattr(args, action.dest, None)
        if value is not None and not isinstance(value, str | int | float):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            setattr(args, action.dest, text)


def config_from_args(args: argparse.Namespace) -> OffloadConfig:
    """The config that the parsed flags ask for. Raises ConfigurationError (a ValueError)."""
    return OffloadConfig.from_args(args)


def layer_major_config_from_args(args: argparse.Namespace) -> LayerMajorConfig:
    """The order of a step that the parsed flags ask for. Raises ConfigurationError."""
    return LayerMajorConfig.from_args(args)


def parameters_config_from_args(args: argparse.Namespace) -> ParametersConfig:
    """Where parameters wait; in the directories of activations if the flags name none.

    Raises:
        ConfigurationError: the flags contradict each other.
    """
    return ParametersConfig.from_args(_with_those_of_activations(args, "parameter_offload", "dir"))


def states_config_from_args(args: argparse.Namespace) -> StatesConfig:
    """The same of model states, which go where activations go if the flags do not say.

    Raises:
        ConfigurationError: the flags contradict each other.
    """
    kinds = ("dir", "threads", "drive_tbw")
    return StatesConfig.from_args(_with_those_of_activations(args, "optimizer_state", *kinds))


def _with_those_of_activations(
    args: argparse.Namespace, stream: str, *kinds: str
) -> argparse.Namespace:
    """The flags, with activations' own in the place of those of a stream that were not given."""
    args = copy.copy(args)
    for kind in kinds:
        if not getattr(args, f"{stream}_{kind}", None):
            given = getattr(args, f"activation_offload_{kind}", None)
            setattr(args, f"{stream}_{kind}", given)
    return args
