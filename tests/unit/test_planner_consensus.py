# SPDX-License-Identifier: Apache-2.0
"""What a rank hears from the others of its group counts as much as what it has found itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import OffloadConfig, OffloadError, Placement
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.planner.online import step_meter
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.drift import Reason
from megatron.offload.planner.online.planner import Phase
from megatron.offload.planner.profile.stage_profile import TierProfile
from megatron.offload.stats.memory import PeakMemory
from tests.support import planned
from tests.support.planned import GIB, REFINING_STEPS, Run

MIB = 1 << 20


class Group(SingleRank):
    """What another rank says, by what is compared."""

    def __init__(self, **others: Callable[[list[float]], list[float]]) -> None:
        self._others = others

    def _heard(self, name: str, values: Sequence[float]) -> list[float]:
        own = list(values)
        return self._others[name](own) if name in self._others else own

    def means(self, values: Sequence[float]) -> list[float]:
        return self._heard("means", values)

    def largest(self, values: Sequence[float]) -> list[float]:
        return self._heard(_what(values), values)


def _what(values: Sequence[float]) -> str:
    """What ranks compare, seen by the values."""
    if len(values) == 1:
        return "one"
    if len(values) == len(Reason) and set(values) <= {0.0, 1.0}:
        return "findings"
    if len(values) > 2:
        return "sizes"
    first, second = values
    return "digests" if first and first == -second else "whole_steps"


def config(tmp_path: Path, **changes: Any) -> OffloadConfig:
    settings: dict[str, Any] = {
        "mode": "auto",
        "directories": (tmp_path,),
        "min_bytes": 1,
        "memory_budget_bytes": 16 * GIB,
        **changes,
    }
    return OffloadConfig(**settings)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(config(tmp_path))
    run.solver.placement = Placement.KEEP
    yield run
    run.engine.close()


def test_the_profile_is_the_groups(run: Run) -> None:
    run.planner._consensus = Group(
        means=lambda own: [7.0] * len(own),
        sizes=lambda own: [size + 1000 if size > 4096 else size for size in own],
        whole_steps=lambda own: [1.0, own[1]],  # as the simulation has it
    )
    run.steps(3)
    profile = run.solver.asked[0][0]
    assert profile.layers[0].forward_s == 7.0 and profile.tiers[0].write_bytes_per_s == 7.0
    assert profile.layers[0].movable_bytes % 4096 == 1000


def test_the_first_plan_is_for_the_rank_that_takes_the_most_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 100 * MIB)
    run.planner._consensus = Group(whole_steps=lambda own: [own[0], 900.0 * MIB])
    run.steps(3)
    assert run.solver.asked[0][0].transient_bytes == 900 * MIB


def test_so_is_every_later_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 100 * MIB)
    run.steps(3)
    run.planner._consensus = Group(
        whole_steps=lambda own: [own[0], 900.0 * MIB],
        findings=lambda own: [1.0, *own[1:]],
    )
    run.step()
    assert run.solver.asked[-1][0].transient_bytes == 900 * MIB


@pytest.mark.parametrize("first", [True, False])
def test_ranks_with_different_plans_stop(run: Run, first: bool) -> None:
    other = Group(digests=lambda own: [own[0] + 1, own[1]], findings=lambda own: [1.0, *own[1:]])
    run.steps(2 if first else 3)
    run.planner._consensus = other
    with pytest.raises(OffloadError, match="have come to different plans"):
        run.step()


def test_a_rank_over_its_budget_makes_all_plan_at_once(run: Run) -> None:
    run.steps(3)
    run.planner._consensus = Group(
        findings=lambda own: [1.0, *own[1:]], means=lambda own: [7.0] * len(own)
    )
    run.step()
    assert run.planner.num_plans == 2 and run.planner.phase is Phase.FOLLOWING
    assert run.solver.asked[-1][0].tiers[0].write_bytes_per_s == 7.0


@pytest.mark.parametrize("reason", [Reason.SLOWER, Reason.UNEXPECTED], ids=str)
def test_a_rank_that_notices_a_change_makes_all_measure(reason: Reason, run: Run) -> None:
    run.steps(3)
    run.planner._consensus = Group(findings=lambda _: [float(one is reason) for one in Reason])
    run.step()
    is_unexpected = reason is Reason.UNEXPECTED
    phase, num_steps = (Phase.REFINING, REFINING_STEPS) if is_unexpected else (Phase.UPDATING, 1)
    assert run.planner.num_plans == 1 and run.planner.phase is phase
    run.solver.placement = Placement.SSD
    run.steps(num_steps)
    assert run.planner.num_plans == 2 and run.planner.phase is Phase.FOLLOWING


def test_the_most_urgent_reason_counts(run: Run) -> None:
    run.steps(3)
    run.planner._consensus = Group(findings=lambda own: [1.0] * len(own))
    run.step()
    assert run.planner.num_plans == 2 and run.planner.phase is Phase.FOLLOWING


def test_where_one_rank_finds_no_plan_all_keep_theirs(run: Run) -> None:
    run.steps(3)
    before = run.planner.plan
    run.solver.placement = Placement.SSD
    run.planner._consensus = Group(
        one=lambda own: [1.0] if own == [0.0] else own, findings=lambda own: [1.0, *own[1:]]
    )
    run.step()
    assert run.planner.plan == before and run.planner.num_plans == 2
    run.planner._consensus = Group(findings=lambda own: [1.0, *own[1:]])
    run.steps(5)  # it is not asked again at once
    assert run.planner.plan != before


def test_what_is_free_is_shared_by_the_ranks_of_a_machine_and_the_least_in_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda _: 8000 * MIB)
    budgets = []
    poorer = Group(one=lambda own: [max(*own, -300.0 * MIB)] if own[0] < 0 else own)
    for consensus in (SingleRank(), poorer):
        run = Run(config(tmp_path, memory_budget_bytes=None))
        stage = planned.Stage(
            run.planner._stage.position, run.planner._stage.layers, num_local_ranks=4
        )
        for one in (run.planner, run.planner._budget):
            one._stage, one._consensus = stage, consensus
        run.steps(3)
        budgets.append(run.solver.asked[0][1])
        run.engine.close()
    assert budgets == [1000 * MIB, 300 * MIB]


def test_a_drive_slower_than_the_groups_mean_is_no_change(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = TierProfile("ssd", write_bytes_per_s=1e8, read_bytes_per_s=1e8)
    monkeypatch.setattr(step_meter, "tier_profiles", lambda *_: (drive,))
    run.solver.placement = Placement.SSD
    run.planner._consensus = Group(means=lambda own: [1e9] * len(own))
    with caplog.at_level(logging.INFO, "megatron.offload"):
        run.steps(3 + 6)
    assert run.solver.asked[0][0].tiers[0].write_bytes_per_s == 1e9
    assert "ssd takes" not in caplog.text
