# SPDX-License-Identifier: Apache-2.0
"""Parameters that are elsewhere between calls: activations move where compute is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_activations
from tests.support.loops import gradients
from tests.support.same_training import digest

DEVICE = "lag"
HIDDEN, TOKENS = 64, 128
pytestmark = pytest.mark.usefixtures("accelerator")


class FromHost(torch.nn.Linear):
    """Takes its weight to where its input is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.device), self.bias.to(x.device))


class Model(torch.nn.Module):
    """Takes its input to the accelerator itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(FromHost(HIDDEN, HIDDEN), torch.nn.GELU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(DEVICE)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def noise(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def trained(
    model: torch.nn.Module, directory: Path, *, inputs_on: str = "cpu", **settings: Any
) -> tuple[list[str | None], dict[str, int | float], str]:
    """Gradients of two steps, the counters of the last one and the report."""
    settings = {"min_bytes": 4096, **settings}
    with offload_activations(model, directory, **settings) as handle:
        for seed in range(2):
            model(noise(seed).to(inputs_on)).backward()
        assert handle.engine is not None and handle.engine.device.type == DEVICE
        return gradients(model.cpu()), handle.statistics, handle.report()


@pytest.mark.parametrize("inputs_on", ["cpu", DEVICE])
def test_as_much_moves_as_with_parameters_on_the_device(inputs_on: str, tmp_path: Path) -> None:
    there, expected, _ = trained(Model().to(DEVICE), tmp_path, inputs_on=inputs_on)
    waiting, found, report = trained(Model(), tmp_path, inputs_on=inputs_on)
    assert waiting == there
    assert found["offloaded_bytes"] == expected["offloaded_bytes"] > 0
    assert found["recast_bytes"] > 0 == expected["recast_bytes"]  # copies of weights never move
    assert "warning" not in report


def test_the_first_pass_moves_as_much_as_later_ones(tmp_path: Path) -> None:
    model = Model()
    with offload_activations(model, tmp_path, min_bytes=4096) as handle:
        moved = []
        for seed in range(2):
            model(noise(seed)).backward()
            moved.append(handle.statistics["offloaded_bytes"])
        assert moved[0] == moved[1] > 0


def test_a_model_on_the_cpu_is_found_there(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
    with offload_activations(model, tmp_path, min_bytes=4096) as handle:
        model(noise(0)).square().mean().backward()
        assert handle.engine is not None and handle.engine.device.type == "cpu"
        assert handle.statistics["offloaded_bytes"] > 0


def test_an_embedding_on_the_cpu_does_not_hide_where_the_layers_are(tmp_path: Path) -> None:
    class WithEmbedding(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(16, HIDDEN)
            self.norm = torch.nn.LayerNorm(HIDDEN)
            self.layers.to(DEVICE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = (x[:, 0].abs() * 4).long().clamp(max=15)
            return super().forward(self.norm(self.embedding(tokens)))

    def run(mode: str) -> list[str | None]:
        model = WithEmbedding()
        with offload_activations(model, tmp_path, mode=mode, min_bytes=4096) as handle:
            model(noise(0)).backward()
            if mode != "off":
                assert handle.engine is not None and handle.engine.device.type == DEVICE
                assert handle.statistics["offloaded_bytes"] > 0
                # The norm has run on the CPU: what it saves stays, and the report says so.
                assert handle.statistics["other_device_bytes"] > 0
                assert "are saved on cpu, and only activations on lag" in handle.report()
        return gradients(model.cpu())

    assert run("ssd") == run("off")


def test_nothing_that_moves_is_said_with_its_true_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(model: torch.nn.Module, **settings: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING), offload_activations(model, tmp_path, **settings):
            model(noise(0)).backward()
        return caplog.text

    assert "no saved storage has 1 MiB or more" in said(Model(), min_bytes="1MiB")
    model = Model()
    model.layers.append(torch.nn.Identity())
    found = said(model, layers=["layers.*"], min_bytes=1, offload_layers=str(len(model.layers) - 1))
    assert "see offload_layers" in found

    class ThenOnTheHost(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(DEVICE).sum() * 0).cpu() + self.layers(x).square().mean()

    model = ThenOnTheHost()
    model.layers = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
    model.register_buffer("table", torch.zeros(1, device=DEVICE))
    text = said(model, min_bytes=4096)
    assert "are saved on cpu, and only activations on lag" in text, text


def test_layers_are_recomputed_although_their_weights_wait(tmp_path: Path) -> None:
    there, _, _ = trained(Model().to(DEVICE), tmp_path)
    waiting, found, _ = trained(Model(), tmp_path, recompute_layers="0-1", inputs_on=DEVICE)
    assert waiting == there
    assert found["recomputed_layers"] == 1  # nothing asks for the gradient of the first input


def test_layer_major_steps_find_the_device_of_their_inputs(tmp_path: Path) -> None:
    def run(make: Callable[[], Model]) -> tuple[list[str | None], int | float]:
        model = make()
        with offload_activations(model, tmp_path, min_bytes=4096) as handle:
            batches = [noise(seed).to(DEVICE) for seed in range(2)]
            LayerMajor(model, units=3, offload=handle).step(batches, model)
            assert handle.engine is not None and handle.engine.device.type == DEVICE
            return gradients(model.cpu()), handle.statistics["offloaded_bytes"]

    there, expected = run(lambda: Model().to(DEVICE))
    waiting, found = run(Model)
    assert waiting == there and found == expected > 0


def test_adapters_train_on_a_base_that_accelerate_keeps_on_the_host(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
            self.down = torch.nn.Linear(HIDDEN, 4, device=DEVICE)
            self.up = torch.nn.Linear(4, HIDDEN, device=DEVICE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.base(x) + self.up(self.down(x)))

    def run(*, on_meta: bool) -> tuple[Any, int | float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(Adapted() for _ in range(3)))
        if on_meta:
            for layer in model:
                accelerate.cpu_offload(layer.base, execution_device=DEVICE)
        model.to(DEVICE) if not on_meta else None
        assert ({p.device.type for p in model.parameters()} == {"meta", DEVICE}) is on_meta
        with offload_activations(model, tmp_path, min_bytes=1) as handle:
            model(noise(0).to(DEVICE)).square().mean().backward()
            adapters = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            return [digest(one) for one in adapters], handle.statistics["offloaded_bytes"]

    there, waiting = run(on_meta=False), run(on_meta=True)
    assert waiting == there and there[1] > 0
