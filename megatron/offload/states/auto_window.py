# SPDX-License-Identifier: Apache-2.0
"""Chooses the window of optimizer states once the first steps have been measured: `AutoWindow`.

For `--optimizer-state-offload auto`. If the planner of activations divides the same memory, it
calls `budgets` and `choose`; otherwise `after_step` decides. One line of the log says what was
decided, and why.

Note [What a larger window is worth]
States in the window are neither written nor read, but take memory from activations. Both prices are
known for a few ways to divide memory: `predict` knows that of the window, the planner that of
activations. On an accelerator the window is in host memory and takes nothing from activations: its
size is set when the tiers are opened, and activations get all of the device's room.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron.offload.device.device import Device
from megatron.offload.sizes import format_size
from megatron.offload.states.measured import profile_of, window_of
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.prediction import (
    StatesProfile,
    best_window,
    hiding_factor,
    predict,
    windows,
)

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 5
_NUM_CHOICES = 4  # ways to divide memory: the planner solves once for each


class AutoWindow:
    """Decides once how large the window of one optimizer's states is.

    Args:
        states: whose window it is.
        device: of the run.
        budget_bytes: most memory of the device that the run may take: on a CPU its resident set;
            None: the window takes what helps, up to half of what is free.
        write_limit_bytes_per_s: see `profile_of`.
        num_sharing: how many windows share the free memory, this one included.
    """

    def __init__(
        self,
        states: OptimizerStates,
        device: Device,
        budget_bytes: int | None,
        *,
        write_limit_bytes_per_s: float | None = None,
        num_sharing: int = 1,
    ) -> None:
        self.is_decided = False
        self._states = states
        self._device = device
        self._peak = device.peak_reader()
        self._budget_bytes = budget_bytes
        self._write_limit_bytes_per_s = write_limit_bytes_per_s
        self._num_sharing = num_sharing
        self._peak_bytes = 0
        self._choices: list[int] = []

    def after_step(self) -> None:
        """A step of the optimizer has ended: decides once enough steps were measured."""
        if self.is_decided:
            return
        if self._states.meter.num_steps > 1:
            self._peak_bytes = max(self._peak_bytes, self._peak.peak_bytes())
        self._peak.reset()
        if self._states.meter.num_steps < _MEASURED_STEPS:
            return
        profile = self._profile()
        if profile is not None:
            self._decide(profile, self._most_bytes(), "what the first steps left of memory")

    # -- Together with activations ----------------------------------------------------------------

    def budgets(self, activation_bytes: int, given_bytes: int | None) -> list[int]:
        """Budgets that activations can choose among, the largest first.

        Args:
            activation_bytes: the most that they took in the steps so far.
            given_bytes: a budget that the user has set; None: none.

        Returns:
            Empty: nothing has been measured, or memory is not to be divided.
        """
        profile = self._profile()
        if profile is None or self._budget_bytes is None:
            return []
        peak_bytes = max(self._peak_bytes, self._peak.peak_bytes())
        room = self._budget_bytes - (peak_bytes - activation_bytes)
        if not self._device.is_host:
            return [given_bytes if given_bytes is not None else max(room, 0)]
        room += self._states.window_bytes
        if given_bytes is not None:
            self._choices = [max(room - given_bytes, 0)]
            return [given_bytes]
        sizes = windows(profile, room)
        step = max((len(sizes) - 1) // (_NUM_CHOICES - 1), 1)
        self._choices = sorted({*sizes[::step], sizes[-1]})
        return [max(room - size, 0) for size in self._choices]

    def choose(self, seconds: Sequence[float]) -> int:
        """Index of the budget in `budgets` that makes the fastest step.

        Args:
            seconds: of a step with each budget, without the optimizer; infinite: impossible.
        """
        profile = self._profile()
        if profile is None or not self._choices:
            return 0
        totals = [
            plan_s + predict(profile, size).optimizer_s
            for plan_s, size in zip(seconds, self._choices, strict=True)
        ]
        return totals.index(min(totals))

    def settle(self, number: int, budget_bytes: int) -> None:
        """Takes the choice with this number; activations get `budget_bytes`."""
        profile = self._profile()
        if profile is not None and self._choices:
            why = f"activations take {format_size(budget_bytes)}, the fastest way to divide memory"
            self._decide(profile, self._choices[number], why)
        self.is_decided = True

    # -- The decision -----------------------------------------------------------------------------

    def _profile(self) -> StatesProfile | None:
        return profile_of(self._states, self._write_limit_bytes_per_s)

    def _most_bytes(self) -> int:
        """The most that the window may take, with memory as it is now."""
        window_bytes = self._states.window_bytes
        if self._budget_bytes is None:
            return window_bytes + self._device.free_bytes() // 2 // self._num_sharing
        return window_bytes + (self._budget_bytes - self._peak_bytes) // self._num_sharing

    def _decide(self, profile: StatesProfile, most_bytes: int, why: str) -> None:
        self.is_decided = True
        states = self._states
        if self._device.is_host:
            states.window_bytes, found = best_window(profile, most_bytes)
        else:
            found = predict(profile, window_of(states))
        own_s = sum(profile.bucket_bytes) * profile.update_s_per_byte
        moving_s = found.optimizer_s - own_s
        text = (
            f"window {format_size(window_of(states))} of {format_size(states.num_bytes)} ({why}); "
            f"a step should take {found.step_s:.3f} s, {moving_s:.3f} s of it to move "
            f"{format_size(found.moved_bytes)} out and in"
        )
        factor = hiding_factor(profile, found)
        if factor > 1:
            text += f"; with {factor:.1f} times the tokens a step that would be 5 % of it"
        logger.info("optimizer states: %s", text)


class NoWindow:
    """Stands for an `AutoWindow` on a rank that has no states, where other ranks have some."""

    def budgets(self, activation_bytes: int, given_bytes: int | None) -> list[int]:
        """No budgets."""
        return []

    def choose(self, seconds: Sequence[float]) -> int:
        """Never called, because there are no budgets."""
        return 0

    def settle(self, number: int, budget_bytes: int) -> None:
        """Does nothing."""
