# SPDX-License-Identifier: Apache-2.0
"""The tiers that model states go to: `open_state_tiers`."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.offload.device.device import Device
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.space import check_budgets, measure_drives, space_for
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.host_budget import host_budget_bytes
from megatron.offload.tiers.purpose import STATES
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier


def open_state_tiers(
    config: StatesConfig, device: Device, *, sizes: Sequence[int], num_local_ranks: int
) -> list[Tier]:
    """Opens the tiers of a configuration; a bucket goes to the first that takes it.

    Args:
        config: with states that move.
        device: where states are in memory, for the optimizer's step. On an accelerator the window
            is a tier in host memory, see Note [The window].
        sizes: bytes of each parameter's states; the SSDs are made to have room for them now.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget, the space or a missing package.
    """
    tiers: list[Tier] = []
    num_bytes, space_bytes, budget = sum(sizes), space_for(sizes, config.bucket_bytes), 0
    if config.uses_host:
        budget = host_budget_bytes(config.host_budget, num_local_ranks, memory_limit(), STATES)
    check_budgets(config, num_bytes, budget)
    try:
        if config.uses_host:
            tiers.append(HostTier(budget, device=device, purpose=STATES))
        elif not device.is_host and (config.window_bytes or config.mode == "auto"):
            window_bytes = config.window_bytes
            if config.mode == "auto":  # it takes nothing from the device
                most = host_budget_bytes(
                    config.host_budget, num_local_ranks, memory_limit(), STATES
                )
                window_bytes = min(most, num_bytes)
            window = HostTier(
                window_bytes, device=device, purpose=STATES, flag="window", overflows=True
            )
            tiers.append(window)
        if config.uses_ssd:
            tiers.append(
                SsdTier(
                    config.directories,
                    reserve_bytes=max(space_bytes - budget, 0),
                    budget_bytes=config.ssd_budget_bytes,
                    num_threads=config.threads,
                    io=config.io,
                    write_bytes_per_s=config.write_bytes_per_s,
                    verify=True,  # the only copy
                    device=device,
                    purpose=STATES,
                )
            )
            measure_drives(config, num_bytes)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return [TieredTier(tiers)] if config.uses_host and config.uses_ssd else tiers
