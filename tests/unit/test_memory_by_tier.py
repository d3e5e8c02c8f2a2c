# SPDX-License-Identifier: Apache-2.0
"""The table of where memory is, and the summary of what moving states took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.offload import LayerMajor, offload_optimizer, offload_parameters
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.memory_by_tier import (
    MemoryRow,
    held_by_parameters,
    held_by_states,
    memory_table,
)
from megatron.offload.integration.open_parameters import gradient_tier_of, tier_of
from megatron.offload.sizes import MIB
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.summary import states_summary
from megatron.offload.stats.endurance import Endurance
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.wear import WEAR


def parameters(number: int = 8) -> list[torch.nn.Parameter]:
    """Of half a MiB each: with AdamW states of 1 MiB."""
    return [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(number)]


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def test_rows_add_up_by_tier() -> None:
    rows = [MemoryRow("weights", 2 * MIB), MemoryRow("activations", 0, MIB, 5 * MIB, "predicted")]
    *_, last = memory_table(rows, heading="memory").splitlines()
    assert last.split() == ["together", "2", "MiB", "1", "MiB", "5", "MiB"]


def test_gradients_count_before_the_first_backward_pass_and_as_they_are_after_it() -> None:
    params = [*parameters(2), torch.nn.Parameter(torch.zeros(7), requires_grad=False)]
    assert [one.device_bytes for one in held_by_parameters(params)] == [MIB + 28, MIB]
    params[0].main_grad = torch.zeros(256, 512, dtype=torch.float64)
    assert held_by_parameters(params)[1].device_bytes == MIB + MIB // 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Layers(torch.nn.Module):
    """Three of 1 MiB each, and a weight that is none of a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


def of_model(model: torch.nn.Module) -> list[MemoryRow]:
    return held_by_parameters(model.parameters(), tier_of, gradient_tier_of)


@pytest.mark.parametrize("on_ssd", [True, False])
def test_weights_and_gradients_that_wait_on_a_tier_are_there(on_ssd: bool, tmp_path: Path) -> None:
    model, scale = Layers(), 512 * 4

    def away(name: str, *, layers: int) -> MemoryRow:
        in_memory, on_tier = (3 - layers) * MIB + scale, layers * MIB
        return MemoryRow(name, in_memory, 0 if on_ssd else on_tier, on_tier if on_ssd else 0)

    steps_by = torch.optim.AdamW(model.parameters())
    where = {"directory": tmp_path} if on_ssd else {"mode": "host", "host_budget": 16 * MIB}
    with offload_parameters(model, **where, gradients="on") as handle:
        assert of_model(model) == [away("weights", layers=3), away("gradients", layers=3)]
        with offload_optimizer(steps_by, **where) as states:
            layer_major = LayerMajor(model)
            layer_major.step([torch.randn(2, 512) for _ in range(2)], model)
            # Two units live.
            assert of_model(model) == [away("weights", layers=1), away("gradients", layers=3)]
            table = states.report().splitlines()
            assert table[1].split() == ["weights", "2.002", "MiB", *column("1 MiB", on_ssd)]
            assert table[2].split() == ["gradients", "2", "KiB", *column("3 MiB", on_ssd)]
            handle.bring_gradients()
            assert of_model(model)[1] == away("gradients", layers=0)
            states.states.wait_for_writes()
            steps_by.step()  # they are dropped, and the next ones will leave again
            assert of_model(model)[1] == away("gradients", layers=3)
    assert of_model(model) == [away("weights", layers=0), MemoryRow("gradients", 3 * MIB + scale)]


def column(size: str, on_ssd: bool) -> list[str]:
    """Of host memory and SSD."""
    return ["-", *size.split()] if on_ssd else [*size.split(), "-"]


def test_what_no_tier_takes_of_the_weights_counts_as_memory() -> None:
    model = Layers()
    with offload_parameters(model, mode="host", host_budget=5 * MIB // 2):
        assert of_model(model)[0] == MemoryRow("weights", MIB + 512 * 4, 2 * MIB)


def test_states_are_where_they_will_be_before_the_first_step(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(parameters())
    with offload_optimizer(optimizer, tmp_path, bucket_bytes=MIB, window_bytes=3 * MIB) as handle:
        assert handle.states is not None
        before = held_by_states([handle.states])
        for _ in range(3):
            step(optimizer)
        handle.states.wait_for_writes()
        assert before == held_by_states([handle.states])
        assert before == MemoryRow("optimizer states", 2 * MIB, 0, 6 * MIB)
        assert handle.states.memory_bytes == before.device_bytes


def test_what_no_tier_has_room_for_stays_on_the_device() -> None:
    device = CpuDevice()
    optimizer = torch.optim.AdamW(parameters())
    states = OptimizerStates(
        optimizer, [HostTier(4 * MIB)], device, bucket_bytes=MIB, window_bytes=2 * MIB
    )
    assert held_by_states([states]) == MemoryRow("optimizer states", 4 * MIB, 4 * MIB)
    states.close()


def test_the_summary_says_where_a_window_with_room_for_all_saved_nothing(tmp_path: Path) -> None:
    """Beside one that is too small for all, of which nothing of the kind is said."""
    for window_bytes, saves in ((16 * MIB, False), (3 * MIB, True)):
        optimizer = torch.optim.AdamW(parameters())
        settings = {"bucket_bytes": MIB, "window_bytes": window_bytes}
        with offload_optimizer(optimizer, tmp_path, **settings) as handle:
            assert handle.states is not None
            for _ in range(4):
                step(optimizer)
                handle.states.wait_for_writes()
            nothing = "nothing: the window has room for all states" in handle.report()
            assert nothing is not saves


def test_the_summary_says_what_moved_and_how_long_drives_last(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(parameters())
    settings = {"bucket_bytes": MIB, "window_bytes": 3 * MIB, "drive_endurance_bytes": "600TB"}
    before = WEAR.written()
    with offload_optimizer(optimizer, tmp_path, **settings) as handle:
        assert handle.states is not None
        assert states_summary([handle.states]) == ""
        for _ in range(4):
            step(optimizer)
            handle.states.wait_for_writes()
        written = WEAR.since(before)
        assert written == {str(tmp_path): 24 * MIB}
        assert "6 MiB at" in states_summary([handle.states])
        text = states_summary([handle.states], Endurance(10**15), written)
        assert "24 MiB in this run" in text and "lasts" in text
        assert text.splitlines()[-1] in handle.report() or "lasts" in handle.report()
