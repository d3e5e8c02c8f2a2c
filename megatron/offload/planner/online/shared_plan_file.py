# SPDX-License-Identifier: Apache-2.0
"""The file of `--activation-offload-plan`, as the ranks of a run share it: `SharedPlanFile`.

`activations/placement/plan_file.py` reads and writes what is in the file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron.offload.activations.placement.atomic_file import check_place
from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.plan_file import load_plans, save_plans, update_plan
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.planner.online.consensus import RankConsensus, check_same, raise_first
from megatron.offload.planner.online.stage import Stage

logger = logging.getLogger(__name__)


class SharedPlanFile:
    """A plan file that all ranks of a run read, or none; one rank of each stage writes it.

    Args:
        path: the same on all ranks; the file need not be there.
        stage: of this rank.
        consensus: of the ranks of the run.
    """

    def __init__(self, path: Path, stage: Stage, consensus: RankConsensus) -> None:
        self.path = path
        self._stage = stage
        self._consensus = consensus

    def load(self, tiers: Collection[Placement]) -> Plan | None:
        """The plan of this rank's stage; None: there is no file yet, and there is a place for it.

        Args:
            tiers: placements that there is a tier for.

        Raises:
            ConfigurationError: the file is no plan, does not fit, or is not there for all ranks.
        """
        plan, message = None, None
        try:
            plan = self._own_plan(tiers) if self.path.is_file() else None
            if plan is None and self._is_writer:
                check_place(self.path)
        except ConfigurationError as error:
            message = str(error).removeprefix(PREFIX)
        except OSError as error:
            message = f"--activation-offload-plan has no place: {error}; give another path"
        told = self._consensus.of_all((plan is not None, message))
        raise_first(message for _, message in told)
        if len({found for found, _ in told}) > 1:
            raise ConfigurationError(
                f"the plan {self.path} is there for some ranks only; put it where all machines "
                "see it"
            )
        if plan is not None:
            check_same(plan, self._consensus)
        return plan

    def save(self, plans: Iterable[Plan]) -> None:
        """Writes the plans of all stages. A file that cannot be written does not stop the
        training."""
        try:
            save_plans(self.path, plans)
            logger.info("activation offload: the plan is in %s", self.path)
        except OSError as error:
            logger.warning("activation offload: the plan could not be written: %s", error)

    def update(self, plan: Plan) -> None:
        """Puts the plan of this rank's stage in the place of its last one."""
        if self._stage.speaks:
            with contextlib.suppress(ConfigurationError, OSError):  # said when the first was made
                update_plan(self.path, plan)

    @property
    def _is_writer(self) -> bool:
        return self._stage.speaks and self._stage.position.stage == 0

    def _own_plan(self, tiers: Collection[Placement]) -> Plan:
        stage, plans = self._stage.position.stage, load_plans(self.path)
        if stage not in plans:
            raise ConfigurationError(
                f"the plan {self.path} has stages {', '.join(map(str, sorted(plans)))}, and none "
                f"numbered {stage}; plan again for this layout"
            )
        self._stage.check(plans[stage], tiers, self.path)
        return plans[stage]
