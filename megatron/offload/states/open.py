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
from megatron.offload.tiers.open import closed_on_error, open_only_copies
from megatron.offload.tiers.purpose import STATES
from megatron.offload.tiers.tier import Tier


def open_state_tiers(
    config: StatesConfig, device: Device, *, sizes: Sequence[int], num_local_ranks: int
) -> list[Tier]:
    """Opens the tiers of a configuration; a bucket goes to the first that has room.

    Args:
        config: with states that move.
        device: where states are in memory, for the optimizer's step. On an accelerator the window
            is a tier in host memory, see Note [The window].
        sizes: bytes of each parameter's states; the SSDs reserve room for them now.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget, the space or a missing package.
    """
    num_bytes, budget, most = sum(sizes), 0, 0
    if config.uses_host or config.mode == "auto":
        most = host_budget_bytes(config.host_budget, num_local_ranks, memory_limit(), STATES)
    if config.uses_host:
        budget = most
    check_budgets(config, num_bytes, budget)
    with closed_on_error() as tiers:
        if not config.uses_host and not device.is_host:
            # With auto as much as host memory has: the window takes no device memory.
            window_bytes = min(most, num_bytes) if config.mode == "auto" else config.window_bytes
            if window_bytes:
                window = HostTier(
                    window_bytes, device=device, purpose=STATES, flag="window", overflows=True
                )
                tiers.append(window)
        tiers += open_only_copies(
            config,
            device,
            STATES,
            reserve_bytes=max(space_for(sizes, config.bucket_bytes) - budget, 0),
            num_local_ranks=num_local_ranks,
        )
        if config.uses_ssd:
            measure_drives(config, num_bytes)
    return tiers
