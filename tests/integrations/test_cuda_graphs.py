# SPDX-License-Identifier: Apache-2.0
"""While a CUDA graph is captured nothing moves: activations stay, what cannot stay is refused.

A graph has addresses in it: a replay would use what others have there by then, and give wrong
numbers. Without a GPU torch is told that its stream is captured; the last tests run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer, offload_parameters
from megatron.offload.errors import ConfigurationError, OffloadError
from tests.support.loops import gradients, net, noise

Capture = Callable[[bool], None]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Says whether the current stream is captured."""
    if torch.cuda.is_available():
        torch.cuda.init()

    def says(is_captured: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)

    return says


class Capturing(torch.nn.Module):
    """A layer that captures what is inside of it, as a library does in a first call."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)
        self._capture = capture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._capture(True)
        x = self.inner(x).exp().sin()
        self._capture(False)
        return x.tanh()


@pytest.mark.parametrize("is_first", [False, True], ids=["within a pass", "before all else"])
def test_what_a_layer_captures_stays_and_all_else_moves(
    tmp_path: Path, capture: Capture, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    def trained(mode: str, replay: str | None = None) -> tuple[Any, int | float]:
        torch.manual_seed(3)
        layers = [] if is_first else [torch.nn.Linear(32, 32), torch.nn.Tanh()]
        model = torch.nn.Sequential(*layers, Capturing(capture), torch.nn.Linear(32, 32))
        with offload_activations(model, tmp_path, mode=mode, min_bytes=1, replay=replay) as handle:
            for _ in range(2):
                model(torch.randn(8, 32)).square().sum().backward()
            kept_bytes = 0 if handle.engine is None else handle.statistics["offloaded_bytes"]
            return gradients(model), kept_bytes

    expected, _ = trained("off")
    assert trained("ssd")[0] == expected
    caplog.clear()
    found, moved_bytes = trained("ssd", replay="off")
    assert found == expected
    tensor_bytes = 8 * 32 * 4
    # Outputs of tanh: before what is captured, and behind it, where two operations save it.
    assert moved_bytes == (1 if is_first else 2) * tensor_bytes
    assert caplog.text.count("a CUDA graph is captured within a forward pass") == 1


def test_a_backward_pass_alone_is_not_captured(tmp_path: Path, capture: Capture) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1):
        loss = model(noise()).sum()
        capture(True)
        with pytest.raises(OffloadError, match="captures a backward pass whose activations are"):
            loss.backward()
        capture(False)


class Stack(torch.nn.Module):
    """Layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(3))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_whose_parameters_move_are_not_captured(tmp_path: Path, capture: Capture) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    with offload_parameters(model, tmp_path):
        capture(True)
        with pytest.raises(OffloadError, match=r"^parameters: a CUDA graph captures a layer"):
            model(torch.ones(1, 32))
        with pytest.raises(OffloadError, match=r"^parameters: .* captures an optimizer's step"):
            optimizer.step()
        capture(False)
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()


def test_a_step_whose_states_move_is_not_captured(tmp_path: Path, capture: Capture) -> None:
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload_optimizer(optimizer, tmp_path):
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        capture(True)
        with pytest.raises(OffloadError, match=r"^optimizer states: a CUDA graph captures"):
            optimizer.step()
        capture(False)
        optimizer.step()


def test_parameters_of_a_layer_that_replays_a_graph_do_not_move(tmp_path: Path) -> None:
    model = Stack()

    def new_fwd(x: torch.Tensor) -> torch.Tensor:
        return x

    new_fwd.__module__ = "torch.cuda.graphs"  # as make_graphed_callables leaves it
    model.layers[1].forward = new_fwd
    with pytest.raises(ConfigurationError, match="Sequential is replayed from a CUDA graph"):
        offload_parameters(model, tmp_path)


# -- On a GPU -----------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("way", ["torch.cuda.graph", "graphed callables", "reduce-overhead"])
def test_graphs_on_a_gpu_have_the_same_bits(tmp_path: Path, way: str) -> None:
    def trained(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)]
        model = torch.nn.Sequential(*layers).cuda()
        x = torch.randn(256, 512, device="cuda", requires_grad=True)
        if way == "graphed callables":
            # It copies what the layer gets into the sample, so that is nothing else's input.
            torch.cuda.make_graphed_callables(model[1], (torch.randn_like(x, requires_grad=True),))
        elif way == "reduce-overhead":
            model[1].compile(mode="reduce-overhead")
        with offload_activations(model, tmp_path, mode=mode, min_bytes=1):
            for _ in range(4):  # the first ones record
                model.zero_grad()
                model(x).square().mean().backward()
            if way == "torch.cuda.graph":
                graph = torch.cuda.CUDAGraph()
                model.zero_grad(set_to_none=False)
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    model(x).square().mean().backward()
                graph.replay()
            torch.cuda.synchronize()
            return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    for mine, other in zip(trained("ssd"), trained("off"), strict=True):
        assert torch.equal(mine, other)
