# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way between device memory and tiers, as the simulation has them.

Part of the simulation, see `timeline`: the engine's budget of bytes in flight, its read-ahead and
the tiers' queues. `simulation` says what computes meanwhile.

All functions work on the same four arrays, each as plain as the compiler likes it best: `state`,
`pieces` (a row for each piece that goes to a tier, in the order of saving, chunk after chunk),
`channels` (a row for each tier's writes, then one for each tier's reads) and `log`. Bytes are whole
numbers, in floats.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator.arrays import Floats
from megatron.offload.planner.simulator.jit import compiled

# Places in `state`
NOW, MEMORY, PEAK, IN_FLIGHT, IN_FLIGHT_LIMIT, READ_WAIT, WRITE_WAIT, RECOMPUTED = range(8)
WRITTEN, READ, AHEAD, HAS_USED, LARGEST, MISSING, TAPE, TAPE_START = range(8, 16)
URGENT, NUM_EVENTS, NUM_LOGGED, PASS, NUM_STATE = range(16, 21)

# Columns of `pieces`; the next one in its queue
STATE, IS_AHEAD, BYTES, TIER, STORAGES, NEXT, NUM_PIECE_COLUMNS = range(7)
# States. In memory until it is queued.
IN_MEMORY, QUEUED, WRITING, ON_TIER, READING, RESTORED = range(6)
TAKEN_BACK = 6  # being written for nothing: it is needed again
DROPPED = 7  # likewise, and it has been used: its memory goes when the write ends

# Columns of `channels`. Rate: bytes a second, alone and while the tier's other channel works too.
ACTIVE, LEFT_BYTES, BEGAN, FIRST, LAST, RATE, SHARED_RATE = range(7)
LATENCY_S, USED_BYTES, CAPACITY_BYTES, NUM_CHANNEL_COLUMNS = range(7, 11)

# Kinds of rows in `log`: kind, begin, end, pass, layer or tier; LEVEL: kind, time, memory
FORWARD, BACKWARD, RECOMPUTE, WAIT_FOR_READ, WAIT_FOR_ROOM, WRITE, READ_BACK, LEVEL = range(8)

_NOBODY = -1.0
_LATER = np.inf
_SAME = 1 + 1e-9  # what should end together does, however it was rounded
_FORGETTING = 0.7  # as `Prefetcher`'s


@compiled
def change_memory(state: Floats, log: Floats, num_bytes: float) -> None:
    """Device memory is taken (or given back, below 0)."""
    state[MEMORY] += num_bytes
    state[PEAK] = max(state[PEAK], state[MEMORY])
    note(state, log, LEVEL, state[NOW], state[MEMORY], 0)


@compiled
def note(state: Floats, log: Floats, kind: int, begin: float, end: float, where: float) -> None:
    """A row of the log, if one is wanted and it tells something."""
    if log.shape[0] > 0 and (end > begin or kind == LEVEL):
        at = int(state[NUM_LOGGED])
        log[at, 0], log[at, 1], log[at, 2], log[at, 3], log[at, 4] = (
            float(kind),
            begin,
            end,
            state[PASS],
            where,
        )
        state[NUM_LOGGED] += 1


@compiled
def _append(pieces: Floats, channels: Floats, channel: int, piece: int) -> None:
    """To a channel's queue."""
    pieces[piece, NEXT] = _NOBODY
    if channels[channel, FIRST] == _NOBODY:
        channels[channel, FIRST] = piece
    else:
        pieces[int(channels[channel, LAST]), NEXT] = piece
    channels[channel, LAST] = piece


