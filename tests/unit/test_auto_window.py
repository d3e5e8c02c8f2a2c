# SPDX-License-Identifier: Apache-2.0
"""`--optimizer-state-offload auto`: how much of the states is in memory, alone and beside plans."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_optimizer
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import OffloadError
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.shared_memory import divided_budget
from megatron.offload.sizes import GIB, MIB
from megatron.offload.states import auto_window
from megatron.offload.states.auto_window import AutoWindow, NoWindow
from megatron.offload.states.prediction import StatesProfile


def stepped(directory: Path, num_steps: int, **settings: object) -> OptimizerOffload:
    """Twelve buckets of 1 MiB after some steps."""
    params = [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(12)]
    optimizer = torch.optim.AdamW(params)
    handle = offload_optimizer(
        optimizer, directory, mode="auto", bucket_bytes=MIB, window_bytes=3 * MIB, **settings
    )
    for _ in range(num_steps):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return handle


def test_without_a_budget_states_take_what_helps_of_the_memory_that_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    slow_drive = StatesProfile((MIB,) * 12, MIB, MIB, 1e-12, between_s=1.0)
    monkeypatch.setattr(auto_window, "profile_of", lambda *_: slow_drive)
    with stepped(tmp_path, 5) as handle:
        assert handle.states is not None
        assert handle.states.window_bytes == 13 * MIB  # with one beside those that stay
    (line,) = [one for one in caplog.messages if "window" in one]
    assert "of 12 MiB" in line and "a step should take 1.000 s" in line


def test_nothing_is_decided_before_steps_have_been_measured(tmp_path: Path) -> None:
    with stepped(tmp_path, 4) as handle:
        assert handle.states is not None and handle.auto is not None
        assert handle.states.window_bytes == 3 * MIB and not handle.auto.is_decided


def test_a_budget_that_is_taken_already_leaves_the_smallest_window(tmp_path: Path) -> None:
    with stepped(tmp_path, 5, device_memory_budget_bytes=MIB) as handle:
        assert handle.states is not None
        assert handle.states.window_bytes == 2 * MIB


def test_bits_stay_the_same_when_the_window_changes(tmp_path: Path) -> None:
    params = {}
    for mode in ("off", "auto"):
        torch.manual_seed(0)
        found = [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(6)]
        optimizer = torch.optim.AdamW(found)
        settings = {"bucket_bytes": MIB, "window_bytes": 2 * MIB} if mode == "auto" else {}
        with offload_optimizer(optimizer, tmp_path, mode=mode, **settings):
            for _ in range(8):
                for param in found:
                    param.grad = param.detach() * 0.5
                optimizer.step()
        params[mode] = found
    for one, other in zip(params["off"], params["auto"], strict=True):
        assert torch.equal(one, other)


class SlowActivations(CpuDevice):
    """Takes 100 MiB at the most, whoever asks."""

    def peak_reader(self) -> Any:
        return self

    def peak_bytes(self) -> int:
        return 100 * MIB

    def reset(self) -> None:
        return


def test_memory_is_divided_so_that_the_step_is_fastest(tmp_path: Path) -> None:
    with stepped(tmp_path, 3) as handle:
        assert handle.states is not None
        auto = AutoWindow(handle.states, SlowActivations(), 105 * MIB)
        # 100 MiB with 60 of activations and a window of 3: 68 are to be divided.
        budgets = auto.budgets(60 * MIB, None)
        assert budgets == sorted(budgets, reverse=True) and len(budgets) > 2
        assert budgets[0] == (68 - 2) * MIB
        assert auto.choose([0.0, *(100.0 for _ in budgets[1:])]) == 0
        last = len(budgets) - 1
        assert auto.choose([*(math.inf for _ in budgets[1:]), 1.0]) == last
        auto.settle(0, budgets[0])
        assert handle.states.window_bytes == 2 * MIB and auto.is_decided


def test_a_budget_of_activations_that_was_given_stays(tmp_path: Path) -> None:
    with stepped(tmp_path, 3) as handle:
        assert handle.states is not None
        auto = AutoWindow(handle.states, SlowActivations(), 105 * MIB)
        assert auto.budgets(60 * MIB, 65 * MIB) == [65 * MIB]
        auto.settle(0, 65 * MIB)
        assert handle.states.window_bytes <= 3 * MIB


class Choosing:
    """Has three budgets to choose among."""

    def __init__(self) -> None:
        self.settled: tuple[int, int] | None = None

    def budgets(self, activation_bytes: int, given_bytes: int | None) -> list[int]:
        return [3 * GIB, 2 * GIB, GIB]

    def choose(self, seconds: list[float]) -> int:
        return seconds.index(min(seconds))

    def settle(self, number: int, budget_bytes: int) -> None:
        self.settled = (number, budget_bytes)


def divided(beside: Choosing | NoWindow, seconds: list[float] | OffloadError) -> int | None:
    def seconds_of(budgets: object) -> list[float]:
        if isinstance(seconds, OffloadError):
            raise seconds
        return seconds

    return divided_budget(beside, SingleRank(), seconds_of, activation_bytes=GIB, given_bytes=None)


def test_plans_are_made_for_the_budget_with_the_fastest_step() -> None:
    beside = Choosing()
    assert divided(beside, [3.0, 1.0, 2.0]) == 2 * GIB
    assert beside.settled == (1, 2 * GIB)


def test_a_solver_that_ends_leaves_activations_the_most() -> None:
    assert divided(Choosing(), OffloadError("it has ended")) == 3 * GIB


def test_where_nothing_is_to_be_divided_the_planner_finds_its_own_budget() -> None:
    assert divided(NoWindow(), []) is None
