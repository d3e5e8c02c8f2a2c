# SPDX-License-Identifier: Apache-2.0
"""What the planner has to know of the stage that it plans for: `Stage`.

An integration fills it in, once. It knows which plans the stage cannot follow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import HandsOver


@dataclass(frozen=True)
class Stage:
    """A pipeline stage as the planner sees it: its layers and what they allow.

    Attributes:
        position: its place in the pipeline.
        layers: chunk and name of each layer, in the order of the forward pass.
        why_not_recomputed: what keeps its layers from being recomputed; empty: nothing does.
        speaks: whether this rank's plan is the one of its stage that is shown and written.
        num_local_ranks: ranks on this machine, which share a CPU's memory.
        hands_over: when the integration hands over what is to leave, see `StageProfile`.
        not_alone: layers with the parts of theirs that cannot be recomputed without the rest.
        divides_layers: whether attention and MLP of a layer get placements of their own.
    """

    position: PipelinePosition
    layers: Sequence[tuple[int, str]]
    why_not_recomputed: str = ""
    speaks: bool = True
    num_local_ranks: int = 1
    not_alone: Collection[tuple[str, str]] = ()
    hands_over: HandsOver = "layer"
    divides_layers: bool = True

    def table(self, plan: Plan) -> str:
        """A plan for it as people read it."""
        return plan_table(plan, chunk_is=self.position.chunk_is)

    def check(self, plan: Plan, tiers: Collection[Placement], path: Path) -> None:
        """Raises an error if the stage cannot follow a plan.

        Args:
            plan: from a file.
            tiers: placements that there is a tier for.
            path: of that file, for the message.

        Raises:
            ConfigurationError: it cannot.
        """
        plan.check(self.layers, tiers)
        why_not = self.why_not_recomputed
        if why_not and Placement.RECOMPUTE in plan.placements.values():
            raise ConfigurationError(f"the plan {path} cannot recompute {why_not}; plan again")
        for one in plan.parts:
            if not self.divides_layers and one.part != WHOLE_LAYER:
                raise ConfigurationError(
                    f"the plan {path} has {one.part} of {one.layer}, and layers of this model are "
                    f"placed as a whole; call the part {WHOLE_LAYER}, once for each layer"
                )
            alone = (one.layer, one.part) not in self.not_alone
            if one.placement is Placement.RECOMPUTE and not alone:
                raise ConfigurationError(
                    f"the plan {path} recomputes {one.part} of {one.layer} alone, which that "
                    f"layer does not allow; place it elsewhere, or recompute its {WHOLE_LAYER}"
                )
