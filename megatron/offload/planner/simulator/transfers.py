# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way between device memory and tiers, as the simulation has them.

Part of the simulation, see `timeline`: the engine's budget of bytes in flight, its read-ahead and
the tiers' queues. `step` says what computes meanwhile.

All functions work on the same arguments: `state`, the row of STEP; `pieces`, [pieces] of PIECE, one
for each that goes to a tier, in the order of saving, chunk after chunk; `channels`, [2 x tiers] of
CHANNEL, each tier's writes, then each tier's reads; `launched`, see there; and `log`, [rows] of
LOG, none where the caller reads no log. Seconds and bytes; bytes are whole numbers, in floats.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.activations.transfer.pace import FORGETTING, MARKS, TOLERATED_WAIT
from megatron.offload.planner.simulator.arrays import Row, Rows
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.launched import (
    end_work,
    go_on,
    has_caught_up,
    launch,
    stands_still,
)
from megatron.offload.planner.simulator.rows import (
    BEING_WRITTEN,
    DROPPED,
    HAS_USED,
    IN_MEMORY,
    IN_USE,
    LEFT,
    NO_PIECE,
    ON_TIER,
    PRODUCED,
    QUEUED,
    READ_AHEAD,
    READ_BACK,
    READING,
    RESTORED,
    TAKEN_BACK,
    WAIT,
    WAIT_FOR_READ,
    WAIT_FOR_ROOM,
    WRITE,
    WRITING,
    change_memory,
    note,
)

_LATER = np.inf
_SAME = 1 + 1e-9  # what should end together does, however it was rounded


@compiled
def _append(pieces: Rows, channels: Rows, channel: int, piece: int) -> None:
    """To a channel's queue."""
    pieces[piece].next = NO_PIECE
    if channels[channel].first == NO_PIECE:
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
            state.urgent = NO_PIECE
        elif channels[channel].first != NO_PIECE:
            piece = channels[channel].first
            if not is_read and state.is_behind and not pieces[piece].is_produced:
                return
            channels[channel].first = pieces[piece].next
        else:
            return
        size = pieces[piece].size_bytes
        if is_read:
            state.read_bytes += size
            break
        if channels[channel].by_device:
            state.written_bytes += size
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
def pass_time(
    state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows, until: float
) -> bool:
    """Lets time pass until then, or until the next end of a transfer (or, with a device that runs
    behind its host, of what it computes); whether such an end came first."""
    number = channels.shape[0]
    if state.is_behind:
        go_on(state, pieces, launched, log)
    for channel in range(number):
        if channels[channel].active == NO_PIECE:
            _begin_transfer(state, pieces, channels, log, channel)
    now, next_s, ending = state.now_s, _LATER, -1
    for channel in range(number):
        if channels[channel].active != NO_PIECE:
            rate = _rate(channels, channel)
            if rate > 0 and now + channels[channel].left_bytes / rate < next_s:
                next_s, ending = now + channels[channel].left_bytes / rate, channel
    if state.is_working and state.works_until_s <= next_s * _SAME:
        next_s, ending = state.works_until_s, number
    if next_s > until * _SAME:
        next_s, ending = until, -1
    next_s = min(next_s, until)
    if next_s == _LATER:
        return False  # nothing is under way
    for channel in range(number):
        if channels[channel].active != NO_PIECE:
            left = channels[channel].left_bytes - _rate(channels, channel) * (next_s - now)
            channels[channel].left_bytes = max(left, 0.0)
    if state.is_behind and not state.is_working:
        stands_still(state, next_s - now)
    state.now_s = next_s
    if ending < 0:
        return False
    if ending == number:
        end_work(state, launched, log)
        return True
    state.num_events += 1
    _end_transfer(state, pieces, channels, log, ending)
    return True


