# SPDX-License-Identifier: Apache-2.0
"""What a plan will cost, before anything runs: `Timeline` simulates one step of one stage.

The solver asks it thousands of times, a report once. It does no I/O and measures nothing.
The parts, in reading order: `arrays`, `rows`, `instructions`, `launched`, `transfers`,
`other_stages`, `step`.

Note [What is simulated]
    Time passes from event to event: the end of a computation or of a transfer. Each tier has a
    channel for writes and one for reads, and each moves one piece at a time, first come first
    served. While both work, the read has its full rate, the write what is left of the shared one.
    A step begins with the first stage's first forward pass and ends when the last stage is done.
    Forward   A part's bytes are there from when its production begins. At the end of a layer its
              pieces are handed over one by one (or, where operations hand over what they save, as
              they come); compute waits while more than `inflight_bytes` are on their way. A write
              that ends frees its memory. A tier that is full refuses.
    Backward  Pieces come back in reverse order. Reading ahead fills a window of one of the largest
              pieces, of those that were read or are to come, plus what proved missing (waits of a
              hundredth of a pass do not count), at most `inflight_bytes`, and begins when the pass
              before ends; before the loss's backward one piece has to do. A step with waits for
              reads is simulated twice: the second one begins with what proved missing in the first.
              A write that has not begun is cancelled when its piece comes near, one that has begun
              still runs to its end. What was used is freed. A recomputed layer holds all of its
              bytes until its backward ends.
    Pipeline  A pass begins when its input arrives. All stages follow Megatron's order of passes and
              take as long for a pass as this one, with its recomputation and without its waits.
    Behind    See Note [A device behind its host].
    Layer-major  Units are the chunks of the only stage, and all micro-batches are simulated. What a
              unit hands to the next one waits in memory for its turn, in backward its gradient.

Note [A device behind its host]
    Where the profile's `lead_layers` is not 0, an accelerator computes what its host has launched.
    The host launches in no time and waits at few places: where too many bytes are on their way out,
    where the layers ahead of the device would become more than `lead_layers`, for a read of a drive
    that backward needs, in backward behind restored bytes that the device has not used (half of
    `inflight_bytes`), and at the borders of passes with several stages, where Megatron
    synchronizes. Memory is taken, and what was used is freed, when the host comes to it. A write
    frees its memory when it ends, and begins when the device has produced its piece, by operation
    when the device has come to the end of the next one. Copies to and from the host are the
    device's: it makes all of them in their order, those that backward needs no more too, and waits
    itself for those that come back. A stall is a moment in which the device has nothing to compute.

Note [Where it approximates]
    A piece is a storage of the part's average size, or several where a step has very many;
    backward uses up a part's pieces at an even pace. What proved missing may not have settled
    after one step. A chunked loss holds up reading ahead as one in a piece does, which in training
    it does not. Of a long step's micro-batches those that fill the pipeline and three more are
    simulated, the others taken to be like these. Other stages do not wait for this one's waits, nor
    it for theirs. Sending takes no time, nor does the hand-over between threads. Working memory is
    at its most all the time. An allocator's fragments are a fixed part of what it has given out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.offload.activations.placement.plan import Plan, Prediction
from megatron.offload.activations.stats.memory_parts import PredictedPeak
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator import rows
from megatron.offload.planner.simulator.arrays import (
    Ints,
    Rows,
    StageArrays,
    arrays_of,
)
from megatron.offload.planner.simulator.instructions import KEEP_ALL, instructions_of
from megatron.offload.planner.simulator.options import Choices
from megatron.offload.planner.simulator.other_stages import ready_times
from megatron.offload.planner.simulator.peak import peak_of
from megatron.offload.planner.simulator.step import simulate

_NO_LOG = np.empty(0, rows.LOG)


class Cost(NamedTuple):
    """What a step costs and needs in the simulation; seconds and bytes as in `Prediction`."""

    step_s: float
    stall_s: float
    recompute_s: float
    written_bytes: float
    read_bytes: float
    peak_bytes: float
    num_events: float


class Timeline:
    """Simulates steps of a stage, see the Notes above. Deterministic.

    Args:
        profile: of the stage.
        all_micro_batches: simulate every one instead of as many as show a steady state.

    Raises:
        ConfigurationError: the profile's schedule cannot run.
    """

    def __init__(self, profile: StageProfile, *, all_micro_batches: bool = False) -> None:
        self.profile = profile
        self.choices = Choices(profile)
        self.arrays = arrays_of(profile, all_micro_batches=all_micro_batches)
        nothing = np.zeros(profile.position.num_chunks)
        arrays = self.arrays
        if ready_times(arrays.passes, arrays.own, arrays.micro_batches, nothing, nothing)[1] < 0:
            raise ConfigurationError(
                f"{profile.num_micro_batches} micro-batches in groups of "
                f"{profile.position.group_size} make the {profile.position.num_stages} stages wait "
                "for each other for ever; expected a multiple of the group; correct the profile"
            )

    def cost(self, chosen: Ints) -> Cost:
        """What a step costs with choices for all parts: [parts], see `Choices`."""
        return self._cost(self.arrays, chosen)

    @staticmethod
    def _cost(arrays: StageArrays, chosen: Ints) -> Cost:
        return Cost(*simulate(arrays, chosen, _NO_LOG).tolist())

    def predict(self, plan: Plan) -> Prediction:
        """What a step costs with a plan.

        Raises:
            ConfigurationError: the plan is not one for this profile.
        """
        return prediction_of(self._cost(self._arrays_of(plan), self.choices.of_plan(plan)))

    def keep_all(self) -> Prediction:
        """What a step costs that keeps everything and replays nothing."""
        return prediction_of(self.cost(self.choices.all(KEEP_ALL)))

    def explain_peak(self, plan: Plan) -> PredictedPeak:
        """What a plan's predicted peak is made of."""
        log = self.log(plan)
        names = [layer.name for layer in self.profile.layers]
        slack, transient = self.arrays.allocator_slack, self.arrays.transient_bytes
        return peak_of(log, names, slack, transient)

    def log(self, plan: Plan) -> Rows:
        """The rows of what happens in a plan's step; of the micro-batches that are simulated."""
        arrays, chosen = self._arrays_of(plan), self.choices.of_plan(plan)
        instructions, _ = instructions_of(arrays, chosen)
        # The three instructions of a piece make 16 rows at most, another one two.
        log = np.zeros(8 * len(instructions) * len(arrays.passes[arrays.own]), rows.LOG)
        log["kind"] = -1
        simulate(arrays, chosen, log)
        return log[log["kind"] >= 0]

    def _arrays_of(self, plan: Plan) -> StageArrays:
        """With the host's lead as the plan bounds it, where the host has one."""
        if plan.lead_layers is None:
            return self.arrays
        lead_layers = min(plan.lead_layers, self.arrays.lead_layers)
        return self.arrays._replace(lead_layers=lead_layers)


def prediction_of(cost: Cost) -> Prediction:
    """A simulated cost in the words and whole bytes of a plan."""
    return Prediction(
        step_s=cost.step_s,
        stall_s=cost.stall_s,
        recompute_s=cost.recompute_s,
        peak_bytes=round(cost.peak_bytes),
        written_bytes=round(cost.written_bytes),
        read_bytes=round(cost.read_bytes),
    )
