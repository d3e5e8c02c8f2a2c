# SPDX-License-Identifier: Apache-2.0
"""What activations may take where no budget is given, and what is said where no plan fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig
from megatron.offload.activations.placement.plan import Plan
from megatron.offload.device.cuda_allocator import EXPANDABLE_ENVIRONMENT
from megatron.offload.errors import InfeasibleBudgetError
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.memory_budget import budget_bytes_of
from megatron.offload.planner.online.plan_maker import PlanMaker
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.simulated_device import SimulatedDevice

GIB = 1 << 30
STAGE = Stage(PipelinePosition(1, 0, 1, 1), layers=())


class Gpu(SimulatedDevice):
    """40 GiB are free for tensors, some of them in what the allocator holds for reuse."""

    device = torch.device("cuda", 0)

    def free_bytes(self) -> int:
        return 40 * GIB


class OtherDevice(Gpu):
    """Of a kind whose allocator nobody knows to keep pieces."""

    device = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "expands", "free_gib", "words"),
    [
        (Gpu, False, 34, "the 34 GiB that are free, without 6 GiB in pieces"),
        (Gpu, True, 40, "the 40 GiB that are free"),
        (OtherDevice, False, 40, "the 40 GiB that are free"),
    ],
)
def test_pieces_that_no_step_has_used_at_once_count_as_taken_unless_segments_expand(
    offload_config: Callable[..., OffloadConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: type[Gpu],
    expands: bool,
    free_gib: int,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if expands:
        monkeypatch.setenv(*EXPANDABLE_ENVIRONMENT.split("="))

    def budget(**changes: object) -> int | None:
        return budget_bytes_of(
            offload_config(mode="auto", **changes),
            device(),
            STAGE,
            SingleRank(),
            fragmented_bytes=6 * GIB,
        )

    assert budget() == int(0.9 * free_gib * GIB)
    assert words in caplog.text and ("in pieces" in words) is ("in pieces" in caplog.text)
    assert budget(memory_budget_bytes=12 * GIB) == 12 * GIB  # what was asked for is not touched


def test_no_budget_is_left_where_all_that_is_free_lies_in_pieces(
    offload_config: Callable[..., OffloadConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    found = budget_bytes_of(
        offload_config(mode="auto"), Gpu(), STAGE, SingleRank(), fragmented_bytes=41 * GIB
    )
    assert found == 0


class _NeverEnough:
    """A solver for which no budget is enough."""

    def solve(self, profile: StageProfile, *, budget_bytes: int, **_: object) -> Plan:
        raise InfeasibleBudgetError(f"no plan fits into {budget_bytes}", 101, 1.0, Plan(()))


@pytest.mark.parametrize("num_exceeded", [0, 3])
def test_a_budget_of_which_a_part_is_left_free_is_told_so(
    offload_config: Callable[..., OffloadConfig],
    caplog: pytest.LogCaptureFixture,
    num_exceeded: int,
) -> None:
    solver: Any = _NeverEnough()
    maker = PlanMaker(offload_config(mode="auto", memory_budget_bytes=100), lambda: solver)
    maker.budget_bytes, maker.num_exceeded = 100, num_exceeded
    profile: Any = SimpleNamespace(position=STAGE.position)
    maker._solved(solver, profile, may_exceed=True)
    assert f"no plan fits into {100 - num_exceeded}; going on" in caplog.text
    assert ("(3% of the budget is left free" in caplog.text) is bool(num_exceeded)
