# SPDX-License-Identifier: Apache-2.0
"""One step of one stage, pass by pass and layer by layer: `simulate`.

What computes; `transfers` has what goes on meanwhile. Called by `Timeline` alone, which says
what is modelled.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator import rows, transfers
from megatron.offload.planner.simulator.arrays import Floats, Ints, Row, Rows, StageArrays
from megatron.offload.planner.simulator.instructions import (
    BEGIN_LAYER,
    COMPUTE,
    DROP,
    HAND_OVER,
    MEMORY,
    MEMORY_AGAIN,
    MEMORY_REPLAYED,
    RECOMPUTE,
    USE,
    instructions_of,
    new_pieces,
    pass_seconds,
)
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.launched import launch
from megatron.offload.planner.simulator.other_stages import ready_times, ways_around

# Places in the result of `simulate`, and one more in that of each of its steps: by how many bytes
# the read-ahead proved too small until the step ended.
STEP_S, STALL_S, RECOMPUTE_S, WRITTEN_BYTES, READ_BYTES, PEAK_BYTES, NUM_EVENTS = range(7)
MISSING_BYTES = 7


@compiled
def simulate(stage: StageArrays, choices: Ints, log: Rows) -> Floats:
    """Simulates a step of one stage with given choices, after one like it.

    Where that one has waited for reads, this one begins with the window that it has left.

    Args:
        choices: [parts], of each part, see `instructions`.
        log: [rows] of `rows.LOG`, filled with what happened when; with no rows nothing is.

    Returns:
        [7], seconds, bytes and a number at the places above. Events are all ends of transfers and
        of computations.
    """
    result = _step(stage, choices, log[:0], 0.0)
    if log.shape[0] > 0 or result[MISSING_BYTES] > 0:
        result = _step(stage, choices, log, result[MISSING_BYTES])
    return result[:MISSING_BYTES]


@compiled
def _step(stage: StageArrays, choices: Ints, log: Rows, missing_bytes: float) -> Floats:
    """One step; its result has `MISSING_BYTES` too.

    Args:
        missing_bytes: by which the read-ahead of the step before has proved too small.
    """
    first_piece, pieces_of = new_pieces(stage, choices)
    instructions, begins = instructions_of(stage, choices)
    pieces = _new_pieces(stage, pieces_of)
    channels = new_channels(stage.tiers)
    steps = np.zeros(1, rows.STEP)
    state = steps[0]
    state.in_flight_limit_bytes = stage.inflight_bytes
    state.urgent = rows.NO_PIECE
    state.missing_bytes = missing_bytes
    state.is_behind = stage.lead_layers > 0
    state.most_layers_ahead = stage.lead_layers
    state.waits_to_leave = rows.NO_PIECE
    own = stage.passes[stage.own]
    launched = np.zeros(
        2 * instructions.shape[0] * own.shape[0] if state.is_behind else 0, rows.OPERATION
    )
    transfers.stop_reading_ahead(state)
    forward_s, backward_s = pass_seconds(stage, choices)
    state.backward_s = backward_s.mean()
    ready, lag_s = ready_times(stage.passes, stage.own, stage.micro_batches, forward_s, backward_s)
    around = ways_around(stage.passes.shape[0], stage.own, forward_s, backward_s)
    chunks = stage.chunks.shape[0]
    done = np.zeros((2, chunks, stage.micro_batches))
    middle = np.zeros((2, 5))  # at the two places between which the step repeats itself
    for number in range(own.shape[0]):
        state.pass_number = number
        is_backward, chunk, micro_batch = own[number]
        before, after = 1 - is_backward, chunk  # the own pass that this one depends on
        if is_backward == 0:
            before, after = 0, chunk - 1
        elif chunk < chunks - 1:
            before, after = 1, chunk + 1
        else:
            before = 0
        if state.is_behind and stage.passes.shape[0] > 1:  # Megatron does, as it sends and receives
            transfers.wait_for_device(state, pieces, channels, launched, log)
        arrives = ready[number]
        if after >= 0:
            arrives = max(arrives, done[before, after, micro_batch] + around[is_backward, chunk])
        if arrives > state.now_s:
            transfers.compute(state, pieces, channels, launched, log, arrives - state.now_s)
        which = 2 * chunk + is_backward
        per_pass = first_piece[chunk + 1] - first_piece[chunk]
        base = first_piece[chunk] * stage.micro_batches + micro_batch * per_pass
        begin, end = begins[which], begins[which + 1]
        program = instructions[begin:end]
        if state.is_behind:
            _launch(stage, state, pieces, channels, launched, log, program, base, is_backward)
        else:
            _play(state, pieces, channels, launched, log, program, base, is_backward)
        if state.is_behind and (number in stage.steady or number + 1 == own.shape[0]):
            transfers.wait_for_device(state, pieces, channels, launched, log)
        done[is_backward, chunk, micro_batch] = state.now_s
        if number + 1 < own.shape[0] and own[number + 1, 0] == 1:
            _, chunk, micro_batch = own[number + 1]
            per_pass = first_piece[chunk + 1] - first_piece[chunk]
            base = first_piece[chunk] * stage.micro_batches + micro_batch * per_pass
            opens = chunk != stage.chunk_with_loss
            transfers.prefetch(state, pieces, channels, log, base, base + per_pass, opens)
        for place in range(2):
            if number == stage.steady[place]:
                middle[place] = _sums(state)
    result = np.empty(8)
    result[:5] = _sums(state)
    if stage.num_more > 0:
        result[:5] += (middle[1] - middle[0]) * (stage.num_more / stage.steady_count)
    result[STEP_S] += lag_s + stage.step_fixed_s
    held_bytes = np.ceil(state.peak_bytes * (1 + stage.allocator_slack))
    result[PEAK_BYTES] = held_bytes + stage.transient_bytes
    result[MISSING_BYTES] = state.missing_bytes
    result[NUM_EVENTS] = steps[0].num_events  # a row does not keep its array alive: this does
    return result


@compiled
def _sums(state: Row) -> Floats:
    """What adds up over a step: [5], the first places of the result."""
    sums = np.empty(5)
    sums[STEP_S] = state.now_s
    sums[STALL_S] = state.read_wait_s + state.write_wait_s
    sums[RECOMPUTE_S] = state.recomputed_s
    sums[WRITTEN_BYTES] = state.written_bytes
    sums[READ_BYTES] = state.read_bytes
    return sums


@compiled
def _new_pieces(stage: StageArrays, of_one: Rows) -> Rows:
    """The pieces of all micro-batches: [micro-batches x pieces] of `rows.PIECE`.

    Args:
        of_one: [pieces], those of one, see `new_pieces`; their state is the chunk.
    """
    number = of_one.shape[0]
    pieces = np.empty(stage.micro_batches * number, rows.PIECE)
    begin = at = 0
    while begin < number:
        end = begin
        while end < number and of_one[end].state == of_one[begin].state:
            end += 1
        for _ in range(stage.micro_batches):
            for row in range(begin, end):
                pieces[at] = of_one[row]
                pieces[at].state = rows.IN_MEMORY
                at += 1
        begin = end
    return pieces


@compiled
def new_channels(tiers: Rows) -> Rows:
    """The channels of all tiers with nothing under way; reads go before writes.

    Args:
        tiers: [tiers] of `arrays.TIER`.

    Returns:
        [2 x tiers] of `rows.CHANNEL`: each tier's writes, then each tier's reads.
    """
    number = tiers.shape[0]
    channels = np.zeros(2 * number, rows.CHANNEL)
    for tier in range(number):
        shared = tiers[tier].shared_bytes_per_s
        read, write = tiers[tier].read_bytes_per_s, tiers[tier].write_bytes_per_s
        for channel in (tier, number + tier):
            channels[channel].active = channels[channel].first = -1
            channels[channel].latency_s = tiers[tier].latency_s
            channels[channel].capacity_bytes = tiers[tier].capacity_bytes
            channels[channel].by_device = tiers[tier].by_device
        channels[tier].bytes_per_s, channels[number + tier].bytes_per_s = write, read
        channels[tier].shared_bytes_per_s = min(write, max(shared - read, 0.0))
        channels[number + tier].shared_bytes_per_s = min(read, shared)
    return channels


@compiled
def _play(
    state: Row,
    pieces: Rows,
    channels: Rows,
    launched: Rows,
    log: Rows,
    program: Rows,
    base: int,
    is_backward: int,
) -> None:
    """A pass, instruction by instruction, of a host that computes.

    Args:
        program: its instructions.
        base: the first piece of this micro-batch.
    """
    for at in range(program.shape[0]):
        kind, where, amount = program[at].kind, program[at].where, program[at].amount
        if kind in (COMPUTE, RECOMPUTE):
            began = state.now_s
            transfers.compute(state, pieces, channels, launched, log, amount)
            rows.note(state, log, _shown_as(kind, is_backward), began, state.now_s, where)
        _do(state, pieces, channels, launched, log, kind, where, amount, base)
    if is_backward:
        transfers.stop_reading_ahead(state)


@compiled
def _launch(
    stage: StageArrays,
    state: Row,
    pieces: Rows,
    channels: Rows,
    launched: Rows,
    log: Rows,
    program: Rows,
    base: int,
    is_backward: int,
) -> None:
    """A pass of a host that launches, in no time, what a device computes later.

    By operation: what one has saved is handed over when the next one has been launched.
    """
    for at in range(program.shape[0]):
        kind, where, amount = program[at].kind, program[at].where, program[at].amount
        if kind == BEGIN_LAYER:
            state.layers_ahead += 1
            launch(state, launched, rows.BEGINS_LAYER, where, 0.0)
            transfers.wait_for_layers(state, pieces, channels, launched, log)
        elif kind in (COMPUTE, RECOMPUTE):
            launch(state, launched, rows.WORK, where, amount, _shown_as(kind, is_backward))
            _let_leave(state, pieces, channels, launched, log)
        elif kind == HAND_OVER and stage.by_operation:
            _let_leave(state, pieces, channels, launched, log)
            state.waits_to_leave = base + where
            continue
        _do(state, pieces, channels, launched, log, kind, where, amount, base)
    _let_leave(state, pieces, channels, launched, log)
    if is_backward:
        transfers.stop_reading_ahead(state)


@compiled
def _let_leave(state: Row, pieces: Rows, channels: Rows, launched: Rows, log: Rows) -> None:
    piece = state.waits_to_leave
    if piece != rows.NO_PIECE:
        state.waits_to_leave = rows.NO_PIECE
        transfers.hand_over(state, pieces, channels, launched, log, piece)


@compiled
def _shown_as(kind: int, is_backward: int) -> int:
    """The kind of row in the log that computing gets."""
    if kind == RECOMPUTE:
        return rows.RECOMPUTE
    return rows.BACKWARD if is_backward else rows.FORWARD


@compiled
def _do(
    state: Row,
    pieces: Rows,
    channels: Rows,
    launched: Rows,
    log: Rows,
    kind: int,
    where: int,
    amount: float,
    base: int,
) -> None:
    """What the host does in an instruction, on a CPU and ahead of a device."""
    if kind == MEMORY:
        rows.change_memory(state, log, amount, where)
    elif kind == MEMORY_AGAIN:
        rows.note(state, log, rows.RECOMPUTED, state.now_s, amount, where)
        rows.change_memory(state, log, amount, where)
    elif kind == MEMORY_REPLAYED:
        rows.note(state, log, rows.REPLAYED, state.now_s, amount, where)
        rows.change_memory(state, log, amount, where)
    elif kind == RECOMPUTE:
        state.recomputed_s += amount
    elif kind == HAND_OVER:
        transfers.hand_over(state, pieces, channels, launched, log, base + where)
    elif kind == USE:
        transfers.use(state, pieces, channels, launched, log, base + where)
    elif kind == DROP:
        transfers.drop(state, pieces, channels, log, base + where)
