# SPDX-License-Identifier: Apache-2.0
"""The tiers that a configuration asks for: `open_tiers`, and `check_tiers` before training.

The engine opens them; integrations check them before a model is built. Nothing else decides which
kind of tier stands behind a placement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron.offload.activations.placement.policy import Placement
from megatron.offload.config import OffloadConfig
from megatron.offload.device.cuda import has_cuda
from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.tiers.bounce import BouncingTier
from megatron.offload.tiers.checksum import load_checksum
from megatron.offload.tiers.file import check_room
from megatron.offload.tiers.gds import GdsTier
from megatron.offload.tiers.gds_status import gds_status
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.host_budget import host_budget_bytes, pinned_pool_bytes
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier


def open_tiers(
    config: OffloadConfig,
    device: Device,
    *,
    reserve_bytes: int,
    num_local_ranks: int,
) -> dict[Placement, Tier]:
    """Opens a tier for every placement that the mode allows; the tiers by placement.

    Args:
        config: must have offload enabled.
        device: where activations live.
        reserve_bytes: SSD space to allocate at once, unless the budget says otherwise.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget or a missing package; the message says which.
    """
    tiers: dict[Placement, Tier] = {}
    try:
        if config.uses_host:
            budget_bytes = host_budget_bytes(config.host_budget, num_local_ranks, memory_limit())
            tiers[Placement.HOST] = HostTier(budget_bytes, device=device)
        if config.uses_ssd:
            kind: Callable[..., SsdTier] = GdsTier if config.io == "gds" else SsdTier
            if config.io != "gds" and not device.is_host:
                pool = pinned_pool_bytes(config.pinned_bytes, num_local_ranks, memory_limit())
                if pool:
                    kind = functools.partial(BouncingTier, pool_bytes=pool)
            budget = config.ssd_budget_bytes
            tiers[Placement.SSD] = kind(
                config.directories,
                reserve_bytes=reserve_bytes if budget is None else budget,
                budget_bytes=budget,
                num_threads=config.threads,
                io=config.io,
                write_bytes_per_s=config.write_bytes_per_s,
                verify=config.verify == "checksum",
                device=device,
            )
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    if len(tiers) > 1:
        tiers[Placement.TIERED] = TieredTier(list(tiers.values()))
    return tiers


def check_tiers(config: OffloadConfig, *, reserve_bytes: int, num_local_ranks: int) -> None:
    """Checks everything about the tiers that can be found wrong before training.

    Takes the arguments of `open_tiers`.

    Raises:
        ConfigurationError: as `open_tiers`.
    """
    if config.uses_host:
        host_budget_bytes(config.host_budget, num_local_ranks, memory_limit())
    if config.uses_ssd:
        pinned_pool_bytes(config.pinned_bytes, num_local_ranks, memory_limit())
        if config.io == "gds":
            status = gds_status(has_gpu=has_cuda())
            if not status.available:
                raise ConfigurationError(str(status))
        if config.verify == "checksum":
            load_checksum()
        wanted = reserve_bytes if config.ssd_budget_bytes is None else config.ssd_budget_bytes
        for directory in config.resolved().directories:
            wanted_here = wanted * num_local_ranks // len(config.directories)
            check_room(directory, "auto" if config.io == "gds" else config.io, wanted_here)
