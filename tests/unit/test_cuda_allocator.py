# SPDX-License-Identifier: Apache-2.0
"""torch's allocator on CUDA: when what is freed may fit nothing, and who is told. Needs no GPU."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from megatron.offload.commands.doctor.check import Status
from megatron.offload.commands.doctor.machine import allocator_check
from megatron.offload.device.cuda_allocator import EXPANDABLE_ENVIRONMENT, keeps_fragments
from tests.support.simulated_device import SimulatedDevice

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
EXPANDS = "expandable_segments:True"


class Gpu(SimulatedDevice):
    """Goes by the name of a GPU."""

    device = CUDA


@pytest.mark.parametrize(
    ("environment", "fragments"),
    [
        ({}, True),
        ({OLD: EXPANDS}, False),
        ({NEW: EXPANDS}, False),
        ({NEW: f"max_split_size_mb:64, {EXPANDS}"}, False),
        ({OLD: "expandable_segments:False"}, True),
        ({OLD: "max_split_size_mb:64"}, True),
        ({OLD: "", NEW: EXPANDS}, True),  # torch reads the first that is set
        ({OLD: "backend:cudaMallocAsync"}, False),
        ({OLD: "roundup_power2_divisions:[64:8,>:1],expandable_segments:true"}, False),
    ],
    ids=str,
)
def test_fragments_stay_unless_segments_expand(environment: dict[str, str], fragments: bool):
    assert keeps_fragments(CUDA, environment) is fragments
    assert not keeps_fragments(torch.device("cpu"), environment)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OLD, NEW):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("plans", "level", "words"),
    [(False, logging.INFO, "more stays reserved"), (True, logging.WARNING, "auto plans with less")],
)
@pytest.mark.usefixtures("unset")
def test_an_engine_on_a_gpu_says_once_what_to_start_with(
    offload_config: Callable[..., OffloadConfig],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    plans: bool,
    level: int,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    config = offload_config(**({"mode": "auto"} if plans else {}))
    OffloadEngine(config, Gpu()).close()
    (said,) = [one for one in caplog.records if EXPANDABLE_ENVIRONMENT in one.getMessage()]
    assert said.levelno == level and words in said.getMessage()
    caplog.clear()
    monkeypatch.setenv(*EXPANDABLE_ENVIRONMENT.split("="))
    OffloadEngine(config, Gpu()).close()
    monkeypatch.undo()
    OffloadEngine(config, SimulatedDevice()).close()
    assert not [one for one in caplog.records if EXPANDABLE_ENVIRONMENT in one.getMessage()]


@pytest.mark.usefixtures("unset")
def test_doctor_says_what_to_start_with(monkeypatch: pytest.MonkeyPatch) -> None:
    found = allocator_check(has_gpu=True)
    assert found.status is Status.WARNING and EXPANDABLE_ENVIRONMENT in found.advice
    assert found.facts == {"expandable_segments": False}
    monkeypatch.setenv(NEW, EXPANDS)
    assert allocator_check(has_gpu=True).status is Status.OK


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, EXPANDS), ({OLD: ""}, ""), ({NEW: "max_split_size_mb:64"}, None), ({OLD: "x:1"}, "x:1")],
    ids=str,
)
def test_scripts_turn_it_on_unless_the_caller_has_settings(
    given: dict[str, str], expected: str | None
) -> None:
    shell = f'source tools/bootstrap.sh; expandable_segments; printf %s "${{{OLD}-unset}}"'
    environment = {"PATH": os.environ["PATH"], **given}
    found = subprocess.run(
        ["bash", "-euc", shell], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == ("unset" if expected is None else expected)


@pytest.mark.parametrize("expands", [True, False])
def test_torch_says_itself_whether_its_segments_expand(
    monkeypatch: pytest.MonkeyPatch, expands: bool
) -> None:
    """Some versions know one of the variables only, and code may have set it."""
    settings = {"allocator_settings": {"expandable_segments": expands}}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{not expands}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: settings)
    assert keeps_fragments(CUDA) is not expands
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", dict)  # a version that does not say
    assert keeps_fragments(CUDA) is expands
