# SPDX-License-Identifier: Apache-2.0
"""The tiers that parameters go to: `open_parameter_tiers`."""

from __future__ import annotations

from megatron.offload.device.device import Device
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.tiers.open import open_only_copies
from megatron.offload.tiers.purpose import PARAMETERS
from megatron.offload.tiers.tier import Tier


def open_parameter_tiers(
    config: ParametersConfig,
    device: Device,
    *,
    num_bytes: int,
    largest_bytes: int,
    num_local_ranks: int,
) -> list[Tier]:
    """Opens the tiers of a configuration; a unit goes to the first that has room.

    Args:
        config: with parameters that move.
        device: where layers compute.
        num_bytes: of all units, and of gradients that move. Without a host budget the SSDs reserve
            room for them now, and for one unit more: it is written before its old block is freed.
        largest_bytes: of a unit.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget, the space or a missing package.
    """
    return open_only_copies(
        config,
        device,
        PARAMETERS,
        reserve_bytes=0 if config.uses_host else num_bytes + largest_bytes,
        num_local_ranks=num_local_ranks,
    )
