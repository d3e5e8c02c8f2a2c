# SPDX-License-Identifier: Apache-2.0
"""How long compute stood still for transfers: `ComputeWaits`.

`Writer` tells it of waits for room and `Reader` of waits for reads, both in the thread that
computes, and the hooks of what runs in them. Counters, profiles and logs read what it measured.

Note [Steps whose waits are timed]
On a CPU those of all steps. On other devices a wait costs two timing events, some microseconds, and
there is one for each view that comes back. So they are timed in the steps that the engine is
observed in, which a plan is made from, in the first steps, and in two of sixteen later ones. In
other steps the counters repeat those of the last timed step that the device has passed.

Note [Hooks that a device waits for]
Behind a wait for room the device has nothing queued: it stands still until the host has handed the
next tensor over and launched the next operation, at every tensor of a layer. Where everything
moves, which is what a first plan is made from, that is a third of a layer's seconds (H100, a layer
of Llama-3 8B: 9.8 ms instead of 7.2), and no seconds of computing: a plan that took them for such
would have copies hide behind them. So steps that are noted in detail time the hooks as well. No
operation of the model is queued within one, so what lies between two events around it is what the
device stood still, waits in it included; with the device behind, nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.device.clock import Clock, Moment
from megatron.offload.stats.statistics import StepStatistics

_FIRST_STEPS = 16  # of a run, which people look at
_PERIOD_STEPS, _TIMED_STEPS = 16, 2  # two in a row: one may have been disturbed


@dataclass
class StepWaits:
    """What compute waited for in one step whose waits are timed.

    Attributes:
        stall_s: for reads.
        write_wait_s: for room to write.
        hook_s: for the hooks, without the waits in them; known where the step is noted in detail.
    """

    stall_s: float = 0.0
    write_wait_s: float = 0.0
    hook_s: float = 0.0

    @property
    def seconds(self) -> float:
        """For transfers."""
        return self.stall_s + self.write_wait_s


@dataclass
class _InHook:
    """What compute waited for within one hook."""

    waited_s: float = 0.0


class ComputeWaits:
    """Times what compute waits for.

    Attributes:
        clock: of the device that computes.
        is_timed: whether waits are timed now.
        times_hooks: whether hooks are, with `for_hook`.
        step: the waits of the step under way, or of the last one; None: they are not timed.
        last: those of the last step that are known; None: of none yet.
        number: of waits that were noted in detail so far: hooks, and waits outside of them.
        seconds: of each of those that are known by now.
        traced: what each wait was for, its begin and its end, for a timeline; None: there is no
            timeline.

    Args:
        clock: of the device that computes.
        counted: the counters that are told before the first step.
        is_host: whether a CPU computes.
    """

    def __init__(self, clock: Clock, counted: StepStatistics, *, is_host: bool) -> None:
        self.clock = clock
        self.is_timed = is_host
        self.step: StepWaits | None = StepWaits() if is_host else None
        self.last: StepWaits | None = None
        self.number = 0
        self.seconds: list[float] = []
        self.traced: list[tuple[Scope | str, Moment, Moment]] | None = None
        self._is_host = is_host
        self.times_hooks = False
        self._in_detail = False
        self._in_hook: _InHook | None = None  # under way
        self._counted = counted
        self._num_steps = 0

    def begin_step(self, counted: StepStatistics, *, in_detail: bool) -> None:
        """Times the waits of a step.

        Args:
            counted: the step's counters, which are told.
            in_detail: each wait is noted, for a profile.
        """
        self.clock.read()
        self._num_steps += 1
        is_its_turn = self._num_steps <= _FIRST_STEPS or (
            self._num_steps % _PERIOD_STEPS < _TIMED_STEPS
        )
        self.is_timed = self._is_host or in_detail or is_its_turn
        self.step = StepWaits() if self.is_timed else None
        self._in_detail = in_detail
        self.times_hooks = in_detail and not self._is_host
        self._counted = counted
        if not self._is_host and self.last is not None:
            counted.stall_s, counted.write_wait_s = self.last.stall_s, self.last.write_wait_s

    def end_step(self) -> None:
        """Nothing more is waited for in the step."""
        self._in_detail = self.times_hooks = False
        if self.step is not None:
            now = self.clock.now()
            self.clock.tell(now, now, functools.partial(self._know, self.step, self._counted))
        self.is_timed = self._is_host

    def forget(self) -> None:
        """The profile has been made: forgets the waits that were noted in detail."""
        self.clock.wait()
        self.number = 0
        self.seconds.clear()

    @contextlib.contextmanager
    def for_read(self, what: Scope | str) -> Iterator[None]:
        """Times a wait of compute for bytes that come back, such as those a scope saved."""
        if not self.is_timed:
            yield
            return
        began = self.clock.now()
        yield
        self._note(began, "stall_s", what)

    @contextlib.contextmanager
    def for_room(self) -> Iterator[None]:
        """Times a wait of compute for room to write."""
        if not self.is_timed:
            yield
            return
        began = self.clock.now()
        yield
        self._note(began, "write_wait_s", "wait for room to write")

    @contextlib.contextmanager
    def for_hook(self) -> Iterator[None]:
        """Times what compute stands still for while a hook of forward runs.

        Nothing may be queued in it that computes; see Note [Hooks that a device waits for].
        """
        if not self.times_hooks or self._in_hook is not None:
            yield
            return
        step, found = self.step, _InHook()
        self._in_hook, began = found, self.clock.now()
        try:
            yield
        finally:
            self._in_hook = None
        self.number += 1

        def hear(seconds: float) -> None:
            self.seconds.append(seconds)
            if step is not None:
                step.hook_s += max(seconds - found.waited_s, 0.0)

        self.clock.tell(began, self.clock.now(), hear)

    def _note(self, began: Moment, name: str, what: Scope | str) -> None:
        ended = self.clock.now()
        if self.traced is not None:
            self.traced.append((what, began, ended))
        step, in_hook = self.step, self._in_hook
        in_detail = self._in_detail and in_hook is None
        counted = self._counted if self._is_host else None
        self.number += in_detail

        def hear(seconds: float) -> None:
            if in_hook is not None:
                in_hook.waited_s += seconds
            if in_detail:
                self.seconds.append(seconds)
            for one in (step, counted):
                if one is not None:
                    setattr(one, name, getattr(one, name) + seconds)

        self.clock.tell(began, ended, hear)

    def _know(self, step: StepWaits, counted: StepStatistics, _: float) -> None:
        self.last = step
        if not self._is_host:
            counted.stall_s, counted.write_wait_s = step.stall_s, step.write_wait_s
