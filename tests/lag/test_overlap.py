# SPDX-License-Identifier: Apache-2.0
"""tools/bench/overlap.py and its picture, on the test accelerator: what it writes, no times."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import overlap as bench
from bench.simulated_machine import SimulatedDrive
from plot import overlap as plot

from megatron.offload import OffloadEngine
from megatron.offload.tiers.bounce import BouncingTier
from tests.support.lag.module import LagModule
from tests.support.models import settle
from tests.support.waiting import SOON_S, wait_until

SMALL = "--layers 2 --parts 2 --layer-ms 1 --slower 1 --steps 1"


@pytest.fixture
def all_is_away_at_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives begin when forward has ended, and backward when they are done.

    On a busy machine layers of 1 ms are over before anything has left.
    """
    step, write, turned = bench.Bench._step, SimulatedDrive.write, threading.Event()

    def wait_and_write(self: SimulatedDrive, body: memoryview, offset: int) -> None:
        assert turned.wait(SOON_S)
        write(self, body, offset)

    def step_that_waits(
        self: bench.Bench,
        work: bench.Work,
        engine: OffloadEngine | None,
        after_part: Callable[[], None] = lambda: None,
        at_turn: Callable[[], None] = lambda: None,
    ) -> None:
        def turn() -> None:
            for tier in engine.tiers.values() if engine is not None else ():
                if isinstance(tier, BouncingTier) and bench.POOL_BYTES:
                    wait_until(lambda tier=tier: tier.pool_bytes > 0, "nothing came to the pool")
            at_turn()
            turned.set()
            if engine is not None:
                settle(engine)
            turned.clear()

        step(self, work, engine, after_part, turn)

    monkeypatch.setattr(SimulatedDrive, "write", wait_and_write)
    monkeypatch.setattr(bench.Bench, "_step", step_that_waits)


def test_a_small_measurement(
    lag: LagModule,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    all_is_away_at_the_turn: None,
) -> None:
    file, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    assert bench.main([*SMALL.split(), "--json", str(file)]) in (0, 1)  # by its times
    assert "times fewer bytes" in capsys.readouterr().out
    result = json.loads(file.read_text())
    layer_bytes = result["simulated"]["layer_bytes"]
    off, host, ssd = result["figures"]
    assert (off["tier"], host["tier"], ssd["tier"]) == ("off", "host", "ssd")
    for one in result["figures"]:
        assert one["num_wrong"] == 0
        assert 0 < one["forward_peak_bytes"] <= 3 * layer_bytes
        (step,) = one["steps"]
        took_s, timeline = step["forward_s"] + step["backward_s"], one["timeline"]
        assert one["step_s"] == took_s
        idle_s = step["forward_idle_s"] + step["backward_idle_s"]
        assert one["idle_share"] == idle_s / took_s
        assert len(timeline["compute"]) == 2 * 2 * 2
        busy_ms = sum(ended - began for began, ended in timeline["compute"])
        assert busy_ms == pytest.approx(1e3 * (took_s - idle_s), abs=0.5)
    assert set(off["timeline"]) == {"compute"}
    assert set(host["timeline"]) == {"compute", "to host", "from host"}
    assert 0 < ssd["most_pool_bytes"] <= 2 * layer_bytes and not host["most_pool_bytes"]
    assert plot.main([str(file), "--tier", "ssd", "--output", str(picture)]) == 0
    assert picture.stat().st_size > 1000


def test_bytes_that_do_not_come_back_are_counted(
    lag: LagModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    all_is_away_at_the_turn: None,
) -> None:
    def read(self: SimulatedDrive, body: memoryview, offset: int) -> None:
        body[:] = bytes(len(body))

    monkeypatch.setattr(SimulatedDrive, "read", read)
    monkeypatch.setattr(bench, "POOL_BYTES", 0)
    file = tmp_path / "overlap.json"
    assert bench.main([*SMALL.split(), "--tiers", "ssd", "--json", str(file)]) == 1
    (ssd,) = json.loads(file.read_text())["figures"]
    assert ssd["num_wrong"] > 0


def test_an_unknown_tier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--tiers", "tape"])
    assert "there is no tier tape; choose of off" in capsys.readouterr().err
