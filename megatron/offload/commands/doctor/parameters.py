# SPDX-License-Identifier: Apache-2.0
"""Parameters' part of `doctor`: whether --parameter-offload-* and --layer-major-* can work here.

Rates are measured for states and activations, which go to the same drives.
"""

from __future__ import annotations

import argparse

from megatron.offload.commands.doctor.check import Check, Section, Status, in_words
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import (
    layer_major_config_from_args,
    parameters_config_from_args,
)
from megatron.offload.tiers.checksum import load_checksum
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.purpose import PARAMETERS


def parameters_sections(args: argparse.Namespace) -> list[Section]:
    """One section, or none where no such flag is given.

    Args:
        args: parsed flags of `add_offload_arguments`.
    """
    checks = []
    try:
        config = parameters_config_from_args(args)
        steps = layer_major_config_from_args(args)
        if config.enabled:
            value = f"{PARAMETERS.flags.removesuffix('-')} {config.mode}"
            checks.append(Check("parameters", Status.OK, f"{value}; no flag contradicts another"))
        if steps.enabled:
            checks.append(Check("layer-major steps", Status.OK, f"{steps.units} units"))
        if config.uses_ssd:
            load_checksum(PARAMETERS)
            for directory in config.directories:
                UnlinkedFile(directory, config.io, PARAMETERS).close()
    except ConfigurationError as error:
        checks.append(Check("parameters", Status.PROBLEM, *in_words(error)))
    return [Section("Parameters", checks)] if checks else []
