# SPDX-License-Identifier: Apache-2.0
"""Plans come from a process of their own, and so do its errors; torch never gets there."""

from __future__ import annotations

import sys

import pytest

from megatron.offload import OffloadError
from megatron.offload.errors import InfeasibleBudgetError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
)
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.planner.solver.process import SolverProcess
from megatron.offload.planner.solver.solve import solve
from tests.support.processes import finish, start_python

MIB = 1 << 20


def profile() -> StageProfile:
    """Four layers of 8 MiB; an SSD that is fast enough for half of it."""
    parts = (
        PartProfile("attention", 3 * MIB, 0, 2, 0.005, 0.01),
        PartProfile("mlp", 5 * MIB, 0, 2, 0.01, 0.0),
    )
    layers = tuple(
        LayerProfile(0, f"decoder.{n}", 0.01, 0.02, 0.01, MIB, parts) for n in range(1, 5)
    )
    tiers = (TierProfile("ssd", 4e8, 4e8),)
    once = (0.001,)
    return StageProfile(PipelinePosition(1, 0, 1, 1), 2, layers, tiers, once, once, once, once)


@pytest.mark.slow
def test_it_answers_as_the_solver_does_here() -> None:
    budget_bytes = 24 * MIB
    with SolverProcess() as solver:
        plan = solver.solve(profile(), budget_bytes=budget_bytes, max_slowdown=None)
        offloaded = solver.predict(profile(), None)
        planned = solver.predict(profile(), plan)
        with pytest.raises(InfeasibleBudgetError) as refused:
            solver.solve(profile(), budget_bytes=1000, max_slowdown=None)
    assert plan == solve(profile(), budget_bytes=budget_bytes)
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget_bytes
    assert planned == plan.predicted
    timeline = Timeline(profile())
    kept = timeline.cost(timeline.choices.all(0)).peak_bytes
    assert 0 < offloaded.peak_bytes < kept
    assert 1000 < refused.value.smallest_bytes < kept and refused.value.step_s > 0


def test_a_process_that_dies_is_an_error_that_says_so() -> None:
    solver = SolverProcess()
    with pytest.raises(OffloadError, match="ended with exit code -9"), solver:
        solver._process.kill()
        solver.predict(profile(), None)
    assert solver._process.returncode == -9


WITHOUT_TORCH = """
    import sys
    import megatron.offload.planner.solver.process
    import megatron.offload.planner.solver.solve
    assert "torch" not in sys.modules, "torch"
"""


def test_it_has_no_torch() -> None:
    code, _, errors = finish(start_python(WITHOUT_TORCH))
    assert code == 0, errors
    assert "torch" in sys.modules  # which this process has
