# SPDX-License-Identifier: Apache-2.0
"""What may become of each group of a stage, as numbers and as a plan: `Choices`.

The solver and the simulation think in one number for each group, people in a `Plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.plan import Plan, PlannedGroup
from megatron.offload.placement.policy import CHEAP as CHEAP_OF
from megatron.offload.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.placement.profile import LayerProfile, StageProfile
from megatron.offload.placement.script import (
    CHEAP,
    FIRST_TIER,
    KEEP,
    RECOMPUTE_GROUP,
    RECOMPUTE_LAYER,
)
from megatron.offload.placement.tables import Ints


class Choices:
    """The choices that a profile leaves.

    Attributes:
        spans: of each layer, where its groups begin and end among all.
        options: for each layer, tuples of one choice for each of its groups.
    """

    def __init__(self, profile: StageProfile) -> None:
        self.profile = profile
        starts = [0, *itertools.accumulate(len(layer.groups) for layer in profile.layers)]
        self.spans = list(itertools.pairwise(starts))
        self.num_groups = starts[-1]
        self.options = [self._options(layer) for layer in profile.layers]
        self._placements = {
            FIRST_TIER + n: Placement(tier.name) for n, tier in enumerate(profile.tiers)
        }

    def of_group(self, layer: LayerProfile, group: int) -> list[int]:
        """What may become of one group of a layer, unless the layer is recomputed as a whole."""
        profile = layer.groups[group]
        if profile.movable_bytes == 0:
            return [KEEP]
        own = profile.recompute_s is not None and not (
            profile.name == WHOLE_LAYER and layer.recompute_s is not None
        )
        tiers = range(FIRST_TIER, FIRST_TIER + len(self.profile.tiers))
        stays = [KEEP, *tiers]
        if profile.cheap_s is None or profile.cheap_bytes == 0:
            cheap = []
        elif profile.cheap_bytes < profile.movable_bytes:
            cheap = [choice + CHEAP for choice in stays]
        else:
            cheap = [KEEP + CHEAP]  # nothing is left to move
        return [KEEP, *([RECOMPUTE_GROUP] if own else []), *tiers, *cheap]

    def all(self, choice: int) -> Ints:
        """This choice for every group that allows it, at least without `CHEAP`, else `KEEP`."""
        chosen = np.zeros(self.num_groups, np.int64)
        for layer, options, (begin, end) in zip(
            self.profile.layers, self.options, self.spans, strict=True
        ):
            allowed = [self.of_group(layer, n) for n in range(end - begin)]
            wanted = tuple(
                next((one for one in (choice, choice % CHEAP) if one in own), KEEP)
                for own in allowed
            )
            if choice == RECOMPUTE_LAYER:
                wanted = (RECOMPUTE_LAYER,) * (end - begin)
            if wanted in options:
                chosen[begin:end] = wanted
        return chosen

    def plan(self, chosen: Ints, reasons: Sequence[str] | None = None) -> Plan:
        """The lines of a plan.

        Args:
            reasons: for each group; a layer that is recomputed gives its first group's.
        """
        lines = []
        for layer, (begin, end) in zip(self.profile.layers, self.spans, strict=True):
            if begin < end and chosen[begin] == RECOMPUTE_LAYER:
                reason = reasons[begin] if reasons else ""
                lines.append(
                    PlannedGroup(
                        layer.chunk,
                        layer.name,
                        WHOLE_LAYER,
                        Placement.RECOMPUTE,
                        layer.movable_bytes,
                        reason,
                    )
                )
                continue
            for number, group in enumerate(layer.groups, begin):
                choice, reason = int(chosen[number]), reasons[number] if reasons else ""
                cheap_bytes = group.cheap_bytes if choice >= CHEAP else 0
                rest = group.name, self.placement(choice), group.movable_bytes - cheap_bytes
                lines.append(PlannedGroup(layer.chunk, layer.name, *rest, reason))
                if choice >= CHEAP:
                    again = group.name + CHEAP_OF, Placement.RECOMPUTE, cheap_bytes
                    took = f"runs again in {1000 * (group.cheap_s or 0.0):.2g} ms"
                    reason = took if reasons else ""
                    lines.append(PlannedGroup(layer.chunk, layer.name, *again, reason))
        return Plan(tuple(lines), stage=self.profile.layout.stage)

    def placement(self, choice: int) -> Placement:
        """The word for a choice."""
        if choice % CHEAP == KEEP:
            return Placement.KEEP
        return self._placements.get(choice % CHEAP, Placement.RECOMPUTE)

    def of_plan(self, plan: Plan) -> Ints:
        """A plan's choices. Groups that it does not name are kept.

        Raises:
            ConfigurationError: the plan is one of another model or machine.
        """
        chosen = np.zeros(self.num_groups, np.int64)
        places = {(layer.chunk, layer.name): n for n, layer in enumerate(self.profile.layers)}
        # What is said of cheap operations comes on top of what is said of their group.
        for line in sorted(plan.groups, key=lambda one: one.group.endswith(CHEAP_OF)):
            where = places.get((line.chunk, line.layer))
            found = None if where is None else self._of_line(where, line, chosen)
            if where is None or found is None:
                raise ConfigurationError(
                    f"the plan has {line.group} of {line.layer} in chunk {line.chunk} as "
                    f"{line.placement.value}, which the profile does not allow; "
                    "make a plan from this profile"
                )
            begin, end = self.spans[where]
            chosen[begin:end] = np.where(found >= 0, found, chosen[begin:end])
        return chosen

    def _of_line(self, where: int, line: PlannedGroup, chosen: Ints) -> Ints | None:
        """Choices for a layer's groups, -1 where the line says nothing; None if it cannot be.

        Args:
            chosen: what the lines before say, for all groups.
        """
        layer = self.profile.layers[where]
        found = np.full(len(layer.groups), -1, np.int64)
        recomputed = (RECOMPUTE_LAYER,) * len(layer.groups)
        if (
            line.group == WHOLE_LAYER
            and line.placement is Placement.RECOMPUTE
            and recomputed in self.options[where]
        ):
            found[:] = RECOMPUTE_LAYER
            return found
        for number, group in enumerate(layer.groups):
            is_cheap = line.group == group.name + CHEAP_OF
            has_bytes = group.cheap_bytes if is_cheap else group.movable_bytes
            if line.group.removesuffix(CHEAP_OF) == group.name and not has_bytes:
                return found  # with shorter sequences, say: then it is all the same
            on_top = int(chosen[self.spans[where][0] + number]) + CHEAP
            if (
                is_cheap
                and line.placement is Placement.RECOMPUTE
                and on_top in self.of_group(layer, number)
            ):
                found[number] = on_top
                return found
            if line.group == group.name:
                for choice in self.of_group(layer, number):
                    if self.placement(choice) is line.placement:
                        found[number] = choice
                        return found
        return None

    def _options(self, layer: LayerProfile) -> list[tuple[int, ...]]:
        each = [self.of_group(layer, group) for group in range(len(layer.groups))]
        options = list(itertools.product(*each))
        if layer.recompute_s is not None and layer.groups:
            options.append((RECOMPUTE_LAYER,) * len(layer.groups))
        return options
