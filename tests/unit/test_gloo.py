# SPDX-License-Identifier: Apache-2.0
"""A process ends well whose gloo threads are late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.offload.integration import gloo
from tests.support.processes import finish, start_python

# Python gets the processor before gloo's threads do, as it may where the machine is busy. Without
# the wait two of five such processes were aborted.
LATE = """
    import os, pathlib
    import torch, torch.distributed as dist
    from megatron.offload.integration import gloo

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    groups = []  # with which Python ends
    for number in range(8):
        groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        for thread in pathlib.Path("/proc/self/task").iterdir():
            if "gloo" in (thread / "comm").read_text():
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    for group in 4 * groups:
        tensor = torch.ones(8)
        group.allreduce([tensor]).wait()
        del tensor
    gloo.wait_until_idle()
"""
BUSY = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True: pass
"""


@pytest.mark.slow
def test_gloo_may_be_late() -> None:
    busy = start_python(BUSY)
    try:
        ends = [finish(start_python(LATE)) for _ in range(3)]
    finally:
        busy.kill()
        busy.communicate()
    assert [(code, errors) for code, _, errors in ends] == [(0, "")] * 3


def thread(folder: Path, number: int, name: str, state: str) -> Path:
    path = folder / str(number) / "stat"
    path.parent.mkdir()
    path.write_text(f"{number} ({name}) {state} 1 1")
    return path


def test_it_waits_for_gloo_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread(tmp_path, 1, "python (3) R", "R")
    late = thread(tmp_path, 2, "pt_gloo_runloop", "R")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            late.write_text("2 (pt_gloo_runloop) S 1 1")

    monkeypatch.setattr(time, "sleep", sleep)
    gloo.wait_until_idle(tmp_path)
    assert len(slept) == 4 + 3


def test_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread(tmp_path, 1, "gloo_tcp_loop", "R")
    seconds = iter([0.0, 1.0, 61.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    gloo.wait_until_idle(tmp_path)
    assert list(seconds) == []


def test_a_system_without_proc_is_not_waited_for(tmp_path: Path) -> None:
    gloo.wait_until_idle(tmp_path / "none")
