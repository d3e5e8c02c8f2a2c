# SPDX-License-Identifier: Apache-2.0
"""What a projected step does with optimizer states that are on SSDs: `ProjectedStates`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron.offload.planner.profile.stage_profile import StageProfile, TierProfile
from megatron.offload.sizes import MIB
from megatron.offload.states.prediction import (
    StatesPrediction,
    StatesProfile,
    hiding_factor,
    predict,
)

# States that move together; only so many are simulated, larger ones in their place.
_BUCKET_BYTES, _MOST_BUCKETS = 32 * MIB, 200
_LEAST_SHARE = 0.1  # of a drive, that activations get whatever states take


@dataclass(frozen=True)
class ProjectedStates:
    """States of one rank's optimizer.

    Attributes:
        num_bytes: of all of them.
        window_bytes: of them, what may be in memory that is not the drives'.
        tier: where the others are.
        update_s: of the optimizer alone.
        between_s: of a step, all but the optimizer.
        tokens: of a step of one model copy.
        read_beside_bytes: read with them, and not written: gradients.
    """

    num_bytes: int
    window_bytes: int
    tier: TierProfile
    update_s: float
    between_s: float
    tokens: int
    read_beside_bytes: int = 0

    @functools.cached_property
    def profile(self) -> StatesProfile:
        """What a run would measure; a drive that does both divides what it can in two."""
        number = min(max(round(self.num_bytes / _BUCKET_BYTES), 1), _MOST_BUCKETS)
        shared = self.tier.shared_bytes_per_s
        most = shared / 2 if shared is not None else float("inf")
        part = self.num_bytes / max(self.num_bytes + self.read_beside_bytes, 1)  # of what is read
        return StatesProfile(
            bucket_bytes=(max(self.num_bytes // number, 1),) * number,
            read_bytes_per_s=min(self.tier.read_bytes_per_s, most) * part,
            write_bytes_per_s=min(self.tier.write_bytes_per_s, most),
            update_s_per_byte=self.update_s / max(self.num_bytes, 1),
            between_s=self.between_s,
            prefetch_s=self.between_s / 3,  # the second half of backward
        )

    @functools.cached_property
    def predicted(self) -> StatesPrediction:
        """A settled step."""
        return predict(self.profile, max(self.window_bytes, 3 * self.profile.bucket_bytes[0]))

    @property
    def tokens_to_hide(self) -> int:
        """Tokens of a step from which on moving states costs at most 5 % of it."""
        return int(self.tokens * hiding_factor(self.profile, self.predicted))

    @property
    def written_bytes_per_s(self) -> float:
        """On average over the step."""
        return self.predicted.moved_bytes / self.predicted.step_s

    def beside(self, profile: StageProfile) -> StageProfile:
        """The profile of the stage with its states there.

        The optimizer takes longer, and what it moves of the tier's bytes is not for activations.
        """
        extra_s = self.predicted.optimizer_s - self.update_s
        return dataclasses.replace(
            profile,
            tiers=tuple(
                self._rest_of(one) if one.name == self.tier.name else one for one in profile.tiers
            ),
            step_fixed_s=profile.step_fixed_s + extra_s,
        )

    def _rest_of(self, tier: TierProfile) -> TierProfile:
        taken, shared = self.written_bytes_per_s, tier.shared_bytes_per_s
        capacity = tier.capacity_bytes
        return dataclasses.replace(
            tier,
            write_bytes_per_s=_rest(tier.write_bytes_per_s, taken),
            read_bytes_per_s=_rest(tier.read_bytes_per_s, taken),
            shared_bytes_per_s=None if shared is None else _rest(shared, 2 * taken),
            capacity_bytes=None if capacity is None else max(capacity - self.num_bytes, 0),
        )


def _rest(rate: float, taken: float) -> float:
    return max(rate - taken, _LEAST_SHARE * rate)
