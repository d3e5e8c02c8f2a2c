# SPDX-License-Identifier: Apache-2.0
"""What a rank of a training command may take on this machine: `limits_of`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.offload.commands.tune.candidates import Limits
from megatron.offload.commands.tune.training_command import TrainingCommand
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.tiers.host_budget import host_budget_bytes

_ROOM_TO_USE = 0.98  # of what is free: files are made of blocks


def limits_of(command: TrainingCommand, num_local_ranks: int) -> Limits:
    """Budgets of the command's flags, and the room that its drives have now.

    Raises:
        ConfigurationError: the host budget is more than the machine has.
        OSError: a directory cannot be looked at.
    """
    offload = command.offload
    device = command.device_budget_bytes
    host: float = math.inf
    if offload.uses_host:
        host = host_budget_bytes(offload.host_budget, num_local_ranks, memory_limit())
    ssd: float = math.inf
    if offload.uses_ssd:
        ssd = _free_bytes(offload.directories) * _ROOM_TO_USE / num_local_ranks
        if offload.ssd_budget_bytes is not None:
            ssd = min(ssd, offload.ssd_budget_bytes)
    return Limits(math.inf if device is None else device, host, ssd)


def _free_bytes(directories: Sequence[Path]) -> int:
    """Free bytes of the file systems that hold these directories, each counted once."""
    free: dict[int, int] = {}
    for directory in directories:
        place = directory.resolve()
        while not place.exists():
            place = place.parent
        free[place.stat().st_dev] = shutil.disk_usage(place).free
    return sum(free.values())
