# SPDX-License-Identifier: Apache-2.0
"""The tiers that parameters go to: `open_parameter_tiers`."""

from __future__ import annotations

from megatron.offload.device.device import Device
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.host_budget import host_budget_bytes
from megatron.offload.tiers.purpose import PARAMETERS
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier


def open_parameter_tiers(
    config: ParametersConfig,
    device: Device,
    *,
    num_bytes: int,
    largest_bytes: int,
    num_local_ranks: int,
) -> list[Tier]:
    """Opens the tiers of a configuration; a unit goes to the first that takes it.

    Args:
        config: with parameters that move.
        device: where layers compute.
        num_bytes: of all units. The SSDs are made to have room for them now, and for one more: a
            unit that has changed is written before its old bytes are given up.
        largest_bytes: of a unit.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget, the space or a missing package.
    """
    tiers: list[Tier] = []
    try:
        if config.uses_host:
            budget = host_budget_bytes(
                config.host_budget, num_local_ranks, memory_limit(), PARAMETERS
            )
            tiers.append(HostTier(budget, device=device, purpose=PARAMETERS))
        if config.uses_ssd:
            tiers.append(
                SsdTier(
                    config.directories,
                    reserve_bytes=0 if config.uses_host else num_bytes + largest_bytes,
                    budget_bytes=config.ssd_budget_bytes,
                    num_threads=config.threads,
                    io=config.io,
                    write_bytes_per_s=config.write_bytes_per_s,
                    verify=True,  # the only copy
                    device=device,
                    purpose=PARAMETERS,
                )
            )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return [TieredTier(tiers)] if len(tiers) > 1 else tiers
