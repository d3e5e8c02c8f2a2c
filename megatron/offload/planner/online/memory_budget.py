# SPDX-License-Identifier: Apache-2.0
"""How much memory activations may take under the plans of a run: `MemoryBudget`.

The planner calls `decide` before the first plan, and shows it steps that may have taken more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.config import OffloadConfig
from megatron.offload.device.cuda_allocator import keeps_fragments
from megatron.offload.device.device import Device
from megatron.offload.planner.online.consensus import RankConsensus
from megatron.offload.planner.online.drift import OVER_BUDGET, MeasuredStep
from megatron.offload.planner.online.shared_memory import SharesMemory, divided_budget
from megatron.offload.planner.online.stage import Stage
from megatron.offload.sizes import format_size

logger = logging.getLogger(__name__)

_FREE_SHARE = 0.9  # of a GPU's free memory: fragments and what libraries take later
_FREE_SHARE_OF_HOST = 0.5


class MemoryBudget:
    """What plans keep to.

    Attributes:
        num_bytes: the most that activations of a rank may take; None: not decided yet, or only time
            is limited.

    Args:
        config: what was asked for.
        engine: of the run.
        device: whose memory it is.
        stage: what is planned for.
        consensus: of the ranks that plan together.
        beside: what else takes memory that the planner divides; None: nothing does.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: OffloadEngine,
        device: Device,
        stage: Stage,
        consensus: RankConsensus,
        beside: SharesMemory | None,
    ) -> None:
        self.num_bytes: int | None = None
        self._config = config
        self._engine = engine
        self._device = device
        self._stage = stage
        self._consensus = consensus
        self._beside = beside
        self._has_warned = False

    def decide(
        self, activation_bytes: int, seconds_of: Callable[[Sequence[int]], list[float]]
    ) -> None:
        """Sets the budget; if there is a `beside`, memory is divided between it and activations.

        Args:
            activation_bytes: that they took at the most in the steps so far.
            seconds_of: what plans for some budgets take. Raises OffloadError.
        """
        if self._beside is not None:
            self.num_bytes = divided_budget(
                self._beside,
                self._consensus,
                seconds_of,
                activation_bytes=activation_bytes,
                given_bytes=self._config.memory_budget_bytes,
            )
            if self.num_bytes is not None:
                return
        self.num_bytes = budget_bytes_of(
            self._config,
            self._device,
            self._stage,
            self._consensus,
            fragmented_bytes=self._engine.statistics.fragmented_bytes,
        )

    def return_excess(self, last: MeasuredStep | None) -> None:
        """Returns freed memory: a resident set includes what the allocator keeps, more with each
        step."""
        if self.num_bytes is not None and last is not None and last.peak_bytes > self.num_bytes:
            self._device.return_freed_memory()

    def warn_of_excess(self, last: MeasuredStep | None) -> None:
        """Warns once: a plan from a file is followed even where it takes more than the budget."""
        budget_bytes = self._config.memory_budget_bytes
        if budget_bytes is None or last is None or self._has_warned:
            return
        if last.peak_bytes > budget_bytes * OVER_BUDGET:
            self._has_warned = True
            logger.warning(
                "activation offload: activations took %s, more than the budget of %s; the plan %s "
                "is followed as it is: remove the file to have another one made",
                format_size(last.peak_bytes),
                format_size(budget_bytes),
                self._config.plan_file,
            )


def budget_bytes_of(
    config: OffloadConfig,
    device: Device,
    stage: Stage,
    consensus: RankConsensus,
    *,
    fragmented_bytes: int,
) -> int | None:
    """The most bytes that activations of a rank may take; None: only time is limited.

    Args:
        config: without a budget and a slowdown it is a part of the memory that is free now.
        device: whose memory that is.
        stage: says how many ranks share a CPU's memory.
        consensus: the least of the group counts.
        fragmented_bytes: of what the allocator holds, what the last measured step did not use at
            once. It counts as taken where its pieces need not fit anything, which is too careful
            where an earlier step or the optimizer used more.
    """
    if config.memory_budget_bytes is not None or config.max_slowdown is not None:
        return config.memory_budget_bytes
    free, left_out = device.free_bytes(), ""
    if keeps_fragments(device.device):
        free = max(free - fragmented_bytes, 0)
        left_out = f", without {format_size(fragmented_bytes)} in pieces"
    ranks = stage.num_local_ranks if device.is_host else 1
    share = _FREE_SHARE_OF_HOST if device.is_host else _FREE_SHARE
    (negative,) = consensus.largest([-float(int(free * share) // ranks)])
    budget_bytes = -int(negative)
    logger.info(
        "activation offload: no --activation-memory-budget is given; activations may take %s, "
        "%.0f %% of the %s that are free%s%s",
        format_size(budget_bytes),
        100 * share,
        format_size(free),
        left_out,
        f", shared by {ranks} ranks" if ranks > 1 else "",
    )
    return budget_bytes
