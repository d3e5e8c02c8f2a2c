# SPDX-License-Identifier: Apache-2.0
"""A step whose parameters come in unit by unit, with a clock instead of a drive: `simulate`.

Micro-batch by micro-batch, or layer-major. `Timeline` simulates steps whose parameters stay.

Note [A step with parameters that stream]
Compute goes from visit to visit: a micro-batch in a unit, forward or backward. Which units are in
memory, which are read ahead and which leave follows `parameters/window.py`, Note [Live units], line
for line. Reads go one after the other at the tier's rate, and so do writes; on a tier whose rate is
shared a read holds up the writes. Activations that move are written when their visit ends and read
back one visit ahead, in the same two queues; those of a visit whose backward follows at once stay.
Gradients of a unit that leave do so when its backward has ended for all micro-batches, in the
parameters' queue; those of the unit before have been written by then, or compute waits.
What a micro-batch hands from unit to unit may be written and read there too, by the rule of
`layer_major/boundary.py`: those whose turns are next have it in memory.
An optimizer that goes from bucket to bucket leaves the first units in memory and is no part of
this, see `ProjectedStates`. Any other has all parameters in memory: they are read before it, and
written when the next step begins. The second of two steps counts.

Note [Where it approximates]
A tier in host memory and drives take turns on the link, each at its own rate. Reducing gradients
takes no time. Of a unit that ranks divide, the read of a share or the gathering of the others
counts, whichever takes longer. A write whose bytes are not needed any more still runs to its end.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from megatron.offload.config import DEFAULT_INFLIGHT_BYTES
from megatron.offload.layer_major.boundary import AHEAD
from megatron.offload.moving.order import live_units
from megatron.offload.moving.storage import Where
from megatron.offload.planner.profile.stage_profile import TierProfile

PARAMETERS, KEPT, MOVING = "parameters", "kept by layers", "activations on their way"
GRADIENTS = "gradients"
WAITING = "hidden states that wait", "gradients that wait"

K = TypeVar("K")


class UnitWork(NamedTuple):
    """A unit of layers: bytes of its parameters; all else is for one micro-batch.

    Attributes:
        backward_s: with what is recomputed.
        kept_bytes: activations in memory until its backward has ended.
        moved_bytes: activations on the tier meanwhile.
        gradient_bytes: of all micro-batches together; they leave when they are complete. Those
            that stay do not count here.
    """

    parameter_bytes: int
    forward_s: float
    backward_s: float
    kept_bytes: int = 0
    moved_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True)
class StreamedStep:
    """What a step is made of.

    Attributes:
        units: in the order of the forward pass.
        micro_batches: of a step.
        parameters_on: the tier.
        activations_on: the tier of those that move.
        live_units: in memory at a time.
        boundary_bytes: what a micro-batch hands from unit to unit.
        boundary_on: the tier where that waits; None: it stays in memory.
        inflight_bytes: most activations being written; compute waits beyond it.
        updates_all: the optimizer has all parameters in memory.
        shares: ranks that divide the parameters; each reads a share and gathers the others.
        gather_bytes_per_s: of what comes from the others.
    """

    units: tuple[UnitWork, ...]
    micro_batches: int
    parameters_on: TierProfile
    activations_on: TierProfile | None = None
    live_units: int = 2
    boundary_bytes: int = 0
    boundary_on: TierProfile | None = None
    inflight_bytes: int = DEFAULT_INFLIGHT_BYTES
    updates_all: bool = False
    shares: int = 1
    gather_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class StreamedCost:
    """What forward and backward of such a step cost; bytes as this rank's tiers count them.

    Attributes:
        passes_s: with all waits.
        compute_s: without them.
        waits_s: for `PARAMETERS`, for activations, `KEPT`, with what waits between units, and for
            `GRADIENTS`.
        all_in_s: after that, until an optimizer has all parameters that wants them.
        all_in_bytes: that are read in it.
        read_bytes: of parameters.
        written_bytes: of parameters.
        activation_bytes: written; as many are read, but for those that are needed before.
        gradient_bytes: written; the optimizer reads as many.
        boundary_bytes: written and read of what waits between units, but for hidden states that are
            written as the next unit's activations.
        peak: most bytes in memory at once, by term.
    """

    passes_s: float
    compute_s: float
    waits_s: Mapping[str, float]
    all_in_s: float
    all_in_bytes: int
    read_bytes: int
    written_bytes: int
    activation_bytes: int
    gradient_bytes: int
    boundary_bytes: int
    peak: Mapping[str, int]


class Visit(NamedTuple):
    """A micro-batch in a unit."""

    unit: int
    micro_batch: int
    is_backward: bool


def visits(units: int, micro_batches: int, *, layer_major: bool) -> Iterator[Visit]:
    """All of a step, in order."""
    batches, last = range(micro_batches), units - 1
    if not layer_major:
        for batch in batches:
            yield from (Visit(unit, batch, False) for unit in range(units))
            yield from (Visit(unit, batch, True) for unit in reversed(range(units)))
        return
    yield from (Visit(unit, batch, False) for unit in range(last) for batch in batches)
    yield from (Visit(last, batch, backward) for batch in batches for backward in (False, True))
    yield from (Visit(unit, batch, True) for unit in reversed(range(last)) for batch in batches)


def simulate(step: StreamedStep, *, layer_major: bool) -> StreamedCost:
    """What a settled step costs, micro-batch by micro-batch or layer-major."""
    run = _Run(step)
    run.step(layer_major=layer_major)
    return run.step(layer_major=layer_major)


@dataclass(eq=False)
class _Unit:
    work: UnitWork
    where: Where
    changed: bool
    read_until_s: float = 0.0  # while it is read


@dataclass(eq=False)
class _Write:
    tier: TierProfile
    ends_s: float
    what: _Unit | int  # a unit's parameters, or bytes of a term of memory
    term: str


class _Run:
    """Steps, one after the other. The words are those of `ParameterWindow`."""

    def __init__(self, step: StreamedStep) -> None:
        self._step, self._now_s = step, 0.0
        self._read_until_s = 0.0  # one after the other
        self._writes: collections.deque[_Write] = collections.deque()  # likewise
        self._levels: collections.Counter[str] = collections.Counter()  # bytes now, by term
        self._peak: dict[str, int] = {}
        self._units = [_Unit(work, Where.ON_TIER, False) for work in step.units]
        for unit in self._units[: None if step.updates_all else step.live_units]:
            unit.where, unit.changed = Where.IN_MEMORY, step.updates_all
            self._hold(PARAMETERS, unit.work.parameter_bytes)
        self._used = (0, -1)
        # Activations by unit and micro-batch: being written, or when their read ends.
        self._moved: dict[tuple[int, int], _Write | float] = {}
        # Likewise what a unit has handed over, by the visit that takes it.
        self._handed: dict[Visit, _Write | float] = {}

    def step(self, *, layer_major: bool) -> StreamedCost:
        self._sums: collections.Counter[str] = collections.Counter()
        self._waits_s, self._compute_s = {PARAMETERS: 0.0, KEPT: 0.0, GRADIENTS: 0.0}, 0.0
        self._peak = dict(self._levels)
        began_s, step = self._now_s, self._step
        order = list(visits(len(self._units), step.micro_batches, layer_major=layer_major))
        for number, visit in enumerate(order):
            then = order[number + 1 : number + 1 + 2 * AHEAD]
            taking = [one for one in then if one.unit < len(self._units) - 1 or not one.is_backward]
            self._visit(visit, order[(number + 1) % len(order)], taking[:AHEAD])
        passes_s, waits_s, sums = self._now_s - began_s, dict(self._waits_s), self._sums.copy()
        for unit in self._units if step.updates_all else ():
            self._bring(unit)
            unit.changed = True
        return StreamedCost(
            passes_s,
            self._compute_s,
            waits_s,
            self._now_s - began_s - passes_s,
            self._sums["read"] - sums["read"],
            sums["read"],
            sums["written"],
            sums["moved"],
            sums["gradients"],
            sums["handed"],
            dict(self._peak),
        )

    def _visit(self, visit: Visit, following: Visit, soon: Sequence[Visit]) -> None:
        """Computes.

        Args:
            following: the next visit.
            soon: the next ones that take what a unit has handed over.
        """
        unit, batch, is_backward = visit
        work, last = self._units[unit].work, len(self._units) - 1
        self._use(unit, -1 if is_backward else 1)
        comes, goes = (unit < last, unit > 0) if is_backward else (unit > 0, unit < last)
        if comes:
            self._call_back(visit)
            was_away = visit in self._handed
            self._wait(self._handed.pop(visit, 0.0), KEPT)
            self._hold(WAITING[is_backward], -self._step.boundary_bytes)
        for one in soon:
            self._call_back(one)
        if is_backward:
            self._hold(GRADIENTS, work.gradient_bytes * (batch == 0))
            self._fetch(visit)
            self._wait(self._moved.pop((unit, batch), 0.0), KEPT)
            if following.is_backward:
                self._fetch(following)
        else:
            self._hold(KEPT, work.kept_bytes)
            self._hold(MOVING, work.moved_bytes)
        seconds = work.backward_s if is_backward else work.forward_s
        self._compute_s += seconds
        self._go_on_until(self._now_s + seconds)
        if goes:
            self._hand_over(Visit(unit + (-1 if is_backward else 1), batch, is_backward), soon)
        if is_backward:
            self._hold(KEPT, -work.kept_bytes)
            self._hold(MOVING, -work.moved_bytes)
            if work.gradient_bytes and batch == self._step.micro_batches - 1:
                self._leave(work.gradient_bytes)
        elif work.moved_bytes and following != (unit, batch, True):
            assert self._step.activations_on is not None
            num_bytes = work.moved_bytes - self._input_bytes(unit) * (comes and was_away)
            tier = self._step.activations_on
            self._moved[unit, batch] = self._write(tier, num_bytes, work.moved_bytes, MOVING)
            self._sums["moved"] += work.moved_bytes
            self._bound_writes()

    def _bound_writes(self) -> None:
        """Waits while more is being written than may be."""
        while self._writes and self._step.inflight_bytes < self._levels[MOVING] + sum(
            one.what for one in self._writes if isinstance(one.what, int) and one.term in WAITING
        ):
            self._wait(self._writes[0], KEPT)

    def _hand_over(self, to: Visit, soon: Sequence[Visit]) -> None:
        """What the next unit takes in a visit: it waits."""
        step, term = self._step, WAITING[to.is_backward]
        self._hold(term, step.boundary_bytes)
        if step.boundary_on is None or to in soon:
            return
        num_bytes = step.boundary_bytes
        self._handed[to] = self._write(step.boundary_on, num_bytes, num_bytes, term)
        if to.is_backward or not self._input_bytes(to.unit):
            self._sums["handed"] += num_bytes
        self._bound_writes()

    def _call_back(self, visit: Visit) -> None:
        """Begins to read what a visit takes; what is being written is still there."""
        num_bytes = self._step.boundary_bytes
        if self._read_back(self._handed, visit, num_bytes):
            self._sums["handed"] += num_bytes

    def _input_bytes(self, unit: int) -> int:
        """Of what a unit's layers save and move, what the unit before has handed over."""
        step, moved_bytes = self._step, self._units[unit].work.moved_bytes
        is_written = unit < len(self._units) - 1 and step.activations_on is not None
        return step.boundary_bytes if is_written and moved_bytes >= step.boundary_bytes else 0

    def _leave(self, num_bytes: int) -> None:
        """A unit's gradients are complete: they are written once those before are."""
        for write in [write for write in self._writes if write.term == GRADIENTS]:
            self._wait(write, GRADIENTS)
        self._write(self._step.parameters_on, num_bytes, num_bytes, GRADIENTS)
        self._sums["gradients"] += num_bytes

    def _fetch(self, visit: Visit) -> None:
        """Begins to read a visit's activations; those that are being written are still there."""
        self._read_back(self._moved, visit[:2], self._units[visit.unit].work.moved_bytes)

    def _read_back(self, moved: dict[K, _Write | float], key: K, num_bytes: int) -> bool:
        """Whether it begins a read; what is being written is still there."""
        write = moved.get(key)
        if not isinstance(write, _Write):
            return False
        if write in self._writes:
            write.what = 0
            del moved[key]
            return False
        self._hold(write.term, num_bytes)
        moved[key] = self._read(write.tier, num_bytes)
        return True

    # -- Parameters -----------------------------------------------------------------------------

    def _use(self, number: int, direction: int) -> None:
        if self._used == (number, direction):
            return
        units = self._units
        here = [n for n, one in enumerate(units) if one.where in (Where.IN_MEMORY, Where.READING)]
        wanted, leaving = live_units(
            number, direction, self._step.live_units, len(units), in_memory=here
        )
        for n in leaving:
            self._put_away(units[n])
        for write in [write for write in self._writes if isinstance(write.what, _Unit)][:-1]:
            self._wait(write, PARAMETERS)
        self._used = number, direction
        self._bring(units[number])
        for n in wanted[1:]:
            self._begin_read(units[n])

    def _put_away(self, unit: _Unit) -> None:
        unit.where = Where.WRITING if unit.changed else Where.ON_TIER
        num_bytes = unit.work.parameter_bytes
        if unit.changed:
            share = num_bytes // self._step.shares
            self._write(self._step.parameters_on, share, unit, PARAMETERS)
            self._sums["written"] += share
        else:
            self._hold(PARAMETERS, -num_bytes)

    def _bring(self, unit: _Unit) -> None:
        for write in [write for write in self._writes if write.what is unit]:
            self._wait(write, PARAMETERS)
        self._begin_read(unit)
        if unit.where is Where.READING:
            self._wait(unit.read_until_s, PARAMETERS)
            unit.where = Where.IN_MEMORY

    def _begin_read(self, unit: _Unit) -> None:
        if unit.where is not Where.ON_TIER:
            return
        step, num_bytes = self._step, unit.work.parameter_bytes
        share = num_bytes // step.shares
        self._hold(PARAMETERS, num_bytes)
        self._sums["read"] += share
        gather_s = (num_bytes - share) / step.gather_bytes_per_s
        unit.where = Where.READING
        unit.read_until_s = self._read(step.parameters_on, share, gather_s)

    # -- The clock ------------------------------------------------------------------------------

    def _hold(self, term: str, num_bytes: int) -> None:
        """So many more bytes are in memory."""
        self._levels[term] += num_bytes
        if num_bytes > 0 and self._levels.total() > sum(self._peak.values()):
            self._peak = dict(self._levels)

    def _read(self, tier: TierProfile, num_bytes: int, at_least_s: float = 0.0) -> float:
        """Begins a read; when it will end."""
        seconds = max(tier.latency_s + num_bytes / tier.read_bytes_per_s, at_least_s)
        self._read_until_s = max(self._read_until_s, self._now_s) + seconds
        for write in self._writes:
            if write.tier == tier and tier.shared_bytes_per_s is not None:
                write.ends_s += seconds
        return self._read_until_s

    def _write(self, tier: TierProfile, num_bytes: int, what: _Unit | int, term: str) -> _Write:
        begin_s = max([self._now_s, *(one.ends_s for one in self._writes)])
        if tier.shared_bytes_per_s is not None:
            begin_s = max(begin_s, self._read_until_s)
        ends_s = begin_s + tier.latency_s + num_bytes / tier.write_bytes_per_s
        write = _Write(tier, ends_s, what, term)
        self._writes.append(write)
        return write

    def _wait(self, until: _Write | float, for_what: str) -> None:
        until_s = until if isinstance(until, float) else until.ends_s
        self._waits_s[for_what] += max(until_s - self._now_s, 0.0)
        self._go_on_until(max(until_s, self._now_s))

    def _go_on_until(self, then_s: float) -> None:
        """The clock goes on; writes that end meanwhile free their memory."""
        self._now_s = then_s
        while self._writes and self._writes[0].ends_s <= then_s:
            write = self._writes.popleft()
            what = write.what
            if isinstance(what, int):
                self._hold(write.term, -what)
            else:
                what.where, what.changed = Where.ON_TIER, False
                self._hold(PARAMETERS, -what.work.parameter_bytes)
