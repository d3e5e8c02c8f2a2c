# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way between device memory and tiers, as the simulation has them.

Part of the simulation, see `timeline`: the engine's budget of bytes in flight, its read-ahead and
the tiers' queues. `step` says what computes meanwhile.

All functions work on the same arguments: `state`, the row of STEP; `pieces`, [pieces] of PIECE, one
for each that goes to a tier, in the order of saving, chunk after chunk; `channels`, [2 x tiers] of
CHANNEL, each tier's writes, then each tier's reads; and `log`, [rows] of LOG, none where nobody
reads it. Seconds and bytes; bytes are whole numbers, in floats.
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
        ("largest_bytes", np.float64),  # of the pieces that this backward pass has read
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
    ]
)
# States. In memory until it is queued.
IN_MEMORY, QUEUED, WRITING, ON_TIER, READING, RESTORED = range(6)
TAKEN_BACK = 6  # being written for nothing: it is needed again
DROPPED = 7  # likewise, and it has been used: its memory goes when the write ends

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
    ]
)

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
BEING_WRITTEN, READ_AHEAD, IN_USE, RECOMPUTED = range(8, 12)

_NOBODY = -1
_LATER = np.inf
_SAME = 1 + 1e-9  # what should end together does, however it was rounded
_FORGETTING = 0.7  # as `Prefetcher`'s
_TOLERATED_WAIT = 0.01  # likewise


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


@compiled
def _append(pieces: Rows, channels: Rows, channel: int, piece: int) -> None:
    """To a channel's queue."""
    pieces[piece].next = _NOBODY
    if channels[channel].first == _NOBODY:
        channels[channel].first = piece
    else:
        pieces[channels[channel].last].next = piece
    channels[channel].last = piece


@compiled
def _begin_transfer(state: Row, pieces: Rows, channels: Rows, log: Rows, channel: int) -> None:
    """An idle channel takes its next piece, if there is one."""
    tiers = channels.shape[0] // 2
    is_read = channel >= tiers
    while True:
        piece = state.urgent
        if is_read and piece >= 0 and pieces[piece].tier == channel - tiers:
            state.urgent = _NOBODY
        elif channels[channel].first != _NOBODY:
            piece = channels[channel].first
            channels[channel].first = pieces[piece].next
        else:
            return
        size = pieces[piece].size_bytes
        if is_read:
            state.read_bytes += size
            break
        if pieces[piece].state == QUEUED:  # else it was needed meanwhile
            if channels[channel].used_bytes + size <= channels[channel].capacity_bytes:
                pieces[piece].state = WRITING
                channels[channel].used_bytes += size
                state.written_bytes += size
                break
            pieces[piece].state = IN_MEMORY
            state.in_flight_bytes -= size
            note(state, log, BEING_WRITTEN, state.now_s, -size, pieces[piece].layer)
    channels[channel].active = piece
    latency_bytes = (
        channels[channel].latency_s * pieces[piece].num_storages * channels[channel].bytes_per_s
    )
    channels[channel].left_bytes = size + latency_bytes
    channels[channel].began_s = state.now_s


@compiled
def pass_time(state: Row, pieces: Rows, channels: Rows, log: Rows, until: float) -> bool:
    """Time goes on until then, or the next end of a transfer if that is sooner; whether it is."""
    number = channels.shape[0]
    for channel in range(number):
        if channels[channel].active == _NOBODY:
            _begin_transfer(state, pieces, channels, log, channel)
    now, next_s, ending = state.now_s, _LATER, -1
    for channel in range(number):
        if channels[channel].active != _NOBODY:
            rate = _rate(channels, channel)
            if rate > 0 and now + channels[channel].left_bytes / rate < next_s:
                next_s, ending = now + channels[channel].left_bytes / rate, channel
    if next_s > until * _SAME:
        next_s, ending = until, -1
    next_s = min(next_s, until)
    if next_s == _LATER:
        return False  # nothing is under way
    for channel in range(number):
        if channels[channel].active != _NOBODY:
            left = channels[channel].left_bytes - _rate(channels, channel) * (next_s - now)
            channels[channel].left_bytes = max(left, 0.0)
    state.now_s = next_s
    if ending < 0:
        return False
    state.num_events += 1
    _end_transfer(state, pieces, channels, log, ending)
    return True


