# SPDX-License-Identifier: Apache-2.0
"""Where the memory of a run is, once it is set up: `MemoryRow`, a row of `memory_table`.

Integrations print the table before the first step. Then nothing of activations is there yet and
often nothing of the optimizer's states: these are what the first steps will fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from megatron.offload.sizes import format_size
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind on one rank, by where they are; `note` is for people."""

    name: str
    device_bytes: int = 0
    host_bytes: int = 0
    ssd_bytes: int = 0
    note: str = ""


def memory_table(rows: Sequence[MemoryRow], *, heading: str) -> str:
    """The rows and their sum, as lines of text."""
    total = MemoryRow(
        "together",
        sum(one.device_bytes for one in rows),
        sum(one.host_bytes for one in rows),
        sum(one.ssd_bytes for one in rows),
    )
    lines = [
        (
            one.name,
            *(_size(size) for size in (one.device_bytes, one.host_bytes, one.ssd_bytes)),
            one.note,
        )
        for one in (*rows, total)
    ]
    headings = (heading, "device", "host", "SSD", "")
    alignment = ("left", "right", "right", "right", "left")
    return tabulate(
        lines, headings, tablefmt="plain", disable_numparse=True, colalign=alignment
    ).rstrip()


TierOf = Callable[[torch.Tensor], Tier | None]


def _in_memory(_: torch.Tensor) -> None:
    return None


def held_by_parameters(
    params: Iterable[torch.Tensor],
    tier_of: TierOf = _in_memory,
    gradient_tier_of: TierOf = _in_memory,
) -> list[MemoryRow]:
    """Weights and their gradients, those that will be among them.

    Args:
        params: of a model or an optimizer.
        tier_of: gives the tier that has a parameter's bytes; None: they are in memory.
        gradient_tier_of: the same of its gradient.
    """
    params = list(params)
    trained = [param for param in params if param.requires_grad]
    return [
        _held("weights", [(param.nbytes, tier_of(param)) for param in params]),
        _held("gradients", [(_gradient_bytes(p), gradient_tier_of(p)) for p in trained]),
    ]


def _held(name: str, sizes: Iterable[tuple[int, Tier | None]]) -> MemoryRow:
    """Bytes with the tier that each is on; what has no room there is in memory."""
    device, on_tiers = 0, dict[Tier, int]()
    for num_bytes, tier in sizes:
        if tier is None:
            device += num_bytes
        else:
            on_tiers[tier] = on_tiers.get(tier, 0) + num_bytes
    host = ssd = 0
    for tier, num_bytes in on_tiers.items():
        on_host, on_ssd = _divided(tier, num_bytes)
        host, ssd = host + on_host, ssd + on_ssd
        device += num_bytes - on_host - on_ssd
    return MemoryRow(name, device, host, ssd)


def held_by_states(parts: Iterable[OptimizerStates]) -> MemoryRow:
    """States of optimizers, as they are between two steps when writes have ended."""
    device = host = ssd = 0
    for states in parts:
        staying_bytes = states.staying_bytes
        device += staying_bytes
        away_bytes = states.expected_bytes - staying_bytes
        for tier in states.tiers:
            on_host, on_ssd = _divided(tier, away_bytes)
            host, ssd, away_bytes = host + on_host, ssd + on_ssd, away_bytes - on_host - on_ssd
        device += away_bytes  # no tier has room
    return MemoryRow("optimizer states", device, host, ssd)


def _divided(tier: Tier, num_bytes: int) -> tuple[int, int]:
    """Of so many bytes, those that are in host memory and on SSDs, as far as there is room."""
    if isinstance(tier, TieredTier):
        on_host = on_ssd = 0
        for index, one in enumerate(tier.tiers):
            left = num_bytes - on_host - on_ssd
            host, ssd = _divided(one, left // (len(tier.tiers) - index))
            on_host, on_ssd = on_host + host, on_ssd + ssd
        return on_host, on_ssd
    limit = tier.limit_bytes
    taken = num_bytes if limit is None else min(num_bytes, limit)
    if isinstance(tier, HostTier):
        return taken, 0
    return (0, taken) if isinstance(tier, SsdTier) else (0, 0)


def _gradient_bytes(param: torch.Tensor) -> int:
    """Of the gradient that it has, or will have; Megatron's is in a buffer, perhaps in fp32."""
    found = getattr(param, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        found = param.grad
    return param.nbytes if found is None else found.nbytes


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "-"


def state_bytes(optimizers: Iterable[Any]) -> int:
    """Bytes of the tensors in optimizers' states that are in memory."""
    return sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
    )
