# SPDX-License-Identifier: Apache-2.0
"""One step of one stage, pass by pass and layer by layer: `simulate`.

What computes; `flow` has the transfers that go on meanwhile. Called by `Timeline` alone, which says
what is modelled.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator import arrays
from megatron.offload.planner.simulator import transfers as f
from megatron.offload.planner.simulator.arrays import (
    ALLOCATOR_SLACK,
    INFLIGHT_BYTES,
    NUM_MORE,
    STEADY_COUNT,
    STEP_FIXED_S,
    TRANSIENT_BYTES,
    Floats,
    Ints,
    StageArrays,
)
from megatron.offload.planner.simulator.instructions import (
    COMPUTE,
    DROP,
    HAND_OVER,
    MEMORY,
    RECOMPUTE,
    USE,
    instructions_of,
    new_pieces,
    pass_seconds,
)
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.other_stages import ready_times, ways_around

# Places in the result of `simulate`
STEP_S, STALL_S, RECOMPUTE_S, WRITTEN_BYTES, READ_BYTES, PEAK_BYTES, NUM_EVENTS = range(7)


@compiled
def simulate(stage: StageArrays, choices: Ints, log: Floats) -> Floats:
    """Simulates a step.

    Args:
        choices: of each part, see `script`.
        log: filled with what happened when, if it has rows; see `flow`.

    Returns:
        See the places above. Events are all ends of transfers and of computations.
    """
    first_piece, pieces_of = new_pieces(stage, choices)
    scripts, amounts, begins = instructions_of(stage, choices)
    pieces = _new_pieces(stage, pieces_of)
    channels = new_channels(stage.tiers)
    state = np.zeros(f.NUM_STATE)
    state[f.IN_FLIGHT_LIMIT] = stage.state[INFLIGHT_BYTES]
    state[f.URGENT] = -1
    f.stop_reading_ahead(state)
    forward_s, backward_s = pass_seconds(stage, choices)
    ready, lag_s = ready_times(stage.passes, stage.own, stage.micro_batches, forward_s, backward_s)
    around = ways_around(stage.passes.shape[0], stage.own, forward_s, backward_s)
    chunks = stage.chunks.shape[0]
    done = np.zeros((2, chunks, stage.micro_batches))
    own = stage.passes[stage.own]
    middle = np.zeros((2, 5))  # at the two places between which the step repeats itself
    for number in range(own.shape[0]):
        state[f.PASS] = number
        is_backward, chunk, micro_batch = own[number]
        before, after = 1 - is_backward, chunk  # the own pass that this one depends on
        if is_backward == 0:
            before, after = 0, chunk - 1
        elif chunk < chunks - 1:
            before, after = 1, chunk + 1
        else:
            before = 0
        arrives = ready[number]
        if after >= 0:
            arrives = max(arrives, done[before, after, micro_batch] + around[is_backward, chunk])
        if arrives > state[f.NOW]:
            f.compute(state, pieces, channels, log, arrives - state[f.NOW])
        which = 2 * chunk + is_backward
        per_pass = first_piece[chunk + 1] - first_piece[chunk]
        base = first_piece[chunk] * stage.micro_batches + micro_batch * per_pass
        begin, end = begins[which], begins[which + 1]
        _play(state, pieces, channels, log, scripts, amounts, begin, end, base, is_backward)
        done[is_backward, chunk, micro_batch] = state[f.NOW]
        if number + 1 < own.shape[0] and own[number + 1, 0] == 1:
            _, chunk, micro_batch = own[number + 1]
            per_pass = first_piece[chunk + 1] - first_piece[chunk]
            base = first_piece[chunk] * stage.micro_batches + micro_batch * per_pass
            opens = chunk != stage.chunk_with_loss
            f.prefetch(state, pieces, channels, log, base, base + per_pass, opens)
        for place in range(2):
            if number == stage.steady[place]:
                middle[place] = _sums(state)
    result = np.empty(7)
    result[:5] = _sums(state)
    if stage.state[NUM_MORE] > 0:
        result[:5] += (middle[1] - middle[0]) * (stage.state[NUM_MORE] / stage.state[STEADY_COUNT])
    result[STEP_S] += lag_s + stage.state[STEP_FIXED_S]
    held_bytes = np.ceil(state[f.PEAK] * (1 + stage.state[ALLOCATOR_SLACK]))
    result[PEAK_BYTES] = held_bytes + stage.state[TRANSIENT_BYTES]
    result[NUM_EVENTS] = state[f.NUM_EVENTS]
    return result


@compiled
def _sums(state: Floats) -> Floats:
    """What adds up over a step."""
    sums = np.empty(5)
    sums[STEP_S] = state[f.NOW]
    sums[STALL_S] = state[f.READ_WAIT] + state[f.WRITE_WAIT]
    sums[RECOMPUTE_S] = state[f.RECOMPUTED]
    sums[WRITTEN_BYTES] = state[f.WRITTEN]
    sums[READ_BYTES] = state[f.READ]
    return sums


@compiled
def _new_pieces(stage: StageArrays, of_one: Floats) -> Floats:
    """The pieces of all micro-batches.

    Args:
        of_one: those of one, see `new_pieces`; their state is the chunk.
    """
    number, columns = of_one.shape
    pieces = np.empty((stage.micro_batches * number, columns))
    begin = at = 0
    while begin < number:
        end = begin
        while end < number and of_one[end, f.STATE] == of_one[begin, f.STATE]:
            end += 1
        for _ in range(stage.micro_batches):
            for row in range(begin, end):
                for column in range(columns):
                    pieces[at, column] = of_one[row, column]
                pieces[at, f.STATE] = f.IN_MEMORY
                at += 1
        begin = end
    return pieces


@compiled
def new_channels(tiers: Floats) -> Floats:
    """With nothing under way. Reads go before writes."""
    number = tiers.shape[0]
    channels = np.zeros((2 * number, f.NUM_CHANNEL_COLUMNS))
    for tier in range(number):
        shared = tiers[tier, arrays.TIER_SHARED]
        read, write = tiers[tier, arrays.TIER_READ], tiers[tier, arrays.TIER_WRITE]
        for channel in (tier, number + tier):
            channels[channel, f.ACTIVE] = channels[channel, f.FIRST] = -1
            channels[channel, f.LATENCY_S] = tiers[tier, arrays.TIER_LATENCY_S]
            channels[channel, f.CAPACITY_BYTES] = tiers[tier, arrays.TIER_CAPACITY_BYTES]
        channels[tier, f.RATE], channels[number + tier, f.RATE] = write, read
        channels[tier, f.SHARED_RATE] = min(write, max(shared - read, 0.0))
        channels[number + tier, f.SHARED_RATE] = min(read, shared)
    return channels


@compiled
def _play(
    state: Floats,
    pieces: Floats,
    channels: Floats,
    log: Floats,
    script: Ints,
    amounts: Floats,
    begin: int,
    end: int,
    base: int,
    is_backward: int,
) -> None:
    """A pass, instruction by instruction.

    Args:
        base: the first piece of this micro-batch.
    """
    for at in range(begin, end):
        kind, where = script[at, 0], script[at, 1]
        if kind == MEMORY:
            f.change_memory(state, log, amounts[at])
        elif kind in (COMPUTE, RECOMPUTE):
            began = state[f.NOW]
            f.compute(state, pieces, channels, log, amounts[at])
            what = f.BACKWARD if is_backward else f.FORWARD
            if kind == RECOMPUTE:
                state[f.RECOMPUTED] += amounts[at]
                what = f.RECOMPUTE
            f.note(state, log, what, began, state[f.NOW], where)
        elif kind == HAND_OVER:
            f.hand_over(state, pieces, channels, log, base + where)
        elif kind == USE:
            f.use(state, pieces, channels, log, base + where)
        elif kind == DROP:
            f.drop(state, pieces, channels, log, base + where)
    if is_backward:
        f.stop_reading_ahead(state)
