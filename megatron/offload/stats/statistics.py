# SPDX-License-Identifier: Apache-2.0
"""What one training step moved: `StepStatistics`. The engine counts, the trainer's logger shows.

`add_up` makes one of the counters of several micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of several micro-batches these are not summed up: of the first kind the last one counts, of the
# second the largest. Sums of the third are 0, which says that there is none, unless all have one.
_LATEST = ("write_bytes_per_s", "read_bytes_per_s", "tier_used_bytes", "plans")
_LARGEST = ("reserved_bytes", "fragmented_bytes", "predicted_peak_bytes", "measured_peak_bytes")
_COMPLETE = ("predicted_step_s", "measured_step_s")


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
    held_bytes: int = 0  # saved in storages that something else holds until then: they stay
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


def add_up(micro_batches: Sequence[Mapping[str, int | float]]) -> dict[str, int | float]:
    """The counters of a step from those of its micro-batches.

    Args:
        micro_batches: as `ActivationOffload.statistics` gives them, in order.

    Returns:
        Sums; the last or the largest value of what is no sum; empty if there is no micro-batch.
    """
    total: dict[str, int | float] = {}
    for name in micro_batches[-1] if micro_batches else ():
        values = [one[name] for one in micro_batches if name in one]
        if name in _LATEST:
            total[name] = values[-1]
        elif name in _LARGEST:
            total[name] = max(values)
        else:
            total[name] = 0.0 if name in _COMPLETE and not all(values) else sum(values)
    return total