@compiled
def _rate(channels: Rows, channel: int) -> float:
    number = channels.shape[0]
    other = (channel + number // 2) % number
    is_alone = channels[other].active == _NOBODY
    return channels[channel].bytes_per_s if is_alone else channels[channel].shared_bytes_per_s


@compiled
def _end_transfer(state: Row, pieces: Rows, channels: Rows, log: Rows, channel: int) -> None:
    tiers = channels.shape[0] // 2
    piece = channels[channel].active
    channels[channel].active = _NOBODY
    began = channels[channel].began_s
    if channel >= tiers:
        note(state, log, READ_BACK, began, state.now_s, pieces[piece].tier)
        pieces[piece].state = RESTORED
        return
    note(state, log, WRITE, began, state.now_s, pieces[piece].tier)
    size = pieces[piece].size_bytes
    state.in_flight_bytes -= size
    layer = pieces[piece].layer
    if pieces[piece].state == WRITING:
        pieces[piece].state = ON_TIER
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
        change_memory(state, log, -size, layer)
        return
    channels[channel].used_bytes -= size  # nobody will read it
    if pieces[piece].state == DROPPED:
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
        change_memory(state, log, -size, layer)
    pieces[piece].state = IN_MEMORY


@compiled
def compute(state: Row, pieces: Rows, channels: Rows, log: Rows, seconds: float) -> None:
    """Transfers go on while something computes."""
    until = state.now_s + seconds
    while pass_time(state, pieces, channels, log, until):
        pass
    state.num_events += 1


@compiled
def hand_over(state: Row, pieces: Rows, channels: Rows, log: Rows, piece: int) -> None:
    """A piece is to be written. Waits while too many bytes are on their way."""
    size, began = pieces[piece].size_bytes, state.now_s
    while state.in_flight_bytes > 0 and state.in_flight_bytes + size > state.in_flight_limit_bytes:
        pass_time(state, pieces, channels, log, _LATER)
    state.write_wait_s += state.now_s - began
    note(state, log, WAIT_FOR_ROOM, began, state.now_s, pieces[piece].tier)
    state.in_flight_bytes += size
    note(state, log, BEING_WRITTEN, state.now_s, size, pieces[piece].layer)
    pieces[piece].state = QUEUED
    _append(pieces, channels, pieces[piece].tier, piece)


@compiled
def _take_back(state: Row, pieces: Rows, log: Rows, piece: int) -> bool:
    """A piece whose write has not ended stays in memory. Whether it must be read."""
    size, layer = pieces[piece].size_bytes, pieces[piece].layer
    if pieces[piece].state == QUEUED:
        pieces[piece].state = IN_MEMORY
        state.in_flight_bytes -= size
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
    elif pieces[piece].state == WRITING:
        pieces[piece].state = TAKEN_BACK
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
    if pieces[piece].state != ON_TIER:
        return False
    pieces[piece].state = READING
    change_memory(state, log, size, layer)
    return True


@compiled
def prefetch(
    state: Row,
    pieces: Rows,
    channels: Rows,
    log: Rows,
    first: int,
    end: int,
    opens_at_once: bool,
) -> None:
    """The next backward pass needs these pieces, the last one first."""
    state.has_used = opens_at_once
    state.missing_bytes *= _FORGETTING
    state.tolerated_s = _TOLERATED_WAIT * state.backward_s
    state.last_ahead, state.next_ahead = first, end - 1
    state.largest_bytes = 0.0
    _read_ahead(state, pieces, channels, log)


@compiled
def stop_reading_ahead(state: Row) -> None:
    """Ends reading ahead, as the backward pass is over."""
    state.next_ahead, state.last_ahead = -1, 0


@compiled
def _read_ahead(state: Row, pieces: Rows, channels: Rows, log: Rows) -> None:
    """Brings pieces back until the window is full; one always fits."""
    while state.next_ahead >= state.last_ahead:
        piece = state.next_ahead
        where, size = pieces[piece].state, pieces[piece].size_bytes
        if where in (QUEUED, WRITING, ON_TIER):
            window = 0.0
            if state.has_used != 0:
                largest = max(pieces[piece].largest_bytes, state.largest_bytes)
                wanted = largest + state.missing_bytes
                window = min(wanted, state.in_flight_limit_bytes)
            if state.ahead_bytes > 0 and state.ahead_bytes + size > window:
                return
            state.ahead_bytes += size
            pieces[piece].is_ahead = 1
            note(state, log, READ_AHEAD, state.now_s, size, pieces[piece].layer)
            if _take_back(state, pieces, log, piece):
                state.largest_bytes = max(state.largest_bytes, size)
                reads = channels.shape[0] // 2 + pieces[piece].tier
                _append(pieces, channels, reads, piece)
        state.next_ahead -= 1


@compiled
def use(state: Row, pieces: Rows, channels: Rows, log: Rows, piece: int) -> None:
    """Backward needs a piece now: waits until it is in memory, and makes room to read ahead."""
    began, layer = state.now_s, pieces[piece].layer
    note(state, log, IN_USE, began, pieces[piece].size_bytes, layer)
    if pieces[piece].is_ahead != 0:
        note(state, log, READ_AHEAD, began, -pieces[piece].size_bytes, layer)
    if _take_back(state, pieces, log, piece):
        state.urgent = piece
    while pieces[piece].state == READING:
        pass_time(state, pieces, channels, log, _LATER)
    waited_s = state.now_s - began
    state.read_wait_s += waited_s
    note(state, log, WAIT_FOR_READ, began, state.now_s, pieces[piece].tier)
    counted_s = max(waited_s - state.tolerated_s, 0.0)
    state.tolerated_s = max(state.tolerated_s - waited_s, 0.0)
    if state.has_used != 0:
        reads = channels.shape[0] // 2 + pieces[piece].tier
        state.missing_bytes += counted_s * channels[reads].bytes_per_s
    state.has_used = 1
    if pieces[piece].is_ahead != 0:
        state.ahead_bytes -= pieces[piece].size_bytes
        pieces[piece].is_ahead = 0
    _read_ahead(state, pieces, channels, log)


@compiled
def drop(state: Row, pieces: Rows, channels: Rows, log: Rows, piece: int) -> None:
    """Backward has done with a piece."""
    size, layer = pieces[piece].size_bytes, pieces[piece].layer
    note(state, log, IN_USE, state.now_s, -size, layer)
    if pieces[piece].state == TAKEN_BACK:
        note(state, log, BEING_WRITTEN, state.now_s, size, layer)
        pieces[piece].state = DROPPED  # the write holds the memory
        return
    if pieces[piece].state == RESTORED:
        channels[pieces[piece].tier].used_bytes -= size
    pieces[piece].state = IN_MEMORY
    change_memory(state, log, -size, layer)