@compiled
def _begin_transfer(state: Floats, pieces: Floats, channels: Floats, channel: int) -> None:
    """An idle channel takes its next piece, if there is one."""
    tiers = channels.shape[0] // 2
    is_read = channel >= tiers
    while True:
        piece = int(state[URGENT])
        if is_read and piece >= 0 and pieces[piece, TIER] == channel - tiers:
            state[URGENT] = _NOBODY
        elif channels[channel, FIRST] != _NOBODY:
            piece = int(channels[channel, FIRST])
            channels[channel, FIRST] = pieces[piece, NEXT]
        else:
            return
        size = pieces[piece, BYTES]
        if is_read:
            state[READ] += size
            break
        if pieces[piece, STATE] == QUEUED:  # else it was needed meanwhile
            if channels[channel, USED_BYTES] + size <= channels[channel, CAPACITY_BYTES]:
                pieces[piece, STATE] = WRITING
                channels[channel, USED_BYTES] += size
                state[WRITTEN] += size
                break
            pieces[piece, STATE] = IN_MEMORY
            state[IN_FLIGHT] -= size
    channels[channel, ACTIVE] = piece
    latency_bytes = channels[channel, LATENCY_S] * pieces[piece, STORAGES] * channels[channel, RATE]
    channels[channel, LEFT_BYTES] = size + latency_bytes
    channels[channel, BEGAN] = state[NOW]


@compiled
def pass_time(state: Floats, pieces: Floats, channels: Floats, log: Floats, until: float) -> bool:
    """Time goes on until then, or the next end of a transfer if that is sooner; whether it is."""
    number = channels.shape[0]
    for channel in range(number):
        if channels[channel, ACTIVE] == _NOBODY:
            _begin_transfer(state, pieces, channels, channel)
    now, next_s, ending = state[NOW], _LATER, -1
    for channel in range(number):
        if channels[channel, ACTIVE] != _NOBODY:
            rate = _rate(channels, channel)
            if rate > 0 and now + channels[channel, LEFT_BYTES] / rate < next_s:
                next_s, ending = now + channels[channel, LEFT_BYTES] / rate, channel
    if next_s > until * _SAME:
        next_s, ending = until, -1
    next_s = min(next_s, until)
    if next_s == _LATER:
        return False  # nothing is under way
    for channel in range(number):
        if channels[channel, ACTIVE] != _NOBODY:
            left = channels[channel, LEFT_BYTES] - _rate(channels, channel) * (next_s - now)
            channels[channel, LEFT_BYTES] = max(left, 0.0)
    state[NOW] = next_s
    if ending < 0:
        return False
    state[NUM_EVENTS] += 1
    _end_transfer(state, pieces, channels, log, ending)
    return True


