# SPDX-License-Identifier: Apache-2.0
"""Activations inside of compiled graphs where the device runs behind the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.compiled import Trained, assert_same, trained
from tests.support.lag.module import LagModule

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def expected(accelerator: object) -> Trained:
    return trained(None, device="lag")


@pytest.mark.parametrize(("mode", "seed"), [("host", 0), ("ssd", 1), ("tiered", 2)])
def test_the_bits_are_the_same_however_late_the_device_is(
    mode: str, seed: int, expected: Trained, lag: LagModule, tmp_path: Path
) -> None:
    budget = {"host_budget": "64KiB"} if mode == "tiered" else {}
    lag.set_delays(50, 1500, seed=seed)
    found = trained(tmp_path, device="lag", mode=mode, settled=seed > 0, **budget)
    assert_same(found, expected)
    assert all(step["offloaded_storages"] > 8 for step in found[1])


@pytest.mark.slow(but="1GiB")
@pytest.mark.parametrize("budget", ["700KiB", "1GiB"])
def test_auto_changes_no_bit_and_keeps_what_there_is_room_for(
    budget: str, lag: LagModule, tmp_path: Path
) -> None:
    lengths = (32,) * 10
    expected = trained(None, device="lag", lengths=lengths)
    torch.compiler.reset()
    lag.set_delays(50, 1500, seed=3)
    settings = {"mode": "auto", "memory_budget_bytes": budget, "host_budget": "1GiB"}
    found = trained(tmp_path, device="lag", lengths=lengths, **settings)
    assert_same(found, expected)
    last = found[1][-1]
    assert last["plans"] > 0 and last["kept_bytes"] > 0
    assert (last["offloaded_bytes"] > 0) == (budget != "1GiB")
