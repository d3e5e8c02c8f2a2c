# SPDX-License-Identifier: Apache-2.0
"""`torch.export` and `torch.jit.trace` record a model that is offloaded as they do without us."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations, offload_parameters
from tests.support.loops import gradients, noise
from tests.support.same_training import digest

WAYS: dict[str, dict[str, Any]] = {
    "moves": {"mode": "host"},
    "stays": {"mode": "keep"},
    "recomputes": {"mode": "keep", "recompute_layers": "all"},
}
Model = Callable[[torch.Tensor], torch.Tensor]


def exported(model: torch.nn.Module) -> tuple[Model, str]:
    program = torch.export.export(model, (noise(),))
    return program.module(), program.graph_module.code


def traced(model: torch.nn.Module) -> tuple[Model, str]:
    script = torch.jit.trace(model, (noise(),))  # type: ignore[no-untyped-call]
    return script, " ".join(one.kind() for one in script.inlined_graph.nodes())


def traced_without_gradients(model: torch.nn.Module) -> tuple[Model, str]:
    with torch.no_grad():
        return traced(model)


RECORDS: dict[str, Callable[[torch.nn.Module], tuple[Model, str]]] = {
    "export": exported,
    "trace": traced,
    "trace without gradients": traced_without_gradients,
}


def model_without_dropout() -> torch.nn.Module:
    torch.manual_seed(2)
    width = noise().shape[-1]
    layers = (
        torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.GELU()
        )
        for _ in range(3)
    )
    return torch.nn.Sequential(*layers)


def train(
    opened: Callable[[torch.nn.Module], contextlib.AbstractContextManager[Any]],
    record: Callable[[torch.nn.Module], tuple[Model, str]],
) -> list[Any]:
    """Before the first step, within one, and between steps."""
    model, found = model_without_dropout(), []

    def note() -> None:
        recorded, text = record(model)
        found.extend([text, digest(recorded(noise(4)))])

    with opened(model):
        note()
        for seed in range(2):
            loss = model(noise(seed)).square().mean()
            note()
            loss.backward()
            found.append(gradients(model))
            note()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_what_is_recorded_and_the_steps_around_it_are_the_same(
    way: str, record: Callable[[torch.nn.Module], tuple[Model, str]]
) -> None:
    def opened(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        return offload_activations(model, min_bytes=1, **WAYS[way])

    assert train(opened, record) == train(lambda _: contextlib.nullcontext(), record)


def test_an_export_is_no_step_of_the_metrics_file(tmp_path: Path) -> None:
    model, path = model_without_dropout(), tmp_path / "steps.jsonl"
    with offload_activations(model, mode="keep", min_bytes=1, metrics_file=path):
        for seed in range(2):
            exported(model)
            model(noise(seed)).square().mean().backward()
            traced(model)
    assert len(path.read_text().splitlines()) == 2


def test_parameters_on_a_tier_are_exported_and_not_traced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        return offload_parameters(model, tmp_path)

    assert train(opened, exported) == train(lambda _: contextlib.nullcontext(), exported)
    assert not [one for one in caplog.records if one.name.startswith("megatron")]
    model = model_without_dropout()
    with opened(model), pytest.raises(ConfigurationError, match=r"torch\.jit\.trace, and the ONNX"):
        traced(model)
