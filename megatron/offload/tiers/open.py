# SPDX-License-Identifier: Apache-2.0
"""Opens the tiers that settings ask for: `open_host`, `open_ssd`, `open_only_copies`.

Each stream has an `open.py` of its own that calls these.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from megatron.offload.device.device import Device
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.sizes import format_size
from megatron.offload.tier_settings import TierSettings
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.host_budget import PROMISED, host_budget_bytes
from megatron.offload.tiers.purpose import Purpose
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier

logger = logging.getLogger(__name__)


def open_only_copies(
    settings: TierSettings,
    device: Device,
    purpose: Purpose,
    *,
    reserve_bytes: int,
    num_local_ranks: int,
) -> list[Tier]:
    """Opens tiers for bytes that have no other copy; these go to the first that has room.

    Args:
        settings: of the stream, whose mode is not `off`.
        device: where its bytes are used.
        purpose: of the tiers.
        reserve_bytes: SSD space to allocate now, so that a disk that is too small is noticed.
        num_local_ranks: processes on this machine, which share its memory.

    Raises:
        ConfigurationError: a directory, a budget, the space or a missing package.
    """
    with closed_on_error() as tiers:
        if settings.uses_host:
            tiers.append(open_host(settings, device, purpose, num_local_ranks))
        if settings.uses_ssd:
            tiers.append(open_ssd(settings, device, purpose, reserve_bytes, verify=True))
    return [TieredTier(tiers)] if len(tiers) > 1 else tiers


def open_host(
    settings: TierSettings, device: Device, purpose: Purpose, num_local_ranks: int
) -> HostTier:
    """Opens the tier in host memory. Raises ConfigurationError: there is less memory."""
    limit = memory_limit()
    budget = host_budget_bytes(settings.host_budget, num_local_ranks, limit, purpose)
    if not budget and settings.host_budget is None:  # who asks for none wants none
        others = " and ".join(dict.fromkeys(one.purpose.bytes_name for one in PROMISED.tiers()))
        logger.warning(
            "%shost memory takes nothing of %s: %s of %s (%s) is available%s; what has no other "
            "tier stays in device memory; give %s, and smaller budgets to what else is there",
            purpose.prefix,
            purpose.bytes_name,
            format_size(limit.available_bytes),
            format_size(limit.total_bytes),
            limit.source,
            f" and promised to {others}" if others else "",
            purpose.flag("host-budget"),
        )
    return HostTier(budget, device=device, purpose=purpose)


def open_ssd(
    settings: TierSettings,
    device: Device,
    purpose: Purpose,
    reserve_bytes: int,
    verify: bool,
    kind: Callable[..., SsdTier] = SsdTier,
) -> SsdTier:
    """Opens the tier on SSDs.

    Args:
        settings: of the stream.
        device: where its bytes are used.
        purpose: of the tier.
        reserve_bytes: allocated now.
        verify: whether it keeps checksums.
        kind: of tier.

    Raises:
        ConfigurationError: a directory, the space or a missing package.
    """
    return kind(
        settings.directories,
        reserve_bytes=reserve_bytes,
        budget_bytes=settings.ssd_budget_bytes,
        num_threads=settings.threads,
        io=settings.io,
        write_bytes_per_s=settings.write_bytes_per_s,
        verify=verify,
        device=device,
        purpose=purpose,
    )


@contextlib.contextmanager
def closed_on_error() -> Iterator[list[Tier]]:
    """A context with a list for tiers; closes them if opening the next one fails."""
    tiers: list[Tier] = []
    try:
        yield tiers
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
