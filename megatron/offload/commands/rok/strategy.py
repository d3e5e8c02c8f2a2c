# SPDX-License-Identifier: Apache-2.0
"""One point of the curve: `Strategy`, what becomes of activations and of how large a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.training_runs.run import Variant
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS, allocators_of
from megatron.offload.sizes import MIB

FIXED = ("off", "recompute", "recompute-ssd", "selective", "ssd", "host", "tiered")
STRATEGIES = (*FIXED, "suffix", "auto")
DEFAULT_STRATEGIES = ("off", "recompute", "recompute-ssd", "selective", "ssd", "suffix", "auto")
TITLES = {
    "off": "keep all",
    "recompute": "recompute all",
    "recompute-ssd": "recompute, inputs on ssd",
    "selective": "selective recompute",
    "ssd": "ssd all",
    "host": "host all",
    "tiered": "host + ssd all",
    "suffix": "suffix kept",
    "auto": "auto",
}


@dataclass(frozen=True)
class Strategy(Variant):
    """A variant for one batch size.

    Attributes:
        micro_batch_size: of the training.
        budget_bytes: that `auto` keeps to; None for the others.
        num_moved: with `suffix`, layers that go to SSDs, from the first on; None for the others.
        is_rule: that number is the one by SSDTrain's rule.
    """

    micro_batch_size: int = 1
    budget_bytes: int | None = None
    num_moved: int | None = None
    is_rule: bool = False

    @property
    def name(self) -> str:
        """Name of the strategy in file names and differences."""
        detail = ""
        if self.budget_bytes is not None:
            detail = f"-{self.budget_bytes}"
        elif self.num_moved is not None:
            detail = f"-{self.num_moved}"
        return f"mb{self.micro_batch_size}-{self.placement}{detail}@{self.allocator}"

    @property
    def title(self) -> str:
        """Name of the strategy in tables."""
        if self.budget_bytes is not None:
            return f"auto, {self.budget_bytes / MIB:.0f} MiB"
        if self.num_moved is not None:
            rule = "TBA's rule: " if self.is_rule else ""
            return f"{rule}first {self.num_moved} to ssd"
        return TITLES[self.placement]

    def flags(self, plan: Path | None = None, *, replay: bool) -> list[str]:
        """The trainer's flags for the strategy.

        Args:
            plan: the file with the plan of a suffix.
            replay: with replay, where activation offload is on.
        """
        flags = self._flags(plan)
        mode = flags[flags.index("--activation-offload") + 1]
        return (
            flags if mode == "off" else [*flags, "--activation-replay", "on" if replay else "off"]
        )

    def _flags(self, plan: Path | None) -> list[str]:
        batch = ["--micro-batch-size", str(self.micro_batch_size)]
        if self.placement == "auto":
            assert self.budget_bytes is not None
            budget = ["--activation-memory-budget", str(self.budget_bytes)]
            return [*batch, "--activation-offload", "auto", *budget]
        if self.placement == "suffix":
            return [*batch, "--activation-offload", "auto", "--activation-offload-plan", str(plan)]
        return [*batch, *PLACEMENT_FLAGS[self.placement]]


def fixed_strategies(
    names: Sequence[str], micro_batch_size: int, *, both_allocators: bool
) -> list[Strategy]:
    """Those that neither a budget nor a profile is needed for."""
    return [
        Strategy(name, allocator, micro_batch_size)
        for name in names
        if name in FIXED
        for allocator in allocators_of(name, both=both_allocators)
    ]


def budgets_between(low_bytes: float, high_bytes: float, number: int) -> list[int]:
    """Evenly spaced, both ends left out, in whole MiB."""
    step = (high_bytes - low_bytes) / (number + 1)
    return [round((low_bytes + step * (n + 1)) / MIB) * MIB for n in range(number)]
