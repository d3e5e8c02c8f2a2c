# SPDX-License-Identifier: Apache-2.0
"""What may become of each part of a stage, as numbers and as a plan: `Choices`.

The solver and the simulation think in one number for each part, people in a `Plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.policy import SELECTIVE, WHOLE_LAYER, Placement
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import LayerProfile, PartProfile, StageProfile
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import (
    EXACT_OFFSET,
    FIRST_TIER,
    INPUT_OFFSET,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
    RECOMPUTE_PART,
    SELECTIVE_OFFSET,
    base_of,
    is_exact,
    is_selective,
    saved_bytes,
    selective_bytes,
)


def recomputes_layer(choice: int) -> bool:
    """Whether a part's layer is recomputed as a whole, wherever its input waits."""
    return base_of(choice) == RECOMPUTE_LAYER


def from_tier(choice: int, tier: int) -> int:
    """A recomputation whose input waits on the tier of that number."""
    return choice + INPUT_OFFSET * (1 + tier)


class Choices:
    """The choices that a profile leaves.

    Attributes:
        spans: of each layer, where its parts begin and end among all.
        options: for each layer, tuples of one choice for each of its parts.
    """

    def __init__(self, profile: StageProfile) -> None:
        self.profile = profile
        starts = [0, *itertools.accumulate(len(layer.parts) for layer in profile.layers)]
        self.spans = list(itertools.pairwise(starts))
        self.num_parts = starts[-1]
        self.options = [self._options(layer) for layer in profile.layers]
        self._placements = {
            FIRST_TIER + n: Placement(tier.name) for n, tier in enumerate(profile.tiers)
        }

    def of_part(self, layer: LayerProfile, part: int) -> list[int]:
        """What may become of one part of a layer, unless the layer is recomputed as a whole."""
        profile = layer.parts[part]
        kept = [KEEP, KEEP_ALL] if profile.replayed_bytes else [KEEP]
        if profile.movable_bytes == 0:
            return kept
        own = profile.recompute_s is not None and not (
            profile.name == WHOLE_LAYER and layer.recompute_s is not None
        )
        tiers = range(FIRST_TIER, FIRST_TIER + len(self.profile.tiers))
        stays = [KEEP, *tiers]
        selective = _selective(stays, profile, profile.movable_bytes, profile.selective_bytes)
        again = [RECOMPUTE_PART] if own else []
        if own and profile.movable_input_bytes:
            again += [from_tier(RECOMPUTE_PART, n) for n in range(len(self.profile.tiers))]
        exact: list[int] = []
        if profile.codec_spared_bytes:
            exact_bytes = profile.movable_bytes + profile.codec_spared_bytes
            exact = [
                choice + EXACT_OFFSET
                for choice in (
                    *stays,
                    *_selective(stays, profile, exact_bytes, profile.exact_selective_bytes),
                )
            ]
        return [*kept, *again, *tiers, *selective, *exact]

    def of_layer(self, layer: LayerProfile) -> list[int]:
        """The ways to recompute a layer as a whole; one is then the choice of all of its parts."""
        if layer.recompute_s is None or not layer.parts:
            return []
        tiers = range(len(self.profile.tiers)) if layer.movable_input_bytes else ()
        return [RECOMPUTE_LAYER, *(from_tier(RECOMPUTE_LAYER, n) for n in tiers)]

    def all(self, choice: int) -> Ints:
        """This choice where a part allows it, else without what is added to it, else `KEEP`."""
        chosen = np.zeros(self.num_parts, np.int64)
        for layer, options, (begin, end) in zip(
            self.profile.layers, self.options, self.spans, strict=True
        ):
            allowed = [self.of_part(layer, n) for n in range(end - begin)]
            wanted = tuple(
                next((one for one in (choice, base_of(choice)) if one in own), KEEP)
                for own in allowed
            )
            if recomputes_layer(choice):
                way = choice if choice in self.of_layer(layer) else RECOMPUTE_LAYER
                wanted = (way,) * (end - begin)
            if wanted in options:
                chosen[begin:end] = wanted
        return chosen

    def plan(self, chosen: Ints, reasons: Sequence[str] | None = None) -> Plan:
        """Puts choices into the lines of a plan.

        Args:
            reasons: for each part; a layer that is recomputed gives its first part's.
        """
        lines = []
        for layer, (begin, end) in zip(self.profile.layers, self.spans, strict=True):
            if begin < end and recomputes_layer(int(chosen[begin])):
                reason = reasons[begin] if reasons else ""
                lines.append(
                    PlannedPart(
                        layer.chunk,
                        layer.name,
                        WHOLE_LAYER,
                        Placement.RECOMPUTE,
                        layer.movable_bytes,
                        reason,
                        self.input_placement(int(chosen[begin])),
                    )
                )
                continue
            for number, part in enumerate(layer.parts, begin):
                choice, reason = int(chosen[number]), reasons[number] if reasons else ""
                rest = part.name, self.placement(choice), saved_bytes(part, choice)
                start = self.input_placement(choice)
                how = choice != KEEP_ALL, not is_exact(choice)
                lines.append(PlannedPart(layer.chunk, layer.name, *rest, reason, start, *how))
                if is_selective(choice):
                    size = selective_bytes(part, choice)
                    again = part.name + SELECTIVE, Placement.RECOMPUTE, size
                    took = f"runs again in {1000 * (part.selective_s or 0.0):.2g} ms"
                    reason = took if reasons else ""
                    lines.append(PlannedPart(layer.chunk, layer.name, *again, reason))
        return Plan(tuple(lines), stage=self.profile.position.stage)

    def placement(self, choice: int) -> Placement:
        """Says a choice as a plan's placement."""
        if base_of(choice) in (KEEP, KEEP_ALL):
            return Placement.KEEP
        return self._placements.get(base_of(choice), Placement.RECOMPUTE)

    def input_placement(self, choice: int) -> Placement:
        """Where what a recomputation starts from goes."""
        tier = choice // INPUT_OFFSET - 1
        return Placement.KEEP if tier < 0 else self._placements[FIRST_TIER + tier]

    def moved_bytes(self, chosen: Ints) -> dict[Placement, int]:
        """Bytes of a micro-batch that go to each tier."""
        moved = dict.fromkeys(self._placements.values(), 0)
        for layer, (begin, _) in zip(self.profile.layers, self.spans, strict=True):
            for number, part in enumerate(layer.parts, begin):
                choice = int(chosen[number])
                if (placement := self.placement(choice)) in moved:
                    moved[placement] += saved_bytes(part, choice)
                elif (start := self.input_placement(choice)) in moved:
                    of_layer = recomputes_layer(choice)
                    if not of_layer or number == begin:
                        moved[start] += (layer if of_layer else part).movable_input_bytes
        return moved

    def of_plan(self, plan: Plan) -> Ints:
        """The choices that a plan makes; parts that it does not name are kept.

        Raises:
            ConfigurationError: the plan is one of another model or machine.
        """
        chosen = np.zeros(self.num_parts, np.int64)
        places = {(layer.chunk, layer.name): n for n, layer in enumerate(self.profile.layers)}
        # What is said of selective operations comes on top of what is said of their part.
        for line in sorted(plan.parts, key=lambda one: one.part.endswith(SELECTIVE)):
            where = places.get((line.chunk, line.layer))
            found = None if where is None else self._of_line(where, line, chosen)
            if where is None or found is None:
                raise ConfigurationError(
                    f"the plan has {line.part} of {line.layer} in chunk {line.chunk} as "
                    f"{line.placement.value}, which the profile does not allow; "
                    "make a plan from this profile"
                )
            begin, end = self.spans[where]
            chosen[begin:end] = np.where(found >= 0, found, chosen[begin:end])
        return chosen

    def _of_line(self, where: int, line: PlannedPart, chosen: Ints) -> Ints | None:
        """Choices for a layer's parts, -1 where the line says nothing; None if it cannot be.

        Args:
            chosen: what the lines before say, for all parts.
        """
        layer = self.profile.layers[where]
        found = np.full(len(layer.parts), -1, np.int64)
        if line.part == WHOLE_LAYER and line.placement is Placement.RECOMPUTE:
            can_move = layer.movable_input_bytes > 0
            for choice in self.of_layer(layer):
                if self._starts_as(line, choice, can_move=can_move):
                    found[:] = choice
                    return found
        for number, part in enumerate(layer.parts):
            is_selective = line.part == part.name + SELECTIVE
            on_top = int(chosen[self.spans[where][0] + number]) + SELECTIVE_OFFSET
            has_bytes = part.movable_bytes + part.replayed_bytes
            if is_selective:
                has_bytes = selective_bytes(part, on_top)
            if line.part.removesuffix(SELECTIVE) == part.name and not has_bytes:
                return found  # with shorter sequences, say: then it is all the same
            if (
                is_selective
                and line.placement is Placement.RECOMPUTE
                and on_top in self.of_part(layer, number)
            ):
                found[number] = on_top
                return found
            if line.part == part.name:
                can_move = part.movable_input_bytes > 0
                keeps_all = not line.replays and part.replayed_bytes > 0
                exact = not line.encodes and part.codec_spared_bytes > 0 and not keeps_all
                for choice in self.of_part(layer, number):
                    if (
                        self.placement(choice) is line.placement
                        and (choice == KEEP_ALL) is keeps_all
                        and is_exact(choice) is exact
                        and self._starts_as(line, choice, can_move=can_move)
                    ):
                        found[number] = choice
                        return found
        return None

    def _starts_as(self, line: PlannedPart, choice: int, *, can_move: bool) -> bool:
        """Whether a choice has the input of a recomputation where a line does.

        Where none can move, with shorter sequences, say, it is all the same.
        """
        return self.input_placement(choice) is (line.input if can_move else Placement.KEEP)

    def _options(self, layer: LayerProfile) -> list[tuple[int, ...]]:
        each = [self.of_part(layer, part) for part in range(len(layer.parts))]
        options = list(itertools.product(*each))
        return [*options, *((choice,) * len(layer.parts) for choice in self.of_layer(layer))]


def _selective(
    stays: Sequence[int], part: PartProfile, all_bytes: int, again_bytes: int
) -> list[int]:
    """Choices with selective recomputation for a part that saves bytes and produces some again."""
    if part.selective_s is None or again_bytes == 0:
        return []
    if again_bytes < all_bytes:
        return [choice + SELECTIVE_OFFSET for choice in stays]
    return [KEEP + SELECTIVE_OFFSET]  # nothing is left to move
