# SPDX-License-Identifier: Apache-2.0
"""The file of a plan, which all ranks of a run read or none, and which one of each stage writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import ConfigurationError, OffloadError, Placement
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.shared_plan_file import SharedPlanFile
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition

TIERS = (Placement.SSD,)


class Ranks(SingleRank):
    """This rank, and another one that says `heard`."""

    def __init__(self, heard: tuple[bool, str | None], digest: float | None = None) -> None:
        self._heard = heard
        self._digest = digest

    def of_all(self, value: Any) -> list[Any]:
        return [value, self._heard]

    def largest(self, values: Any) -> list[float]:
        other = values if self._digest is None else (self._digest, -self._digest)
        return [max(pair) for pair in zip(values, other, strict=True)]


def plan(stage: int = 0, placement: Placement = Placement.SSD) -> Plan:
    return Plan((PlannedPart(0, "decoder.1", "layer", placement, 1000),), stage=stage)


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., SharedPlanFile]:
    """A file that is not there yet, seen by a rank of a pipeline with two stages."""

    def make(
        ranks: SingleRank | None = None,
        *,
        stage: int = 0,
        name: str = "plan.json",
        speaks: bool = True,
    ) -> SharedPlanFile:
        position = PipelinePosition(stage=stage, num_stages=2, num_chunks=1, group_size=1)
        own = Stage(position, [(0, "decoder.1")], speaks=speaks)
        return SharedPlanFile(tmp_path / name, own, ranks or SingleRank())

    return make


def test_a_file_that_is_not_there_yet_is_no_plan(file: Callable[..., SharedPlanFile]) -> None:
    assert file(Ranks((False, None))).load(TIERS) is None


@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_gets_its_own_plan(stage: int, file: Callable[..., SharedPlanFile]) -> None:
    own = file(Ranks((True, None)), stage=stage)
    plans = [plan(0), plan(1, Placement.RECOMPUTE)]
    own.save(plans)
    assert own.load(TIERS) == plans[stage]


def test_a_plan_for_a_tier_that_is_not_there_is_refused(
    file: Callable[..., SharedPlanFile],
) -> None:
    own = file()
    own.save([plan(0, Placement.HOST)])
    with pytest.raises(ConfigurationError, match="host"):
        own.load(TIERS)


@pytest.mark.parametrize("is_here", [False, True])
def test_a_file_that_some_ranks_see_is_refused_by_all(
    is_here: bool, file: Callable[..., SharedPlanFile]
) -> None:
    own = file(Ranks((not is_here, None)))
    if is_here:
        own.save([plan()])
    with pytest.raises(ConfigurationError, match="is there for some ranks only; put it where all"):
        own.load(TIERS)


def test_what_another_rank_cannot_follow_this_one_does_not_either(
    file: Callable[..., SharedPlanFile],
) -> None:
    own = file(Ranks((False, "it does not fit; plan again")))
    own.save([plan()])
    with pytest.raises(ConfigurationError) as raised:
        own.load(TIERS)
    assert str(raised.value) == "activation offload: it does not fit; plan again"


def test_a_file_that_is_another_one_on_another_machine_is_refused(
    file: Callable[..., SharedPlanFile],
) -> None:
    own = file(Ranks((True, None), digest=2.0**60))
    own.save([plan()])
    with pytest.raises(OffloadError, match="have come to different plans"):
        own.load(TIERS)


@pytest.mark.parametrize(
    ("which", "refused"),
    [({}, True), ({"stage": 1}, False), ({"speaks": False}, False)],
    ids=["the writer", "another stage", "another rank of the stage"],
)
def test_a_place_that_does_not_exist_is_refused_by_who_writes_there(
    which: dict[str, Any], refused: bool, file: Callable[..., SharedPlanFile], tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    own = file(name="taken/plan.json", **which)
    if refused:
        with pytest.raises(ConfigurationError, match=r"plan has no place: .*; give another path"):
            own.load(TIERS)
    else:
        assert own.load(TIERS) is None


def test_a_plan_that_cannot_be_written_stops_no_training(
    file: Callable[..., SharedPlanFile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    own = file(name="taken/plan.json")
    own.save([plan()])
    own.update(plan())
    assert caplog.text.count("the plan could not be written") == 1


@pytest.mark.parametrize("speaks", [True, False])
def test_one_rank_of_a_stage_updates_its_plan(
    speaks: bool, file: Callable[..., SharedPlanFile]
) -> None:
    own = file(speaks=speaks)
    save_plans(own.path, [plan(0), plan(1)])
    own.update(plan(0, Placement.KEEP))
    written = load_plans(own.path)
    assert written == {0: plan(0, Placement.KEEP if speaks else Placement.SSD), 1: plan(1)}
