# SPDX-License-Identifier: Apache-2.0
"""What one training step moved: `StepStatistics`. The engine counts, the trainer's logger shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class StepStatistics:
    """Counters of one step of one rank. Bytes of activations unless said otherwise."""

    offloaded_bytes: int = 0  # handed to a tier
    offloaded_storages: int = 0
    deduplicated_bytes: int = 0  # saved again while already taken: moved no second time
    kept_bytes: int = 0  # wanted by the policy, but the tier was full or degraded
    forwarded_bytes: int = 0  # needed while still in memory: no read
    written_bytes: int = 0  # reached the drive
    read_bytes: int = 0  # came from the drive
    stall_s: float = 0.0  # compute waited for a read
    write_wait_s: float = 0.0  # forward waited because too many bytes were in flight
    tier_used_bytes: int = 0  # still taken on the tier when the step ended: 0 unless a graph lives
    long_lived_bytes: int = 0  # found in this step to outlive it: excluded from now on

    def as_dict(self) -> dict[str, int | float]:
        """Plain numbers for `metrics.jsonl`."""
        return dataclasses.asdict(self)
