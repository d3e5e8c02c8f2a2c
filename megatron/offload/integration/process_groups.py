# SPDX-License-Identifier: Apache-2.0
"""How the ranks of process groups come to the same plan: `ProcessGroupConsensus`.

Each integration knows which groups those are. They ask in the same order, so no rank waits for
another that does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_PERIOD_STEPS = 4


class ProcessGroupConsensus:
    """Consensus over process groups: collectives of small tensors on the device that trains.

    Args:
        groups: asked one after the other; groups that share a rank come to the same answer.
        device: where the backend takes tensors.
    """

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        self._device = device
        # NCCL's answer is on the device: to look at it is to wait for all that is queued there.
        self.period_steps = _PERIOD_STEPS if self._groups and device.type != "cpu" else 1

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean of each value over the groups, the same bits on all their ranks."""
        result = list(values)
        for group in self._groups:
            sums = self._reduced(result, dist.ReduceOp.SUM, group)
            # Sums may differ in the last bit from rank to rank; the largest is one of them.
            result = self._reduced(sums, dist.ReduceOp.MAX, group)
            result = [value / dist.get_world_size(group) for value in result]
        return result

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the groups."""
        result = list(values)
        for group in self._groups:
            result = self._reduced(result, dist.ReduceOp.MAX, group)
        return result

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks of the run, in the order of their ranks."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _reduced(self, values: list[float], operation: Any, group: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=operation, group=group)
        result: list[float] = tensor.tolist()
        return result
