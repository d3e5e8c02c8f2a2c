# SPDX-License-Identifier: Apache-2.0
"""What a device that runs behind its host still has to do, as the simulation has it.

Part of the simulation, see `timeline`, Note [A device behind its host]. `transfers` lets the device
go on while time passes, `step` launches. On a CPU nothing of it is used.

`launched`, [operations] of OPERATION, has what the host has given the device in a step, in order.
"""

from __future__ import annotations

from megatron.offload.planner.simulator.arrays import Row, Rows
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.rows import (
    BEGINS_LAYER,
    HAS_USED,
    LEFT,
    PRODUCED,
    READING,
    WAIT,
    WAIT_FOR_READ,
    WORK,
    note,
)


@compiled
def launch(
    state: Row, launched: Rows, kind: int, where: int, amount: float, shown_as: int = -1
) -> None:
    """The device gets something more to do. It takes the host no time."""
    row = launched[state.num_launched]
    row.kind, row.where, row.amount = kind, where, amount
    row.pass_number, row.shown_as = state.pass_number, shown_as
    state.num_launched += 1


@compiled
def has_caught_up(state: Row) -> bool:
    """Whether the device has done all that it was given."""
    return state.num_passed == state.num_launched


@compiled
def go_on(state: Row, pieces: Rows, launched: Rows, log: Rows) -> None:
    """The device does what takes no time at this moment, until it computes, waits or is idle."""
    while state.is_working == 0 and state.num_passed < state.num_launched:
        row = launched[state.num_passed]
        kind, where = row.kind, row.where
        if kind == WORK:
            state.is_working = 1
            state.reached_s = state.now_s
            state.works_until_s = state.now_s + row.amount
            return
        if kind == WAIT:
            if pieces[where].state in (READING, LEFT):
                return
            _note(state, launched, log, WAIT_FOR_READ, pieces[where].tier)
        elif kind == PRODUCED:
            pieces[where].is_produced = 1
        elif kind == BEGINS_LAYER:
            state.layers_ahead -= 1
        elif kind == HAS_USED:
            state.used_bytes -= row.amount
            state.num_used_marks -= 1
        _pass(state)


@compiled
def end_work(state: Row, launched: Rows, log: Rows) -> None:
    """What the device computes is done."""
    row = launched[state.num_passed]
    _note(state, launched, log, row.shown_as, row.where)
    state.is_working = 0
    state.num_events += 1
    _pass(state)


@compiled
def stands_still(state: Row, seconds: float) -> None:
    """Seconds pass in which the device waits for a read, or has nothing to do."""
    if state.num_passed < state.num_launched:
        state.read_wait_s += seconds
    else:
        state.write_wait_s += seconds


@compiled
def _pass(state: Row) -> None:
    state.num_passed += 1
    state.reached_s = state.now_s


@compiled
def _note(state: Row, launched: Rows, log: Rows, kind: int, where: int) -> None:
    """In the log, as part of the pass that it was launched in."""
    of_host = state.pass_number
    state.pass_number = launched[state.num_passed].pass_number
    note(state, log, kind, state.reached_s, state.now_s, where)
    state.pass_number = of_host
