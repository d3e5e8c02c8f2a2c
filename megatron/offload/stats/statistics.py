# SPDX-License-Identifier: Apache-2.0
"""What one training step moved: `StepStatistics`. The engine counts, the trainer's logger shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class StepStatistics:
    """Counters of one step of one rank; bytes of activations unless said otherwise."""

    offloaded_bytes: int = 0  # handed to a tier
    offloaded_storages: int = 0
    deduplicated_bytes: int = 0  # saved again while already taken: moved no second time
    bit_packed_bytes: int = 0  # of masks, of which one bit moves for each byte: not moved
    already_hooked: int = 0  # saved tensors left alone because they have other code's hooks
    unsupported: int = 0  # saved tensors that are more than their bytes: subclasses, sparse, nested
    unsupported_bytes: int = 0  # of those
    small_bytes: int = 0  # saved in storages smaller than the settings say: they stay
    kept_bytes: int = 0  # saved in layers that the settings or a plan keep in memory
    other_device_bytes: int = 0  # saved on another device than the one whose activations move
    held_bytes: int = 0  # saved in storages that were found to outlive the step: they stay
    recast_bytes: int = 0  # copies of weights in another type: made again, not moved
    replayed_bytes: int = 0  # saved in storages that are computed again from others: not moved
    num_replays: int = 0  # how often one was, or was decoded
    encoded_bytes: int = 0  # saved in storages that a codec keeps and moves in fewer bits
    unreplayed_bytes: int = 0  # with replay: saved in the other storages, wherever these go
    foreign_bytes: int = 0  # saved in memory that is no block of torch's allocator: it stays
    rejected_bytes: int = 0  # wanted by the policy, but the tiers were full or failed
    recomputed_layers: int = 0  # whose activations were dropped, over all micro-batches
    recomputed_parts: int = 0  # likewise: attention or MLP alone
    forwarded_bytes: int = 0  # needed while still in memory: no read
    written_bytes: int = 0  # reached the SSDs
    read_bytes: int = 0  # came from the SSDs
    host_written_bytes: int = 0  # reached host memory
    host_read_bytes: int = 0  # came from host memory
    write_bytes_per_s: float = 0.0  # of the SSDs together, over the last seconds of use
    read_bytes_per_s: float = 0.0
    # Device time; on a device that runs behind, of the last known step: `compute_waits.py`.
    stall_s: float = 0.0  # compute stood still for a read
    write_wait_s: float = 0.0  # compute stood still in forward: too many bytes were in flight
    tier_used_bytes: int = 0  # at the step's end: 0 unless a graph or a write is still alive
    reserved_bytes: int = 0  # by the device's allocator, at the step's end; 0: it does not say
    fragmented_bytes: int = 0  # of those, what the step never used at once: more than its peak
    long_lived_bytes: int = 0  # found in this step to outlive it: excluded from now on
    # `unreplayed_bytes` by the operation that made the storages.
    unreplayed_by_operation: dict[str, int] = dataclasses.field(default_factory=dict)

    def add_unreplayed(self, operation: str, num_bytes: int) -> None:
        """Counts a storage that is not computed again, by the operation that made it."""
        self.unreplayed_bytes += num_bytes
        made_bytes = self.unreplayed_by_operation.get(operation, 0)
        self.unreplayed_by_operation[operation] = made_bytes + num_bytes

    def as_dict(self) -> dict[str, int | float]:
        """The counters by name, as plain numbers for `metrics.jsonl`."""
        counters = dataclasses.asdict(self)
        del counters["unreplayed_by_operation"]
        return counters
