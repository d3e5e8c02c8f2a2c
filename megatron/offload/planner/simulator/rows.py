# SPDX-License-Identifier: Apache-2.0
"""What the simulation keeps of a step while it runs, as rows of numbers: the step itself, pieces
that go to tiers, channels of tiers, what a device has been given to do, and the log.

Part of the simulation, see `timeline`. `transfers`, `launched` and `step` change them.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator.arrays import Row, Rows
from megatron.offload.planner.simulator.jit import compiled

# What a simulated step keeps count of: one row. -1: no piece.
STEP = np.dtype(
    [
        ("now_s", np.float64),
        ("memory_bytes", np.float64),
        ("peak_bytes", np.float64),
        ("in_flight_bytes", np.float64),
        ("in_flight_limit_bytes", np.float64),
        ("read_wait_s", np.float64),
        ("write_wait_s", np.float64),
        ("recomputed_s", np.float64),
        ("written_bytes", np.float64),
        ("read_bytes", np.float64),
        ("ahead_bytes", np.float64),  # read ahead and not used yet
        ("missing_bytes", np.float64),  # by which the read-ahead proved too small
        ("backward_s", np.float64),  # of a pass without waits, mean of all
        ("tolerated_s", np.float64),  # is left of what the backward pass may wait
        ("has_used", np.int64),
        ("next_ahead", np.int64),  # piece
        ("last_ahead", np.int64),  # piece
        ("urgent", np.int64),  # piece that is read before the others
        ("num_events", np.int64),
        ("num_logged", np.int64),
        ("pass_number", np.int64),
        # Of a device that runs behind its host; all 0 where the host computes.
        ("is_behind", np.int64),
        ("num_launched", np.int64),  # operations, see OPERATION
        ("num_passed", np.int64),  # of those, that the device has done with
        ("is_working", np.int64),  # on the next one, until:
        ("works_until_s", np.float64),
        ("reached_s", np.float64),  # when the device came to the next one
        ("layers_ahead", np.int64),  # that the host has begun and the device has not
        ("most_layers_ahead", np.int64),
        ("used_bytes", np.float64),  # restored, used by the host and not by the device
        ("new_used_bytes", np.float64),  # of those the last ones, without a mark
        ("num_used_marks", np.int64),
        ("waits_to_leave", np.int64),  # piece that is handed over behind the next operation
    ]
)

# A piece that goes to a tier: `next` is the one after it in a queue.
PIECE = np.dtype(
    [
        ("state", np.int64),
        ("is_ahead", np.int64),
        ("size_bytes", np.float64),
        ("largest_bytes", np.float64),  # of it and those before it in its pass
        ("tier", np.int64),
        ("layer", np.int64),
        ("num_storages", np.float64),
        ("next", np.int64),
        ("is_produced", np.int64),  # on the device
    ]
)
# States. In memory until it is queued.
IN_MEMORY, QUEUED, WRITING, ON_TIER, READING, RESTORED = range(6)
TAKEN_BACK = 6  # being written for nothing: it is needed again
DROPPED = 7  # likewise, and it has been used: its memory goes when the write ends
LEFT = 8  # being read, used by the host and given back: the device is still to use it

# A tier's writes or its reads: the piece under way, the queue, and bytes a second, alone and while
# the tier's other channel works too.
CHANNEL = np.dtype(
    [
        ("active", np.int64),  # piece
        ("left_bytes", np.float64),
        ("began_s", np.float64),
        ("first", np.int64),  # piece
        ("last", np.int64),  # piece
        ("bytes_per_s", np.float64),
        ("shared_bytes_per_s", np.float64),
        ("latency_s", np.float64),
        ("used_bytes", np.float64),
        ("capacity_bytes", np.float64),
        ("by_device", np.int64),  # copies that were queued on the device, which cannot be cancelled
    ]
)

# Something that the host has launched, for the device to do in its turn.
OPERATION = np.dtype(
    [
        ("kind", np.int64),
        ("where", np.int64),  # layer (-1: outside) or piece
        ("amount", np.float64),  # seconds or bytes
        ("pass_number", np.int64),
        ("shown_as", np.int64),  # kind of row in the log
    ]
)
# Kinds: it computes, has produced a piece, waits for one, begins a layer, has used restored bytes.
WORK, PRODUCED, WAIT, BEGINS_LAYER, HAS_USED = range(5)

# Something that took time, or memory at a time: then `end` has its bytes.
LOG = np.dtype(
    [
        ("kind", np.int64),
        ("begin_s", np.float64),
        ("end", np.float64),
        ("pass_number", np.int64),
        ("where", np.int64),  # layer (-1: outside) or tier
    ]
)
# Kinds of rows in the log. From `LEVEL` on of memory: all of it, with the layer that has changed
# it, and by how many bytes more (or fewer, below 0) of a layer are on their way, and so on.
FORWARD, BACKWARD, RECOMPUTE, WAIT_FOR_READ, WAIT_FOR_ROOM, WRITE, READ_BACK, LEVEL = range(8)
BEING_WRITTEN, READ_AHEAD, IN_USE, RECOMPUTED, REPLAYED = range(8, 13)

NO_PIECE = -1


@compiled
def change_memory(state: Row, log: Rows, num_bytes: float, layer: int) -> None:
    """Device memory is taken (or given back, below 0) by a layer (-1: outside of layers)."""
    state.memory_bytes += num_bytes
    state.peak_bytes = max(state.peak_bytes, state.memory_bytes)
    note(state, log, LEVEL, state.now_s, state.memory_bytes, layer)


@compiled
def note(state: Row, log: Rows, kind: int, begin: float, end: float, where: int) -> None:
    """A row of the log, if one is wanted and it tells something."""
    if log.shape[0] > 0 and (end > begin or kind >= LEVEL):
        at = state.num_logged
        row = log[at]
        row.kind, row.begin_s, row.end = kind, begin, end
        row.pass_number, row.where = state.pass_number, where
        state.num_logged += 1
