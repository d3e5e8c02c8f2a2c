# SPDX-License-Identifier: Apache-2.0
"""What all tests of this directory share: engines, the hypothesis profile, the closing summary.

The summary says how many operators, samples and random programs ran, and what was skipped and why.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron.offload.sizes import format_size
from tests.autograd.roundtrip import Coverage, PromptEngine, open_engine

COVERAGE = pytest.StashKey[Coverage]()

NUM_PROGRAMS = os.environ.get("AUTOGRAD_PROGRAMS")
settings.register_profile(
    "autograd",
    max_examples=int(NUM_PROGRAMS or 200),
    derandomize=NUM_PROGRAMS is None,  # the suite runs the same programs every time
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def pytest_configure(config: pytest.Config) -> None:
    """Makes torch's operator database importable, and a place for what the tests count."""
    if importlib.util.find_spec("expecttest") is None:
        # torch.testing._internal derives a class from its TestCase and uses nothing else here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    config.stash[COVERAGE] = Coverage()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints what ran."""
    coverage = config.stash[COVERAGE]
    lines = [line for count in coverage.lines.values() for line in count()]
    if lines:
        terminalreporter.section("autograd coverage")
        for line in lines:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"bytes that autograd saved: {format_size(coverage.written_bytes)} written, "
            f"{format_size(coverage.read_bytes)} read back"
        )


@pytest.fixture(scope="session")
def coverage(pytestconfig: pytest.Config) -> Coverage:
    """What ran so far."""
    return pytestconfig.stash[COVERAGE]


@pytest.fixture
def engine() -> Iterator[PromptEngine]:
    """Offloads every storage, at once."""
    with open_engine() as engine:
        yield engine
    gc.collect()  # else perhaps in the middle of the next test's report


@pytest.fixture(scope="module")
def prompt_engine() -> Iterator[PromptEngine]:
    """The same, for all tests of a module."""
    with open_engine() as engine:
        yield engine


@pytest.fixture(scope="module", autouse=True)
def quick_small_operations() -> Iterator[None]:
    """One thread per operation, for tensors of a few bytes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
