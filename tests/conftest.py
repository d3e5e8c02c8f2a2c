# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests; tests marked `gpu` skip, with the reason, without a CUDA device."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from megatron.offload.tiers.file import UnlinkedFile
from tests.support.fake_cuda import FakeCuda
from tests.support.lag import load, prepare
from tests.support.lag.build import why_not
from tests.support.lag.module import LagModule
from tests.support.waiting import SOON_S


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """No test leaves environment variables to those after it; torch's compiler sets some."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """No test leaves it to those after it what a log says and where; scripts set that."""
    logs = [logging.getLogger(name) for name in ("megatron.offload", "transformers")]
    before = [(one.level, one.propagate, one.disabled, list(one.handlers)) for one in logs]
    yield
    for one, (level, propagate, disabled, handlers) in zip(logs, before, strict=True):
        one.setLevel(level)
        one.propagate, one.disabled, one.handlers = propagate, disabled, handlers


@pytest.fixture
def offload_config(tmp_path: Path) -> Callable[..., OffloadConfig]:
    """Builds a config that offloads every storage to a temporary directory."""

    def build(**changes: object) -> OffloadConfig:
        settings = {"mode": "ssd", "directories": (tmp_path,), "min_bytes": 1, **changes}
        return OffloadConfig(**settings)  # type: ignore[arg-type]

    return build


@pytest.fixture
def make_engine(
    offload_config: Callable[..., OffloadConfig],
) -> Iterator[Callable[..., OffloadEngine]]:
    """Builds engines and closes them after the test."""
    engines: list[OffloadEngine] = []

    def build(**changes: object) -> OffloadEngine:
        engines.append(OffloadEngine(offload_config(**changes)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., OffloadEngine]) -> OffloadEngine:
    """An engine that offloads every storage, in buffered mode so that every byte moves."""
    return make_engine(io="buffered")


@pytest.fixture
def one_compute_thread() -> Iterator[None]:
    """Small matrices: more threads only wait for each other, and for the I/O threads.

    And what is compiled adds up the gradient of an embedding in an order that threads decide.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """torch sees CUDA, and two GPUs that compute nothing."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture(scope="session")
def loaded_lag() -> LagModule:
    """The test accelerator, built if need be; skips where it cannot be."""
    if reason := why_not():
        pytest.skip(f"the test accelerator cannot be used: {reason}")
    return load()


@pytest.fixture
def lag(loaded_lag: LagModule) -> Iterator[LagModule]:
    """`torch.lag`: no delays and costs at first, idle and without errors at the end."""
    loaded_lag.reset()
    yield loaded_lag
    loaded_lag.reset()
    for device in range(loaded_lag.device_count()):
        loaded_lag.synchronize(device)


class Gate:
    """Holds writes at the drive until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)

    def wait_for_arrival(self) -> None:
        """Returns when a write stands at the gate."""
        assert self.arrived.acquire(timeout=SOON_S)


@contextlib.contextmanager
def gate_before(call: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate at which every `write` or `read` of a file waits, in its I/O thread."""
    gate = Gate()
    own = getattr(UnlinkedFile, call)

    def gated(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        gate.arrived.release()
        assert gate.open.wait(timeout=SOON_S)
        own(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, call, gated)
    yield gate
    gate.open.set()


@pytest.fixture
def write_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every write waits at this gate, in its I/O thread, small ones too by themselves."""
    monkeypatch.setattr("megatron.offload.tiers.io_threads._TOGETHER_BYTES", 0)
    with gate_before("write", monkeypatch) as gate:
        yield gate


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` and `--rare` for more tests; the others for tests/megatron/test_matrix.py."""
    parser.addoption("--slow", action="store_true", help="also tests that take seconds")
    parser.addoption("--rare", action="store_true", help="all, also what repeats other tests")
    parser.addoption("--full-matrix", action="store_true", help="every cell, not just a few")
    parser.addoption("--matrix-table", type=Path, metavar="FILE", help="write a table there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `slow` and `rare` unless they are asked for; skips those marked `gpu`
    where there is no CUDA device.

    The test accelerator, once loaded, is torch's for the rest of the process: its tests run last.
    """
    items.sort(key=lambda item: "lag" in getattr(item, "fixturenames", ()))
    left_out = [item for item in items if _is_left_out(item, config)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item, config)]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    if config.getoption("--rare") or any("::" in one for one in config.args):  # named one by one
        return False
    if "rare" in item.keywords:
        return True
    slow = item.get_closest_marker("slow")
    is_kept = slow is not None and item.name.endswith(f"[{slow.kwargs.get('but')}]")
    return slow is not None and not is_kept and not config.getoption("--slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the test accelerator before anything runs if a test wants it.

    What modules have made by then is there until the end: garbage collections, of which many tests
    make one, leave it out and take milliseconds instead of half a second.
    """
    gc.collect()
    gc.freeze()
    wanted = any("lag" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly and not why_not():
        prepare()