@compiled
def _rate(channels: Floats, channel: int) -> float:
    number = channels.shape[0]
    other = (channel + number // 2) % number
    is_alone = channels[other, ACTIVE] == _NOBODY
    return channels[channel, RATE] if is_alone else channels[channel, SHARED_RATE]


@compiled
def _end_transfer(
    state: Floats, pieces: Floats, channels: Floats, log: Floats, channel: int
) -> None:
    tiers = channels.shape[0] // 2
    piece = int(channels[channel, ACTIVE])
    channels[channel, ACTIVE] = _NOBODY
    began = channels[channel, BEGAN]
    if channel >= tiers:
        note(state, log, READ_BACK, began, state[NOW], pieces[piece, TIER])
        pieces[piece, STATE] = RESTORED
        return
    note(state, log, WRITE, began, state[NOW], pieces[piece, TIER])
    size = pieces[piece, BYTES]
    state[IN_FLIGHT] -= size
    if pieces[piece, STATE] == WRITING:
        pieces[piece, STATE] = ON_TIER
        change_memory(state, log, -size)
        return
    channels[channel, USED_BYTES] -= size  # nobody will read it
    if pieces[piece, STATE] == DROPPED:
        change_memory(state, log, -size)
    pieces[piece, STATE] = IN_MEMORY


@compiled
def compute(state: Floats, pieces: Floats, channels: Floats, log: Floats, seconds: float) -> None:
    """Transfers go on while something computes."""
    until = state[NOW] + seconds
    while pass_time(state, pieces, channels, log, until):
        pass
    state[NUM_EVENTS] += 1


@compiled
def hand_over(state: Floats, pieces: Floats, channels: Floats, log: Floats, piece: int) -> None:
    """A piece is to be written. Waits while too many bytes are on their way."""
    size, began = pieces[piece, BYTES], state[NOW]
    while state[IN_FLIGHT] > 0 and state[IN_FLIGHT] + size > state[IN_FLIGHT_LIMIT]:
        pass_time(state, pieces, channels, log, _LATER)
    state[WRITE_WAIT] += state[NOW] - began
    note(state, log, WAIT_FOR_ROOM, began, state[NOW], pieces[piece, TIER])
    state[IN_FLIGHT] += size
    pieces[piece, STATE] = QUEUED
    _append(pieces, channels, int(pieces[piece, TIER]), piece)


@compiled
def _take_back(state: Floats, pieces: Floats, log: Floats, piece: int) -> bool:
    """A piece whose write has not ended stays in memory. Whether it must be read."""
    if pieces[piece, STATE] == QUEUED:
        pieces[piece, STATE] = IN_MEMORY
        state[IN_FLIGHT] -= pieces[piece, BYTES]
    elif pieces[piece, STATE] == WRITING:
        pieces[piece, STATE] = TAKEN_BACK
    if pieces[piece, STATE] != ON_TIER:
        return False
    pieces[piece, STATE] = READING
    change_memory(state, log, pieces[piece, BYTES])
    return True


@compiled
def prefetch(
    state: Floats,
    pieces: Floats,
    channels: Floats,
    log: Floats,
    first: int,
    end: int,
    opens_at_once: bool,
) -> None:
    """The next backward pass needs these pieces, the last one first."""
    state[HAS_USED] = opens_at_once
    state[MISSING] *= _FORGETTING
    state[TAPE_START], state[TAPE] = first, end - 1
    largest = 0.0
    for piece in range(first, end):
        largest = max(largest, pieces[piece, BYTES])
    state[LARGEST] = largest
    _read_ahead(state, pieces, channels, log)


@compiled
def stop_reading_ahead(state: Floats) -> None:
    """The backward pass is over."""
    state[TAPE], state[TAPE_START] = -1, 0


@compiled
def _read_ahead(state: Floats, pieces: Floats, channels: Floats, log: Floats) -> None:
    """Brings pieces back until the window is full; one always fits."""
    while state[TAPE] >= state[TAPE_START]:
        piece = int(state[TAPE])
        where, size = pieces[piece, STATE], pieces[piece, BYTES]
        if where in (QUEUED, WRITING, ON_TIER):
            window = 0.0
            if state[HAS_USED] != 0:
                wanted = 2 * state[LARGEST] + state[MISSING]
                window = min(wanted, state[IN_FLIGHT_LIMIT])
            if state[AHEAD] > 0 and state[AHEAD] + size > window:
                return
            state[AHEAD] += size
            pieces[piece, IS_AHEAD] = 1
            if _take_back(state, pieces, log, piece):
                reads = channels.shape[0] // 2 + int(pieces[piece, TIER])
                _append(pieces, channels, reads, piece)
        state[TAPE] -= 1


@compiled
def use(state: Floats, pieces: Floats, channels: Floats, log: Floats, piece: int) -> None:
    """Backward needs a piece now: waits until it is in memory, and makes room to read ahead."""
    began = state[NOW]
    if _take_back(state, pieces, log, piece):
        state[URGENT] = piece
    while pieces[piece, STATE] == READING:
        pass_time(state, pieces, channels, log, _LATER)
    waited_s = state[NOW] - began
    state[READ_WAIT] += waited_s
    note(state, log, WAIT_FOR_READ, began, state[NOW], pieces[piece, TIER])
    if state[HAS_USED] != 0:
        reads = channels.shape[0] // 2 + int(pieces[piece, TIER])
        state[MISSING] += waited_s * channels[reads, RATE]
    state[HAS_USED] = 1
    if pieces[piece, IS_AHEAD] != 0:
        state[AHEAD] -= pieces[piece, BYTES]
        pieces[piece, IS_AHEAD] = 0
    _read_ahead(state, pieces, channels, log)


@compiled
def drop(state: Floats, pieces: Floats, channels: Floats, log: Floats, piece: int) -> None:
    """Backward has done with a piece."""
    if pieces[piece, STATE] == TAKEN_BACK:
        pieces[piece, STATE] = DROPPED  # the write holds the memory
        return
    if pieces[piece, STATE] == RESTORED:
        channels[int(pieces[piece, TIER]), USED_BYTES] -= pieces[piece, BYTES]
    pieces[piece, STATE] = IN_MEMORY
    change_memory(state, log, -pieces[piece, BYTES])
