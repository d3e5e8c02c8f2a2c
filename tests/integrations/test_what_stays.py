# SPDX-License-Identifier: Apache-2.0
"""What of a model's activations stays in memory, and what the door says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ChangedInPlaceError, offload_activations
from tests.support.loops import gradients, net, noise


def test_parameters_without_memory_do_not_say_where_compute_is(tmp_path: Path) -> None:
    """As accelerate leaves them between calls."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(3)

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(16, 16).requires_grad_(False)
            self.adapter = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.base(x) + self.adapter(x))

    model = torch.nn.Sequential(*(Adapted() for _ in range(3)))
    x = torch.randn(64, 16)

    def moved() -> tuple[list[str | None], int | float]:
        model.zero_grad()
        with offload_activations(model, tmp_path, min_bytes=1) as handle:
            model(x).sum().backward()
            return gradients(model), handle.statistics["offloaded_bytes"]

    there = moved()
    for layer in model:
        accelerate.cpu_offload(layer.base, execution_device="cpu")
    assert next(model.parameters()).is_meta
    assert moved() == there


def test_what_the_output_holds_in_each_step_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    ids = torch.randint(0, 64, (2, 16))

    def said(*, keeps_output: bool) -> tuple[str, str]:
        model = transformers.LlamaForCausalLM(config).train()
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            offload_activations(model, tmp_path, min_bytes=1024) as handle,
        ):
            for _ in range(5):
                output = model(input_ids=ids, labels=ids)  # `use_cache=True` is Llama's default
                if not keeps_output:
                    output = output.loss
                (output.loss if keeps_output else output).backward()
            return caplog.text, handle.report()

    text, report = said(keeps_output=True)
    assert text.count("use_cache=False") == 1 == report.count("use_cache=False")
    assert "stay in memory all the same" in text and "first saved in forward pass 1" in text
    text, report = said(keeps_output=False)
    assert "use_cache" not in text + report


def test_a_leaf_that_wants_a_gradient_stays_and_no_output_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As trainers make what embeddings return for adapters: `enable_input_require_grads`."""
    embedding = torch.nn.Embedding(64, 32).requires_grad_(False)
    embedding.register_forward_hook(lambda module, args, result: result.requires_grad_())
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.SiLU()) for _ in range(3)]
    model = torch.nn.Sequential(embedding, *layers)
    rows = torch.randint(0, 64, (4, 16))

    def run(**settings: Any) -> list[str | None]:
        model.zero_grad()
        with offload_activations(model, **settings) as handle:
            for _ in range(4):
                model(rows).square().sum().backward()
            if settings["mode"] != "off":
                assert handle.statistics["held_bytes"] == 4 * 16 * 32 * 4
                assert handle.statistics["long_lived_bytes"] == 0
                assert handle.statistics["offloaded_storages"] > 2
                assert "in storages that something else holds" in handle.report()
        return gradients(model)

    assert run(directory=tmp_path, mode="ssd", min_bytes=1024) == run(mode="off")
    assert "stay in memory all the same" not in caplog.text


def test_a_change_in_place_is_told_in_the_words_of_torch(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1):
        found: list[torch.Tensor] = []
        model.first.register_forward_hook(lambda module, args, result: found.append(result))
        loss = model(noise())
        with torch.no_grad():
            found[0].mul_(2)
        with pytest.raises(ChangedInPlaceError, match="modified by an inplace operation") as raised:
            loss.sum().backward()
    assert "forward pass" in str(raised.value) and "chunk" not in str(raised.value)


def test_while_a_graph_is_captured_nothing_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(mode: str) -> Any:
        model = net()
        with offload_activations(model, tmp_path, mode=mode, min_bytes=1) as handle:
            torch.manual_seed(1)
            for is_captured in (True, True, False):
                monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
                monkeypatch.setattr(
                    torch.cuda, "is_current_stream_capturing", lambda it=is_captured: it
                )
                model(noise()).sum().backward()
                if is_captured:
                    assert handle.engine is None
            return gradients(model), handle.statistics.get("offloaded_bytes")

    expected, _ = trained("off")
    found, moved_bytes = trained("ssd")
    assert found == expected and moved_bytes
    assert caplog.text.count("while a CUDA graph is captured") == 1
