# SPDX-License-Identifier: Apache-2.0
"""The allocator under torch's CPU tensors: which one it is, and whether it gives memory back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron.offload.machine import allocator
from megatron.offload.machine.allocator import MIMALLOC, allocator_environment, keeps_freed_memory
from tests.support.processes import ROOT

ASK = "from megatron.offload.machine import allocator as a; print(a.keeps_freed_memory())"


@pytest.fixture
def without_mimalloc(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """As where its package is not installed: the environment that is advised there."""
    monkeypatch.setattr(allocator, "_mimalloc_library", lambda: None)
    monkeypatch.setattr(allocator, "allocator_name", lambda: "the C library's malloc")
    advised = allocator_environment()
    for name in advised:
        monkeypatch.delenv(name, raising=False)
    return advised


def test_the_c_library_keeps_memory_without_all_that_is_advised(
    without_mimalloc: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(without_mimalloc) > 1
    for name, value in without_mimalloc.items():
        assert keeps_freed_memory()
        monkeypatch.setenv(name, value)
    assert not keeps_freed_memory()


def test_mimalloc_gives_memory_back_whatever_the_environment(
    without_mimalloc: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "allocator_name", lambda: MIMALLOC)
    assert not keeps_freed_memory()


@pytest.mark.parametrize("advised", [True, False])
def test_a_process_with_the_advised_environment_gives_memory_back(advised: bool) -> None:
    names = {*allocator_environment(), *allocator._GLIBC_ENVIRONMENT}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = str(ROOT)
    if advised:
        environment |= allocator_environment()
    said = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == f"{not advised}\n", said.stderr
