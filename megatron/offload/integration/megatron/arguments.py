# SPDX-License-Identifier: Apache-2.0
"""The flags in a Megatron-style argument parser. Trainers call these two functions."""

from __future__ import annotations

import argparse

from megatron.offload.config import OffloadConfig


def add_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the `--activation-offload*` flags; returns the parser, as Megatron's own do."""
    OffloadConfig.add_arguments(parser)
    return parser


def config_from_args(args: argparse.Namespace) -> OffloadConfig:
    """The config that the parsed flags ask for. Raises ConfigurationError (a ValueError)."""
    return OffloadConfig.from_args(args)
