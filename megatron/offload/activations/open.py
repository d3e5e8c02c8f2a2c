# SPDX-License-Identifier: Apache-2.0
"""The tiers that activations go to: `open_tiers`, and `check_tiers` before training.

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
from megatron.offload.tiers.host_budget import host_budget_bytes, pinned_pool_bytes
from megatron.offload.tiers.open import closed_on_error, open_host, open_ssd
from megatron.offload.tiers.purpose import ACTIVATIONS
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
    """Opens a tier for every placement that the mode allows; returns them by placement.

    Args:
        config: must have offload enabled.
        device: where activations live.
        reserve_bytes: SSD space to allocate at once, unless the budget says otherwise.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget or a missing package; the message says which.
    """
    with closed_on_error() as tiers:
        if config.uses_host:
            tiers.append(open_host(config, device, ACTIVATIONS, num_local_ranks))
        if config.uses_ssd:
            kind: Callable[..., SsdTier] = GdsTier if config.io == "gds" else SsdTier
            if config.io != "gds" and not device.is_host:
                pool = pinned_pool_bytes(config.pinned_bytes, num_local_ranks, memory_limit())
                if pool:
                    kind = functools.partial(BouncingTier, pool_bytes=pool)
            budget = config.ssd_budget_bytes
            reserve_bytes = reserve_bytes if budget is None else budget
            verify = config.verify == "checksum"
            tiers.append(open_ssd(config, device, ACTIVATIONS, reserve_bytes, verify, kind))
    places = [Placement.HOST] * config.uses_host + [Placement.SSD] * config.uses_ssd
    found: dict[Placement, Tier] = dict(zip(places, tiers, strict=True))
    if len(tiers) > 1:
        found[Placement.TIERED] = TieredTier(tiers)
    return found


def check_tiers(config: OffloadConfig, *, reserve_bytes: int, num_local_ranks: int) -> None:
    """Checks, before training, that the tiers can be opened.

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