@compiled
def _rate(channels: Rows, channel: int) -> float:
    number = channels.shape[0]
    other = (channel + number // 2) % number
    is_alone = channels[other].active == NO_PIECE
    return channels[channel].bytes_per_s if is_alone else channels[channel].shared_bytes_per_s


@compiled
def _end_transfer(state: Row, pieces: Rows, channels: Rows, log: Rows, channel: int) -> None:
    tiers = channels.shape[0] // 2
    piece = channels[channel].active
    channels[channel].active = NO_PIECE
    began = channels[channel].began_s
    if channel >= tiers:
        note(state, log, READ_BACK, began, state.now_s, pieces[piece].tier)
        is_left = pieces[piece].state == LEFT
        pieces[piece].state = IN_MEMORY if is_left else RESTORED
        if is_left:
            channels[channel - tiers].used_bytes -= pieces[piece].size_bytes
        return
    note(state, log, WRITE, began, state.now_s, pieces[piece].tier)
    size = pieces[piece].size_bytes
    if pieces[piece].state == WRITING or not channels[channel].by_device:
        state.in_flight_bytes -= size
    layer = pieces[piece].layer
    if pieces[piece].state == WRITING:
        pieces[piece].state = ON_TIER
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
        change_memory(state, log, -size, layer)
        return
    channels[channel].used_bytes -= size  # no read of it will follow
    if pieces[piece].state == DROPPED:
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
        change_memory(state, log, -size, layer)
    pieces[piece].state = IN_MEMORY


@compiled
def compute(
    state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows, seconds: float
) -> None:
    """Transfers go on while something computes."""
    until = state.now_s + seconds
    while pass_time(state, pieces, channels, launched, log, until):
        pass
    state.num_events += 1


@compiled
def wait_for_device(state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows) -> None:
    """The host waits until the device has done all that it was given."""
    go_on(state, pieces, launched, log)
    while not has_caught_up(state):
        pass_time(state, pieces, channels, launched, log, _LATER)
        go_on(state, pieces, launched, log)


@compiled
def wait_for_layers(state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows) -> None:
    """The host waits until it is no further ahead of the device than it may be in forward."""
    go_on(state, pieces, launched, log)
    while state.layers_ahead > state.most_layers_ahead:
        pass_time(state, pieces, channels, launched, log, _LATER)
        go_on(state, pieces, launched, log)


@compiled
def hand_over(
    state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows, piece: int
) -> None:
    """A piece is to be written. Waits while too many bytes are on their way."""
    size, began = pieces[piece].size_bytes, state.now_s
    while state.in_flight_bytes > 0 and state.in_flight_bytes + size > state.in_flight_limit_bytes:
        pass_time(state, pieces, channels, launched, log, _LATER)
    tier = pieces[piece].tier
    if state.is_behind:
        launch(state, launched, PRODUCED, piece, 0.0)
    else:  # else the host has waited, and the device may have computed
        state.write_wait_s += state.now_s - began
        note(state, log, WAIT_FOR_ROOM, began, state.now_s, tier)
    if channels[tier].by_device:
        if channels[tier].used_bytes + size > channels[tier].capacity_bytes:
            return
        channels[tier].used_bytes += size
    state.in_flight_bytes += size
    note(state, log, BEING_WRITTEN, state.now_s, size, pieces[piece].layer)
    pieces[piece].state = WRITING if channels[tier].by_device else QUEUED
    _append(pieces, channels, tier, piece)


@compiled
def _take_back(state: Row, pieces: Rows, channels: Rows, log: Rows, piece: int) -> bool:
    """A piece whose write has not ended stays in memory. Whether it must be read."""
    size, layer = pieces[piece].size_bytes, pieces[piece].layer
    if pieces[piece].state == QUEUED:
        pieces[piece].state = IN_MEMORY
        state.in_flight_bytes -= size
        note(state, log, BEING_WRITTEN, state.now_s, -size, layer)
    elif pieces[piece].state == WRITING:
        pieces[piece].state = TAKEN_BACK
        if channels[pieces[piece].tier].by_device:  # a write that is cancelled has ended at once
            state.in_flight_bytes -= size
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
    state.missing_bytes *= FORGETTING
    state.tolerated_s = TOLERATED_WAIT * state.backward_s
    state.last_ahead, state.next_ahead = first, end - 1
    _read_ahead(state, pieces, channels, log)


@compiled
def stop_reading_ahead(state: Row) -> None:
    """Ends reading ahead, as the backward pass is over."""
    state.next_ahead, state.last_ahead = -1, 0


@compiled
def _window_bytes(state: Row, pieces: Rows) -> float:
    """How many bytes ahead backward reads: none until it has used a piece."""
    if state.has_used == 0:
        return 0.0
    is_more = state.next_ahead >= state.last_ahead
    largest = pieces[state.next_ahead].largest_bytes if is_more else 0.0
    return min(largest + state.missing_bytes, state.in_flight_limit_bytes)


@compiled
def _read_ahead(state: Row, pieces: Rows, channels: Rows, log: Rows) -> None:
    """Brings pieces back until the window is full; one always fits."""
    while state.next_ahead >= state.last_ahead:
        piece = state.next_ahead
        where, size = pieces[piece].state, pieces[piece].size_bytes
        if where in (QUEUED, WRITING, ON_TIER):
            window = _window_bytes(state, pieces)
            if state.ahead_bytes > 0 and state.ahead_bytes + size > window:
                return
            state.ahead_bytes += size
            pieces[piece].is_ahead = 1
            note(state, log, READ_AHEAD, state.now_s, size, pieces[piece].layer)
            if _take_back(state, pieces, channels, log, piece):
                reads = channels.shape[0] // 2 + pieces[piece].tier
                _append(pieces, channels, reads, piece)
        state.next_ahead -= 1


@compiled
def use(state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows, piece: int) -> None:
    """Backward needs a piece now: waits until it is in memory, and makes room to read ahead.

    What a device copies it waits for itself, and no window is taken to have been too small.
    """
    began, layer = state.now_s, pieces[piece].layer
    tier = pieces[piece].tier
    reads = channels.shape[0] // 2 + tier
    note(state, log, IN_USE, began, pieces[piece].size_bytes, layer)
    if pieces[piece].is_ahead != 0:
        note(state, log, READ_AHEAD, began, -pieces[piece].size_bytes, layer)
    if _take_back(state, pieces, channels, log, piece):
        if channels[tier].by_device:
            _append(pieces, channels, reads, piece)
        else:
            state.urgent = piece
    if state.is_behind and pieces[piece].state in (READING, RESTORED):
        launch(state, launched, WAIT, piece, 0.0)
    while pieces[piece].state == READING and not channels[tier].by_device:
        pass_time(state, pieces, channels, launched, log, _LATER)
    waited_s = state.now_s - began
    if state.is_behind:
        _stay_near(state, pieces, channels, launched, log, piece)
    else:
        state.read_wait_s += waited_s
        note(state, log, WAIT_FOR_READ, began, state.now_s, tier)
    counted_s = max(waited_s - state.tolerated_s, 0.0)
    state.tolerated_s = max(state.tolerated_s - waited_s, 0.0)
    missing = counted_s * channels[reads].bytes_per_s
    state.missing_bytes += min(missing, _window_bytes(state, pieces))
    state.has_used = 1
    if pieces[piece].is_ahead != 0:
        state.ahead_bytes -= pieces[piece].size_bytes
        pieces[piece].is_ahead = 0
    _read_ahead(state, pieces, channels, log)


@compiled
def _stay_near(
    state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows, piece: int
) -> None:
    """Restored memory that the host has used, and the waits of `HostRunAheadLimit.used`."""
    if pieces[piece].state not in (READING, RESTORED):
        return
    bound_bytes = state.in_flight_limit_bytes // 2
    state.new_used_bytes += pieces[piece].size_bytes
    if state.new_used_bytes * MARKS < bound_bytes:
        return
    launch(state, launched, HAS_USED, NO_PIECE, state.new_used_bytes)
    state.used_bytes += state.new_used_bytes
    state.num_used_marks += 1
    state.new_used_bytes = 0.0
    go_on(state, pieces, launched, log)
    while state.used_bytes > bound_bytes and state.num_used_marks > 1:
        pass_time(state, pieces, channels, launched, log, _LATER)
        go_on(state, pieces, launched, log)


@compiled
def drop(state: Row, pieces: Rows, channels: Rows, log: Rows, piece: int) -> None:
    """Backward has done with a piece."""
    size, layer = pieces[piece].size_bytes, pieces[piece].layer
    note(state, log, IN_USE, state.now_s, -size, layer)
    if pieces[piece].state == TAKEN_BACK:
        note(state, log, BEING_WRITTEN, state.now_s, size, layer)
        pieces[piece].state = DROPPED  # the write holds the memory
        return
    if pieces[piece].state == READING:  # the device has it to use, which the host does not wait for
        pieces[piece].state = LEFT
    else:
        if pieces[piece].state == RESTORED:
            channels[pieces[piece].tier].used_bytes -= size
        pieces[piece].state = IN_MEMORY
    change_memory(state, log, -size, layer)
