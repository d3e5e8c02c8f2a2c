# SPDX-License-Identifier: Apache-2.0
"""Invariant 8 on a file system of its own: nothing is left after SIGKILL, two jobs never meet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.offload.sizes import MIB
from tests.support.mounts import MountedDisk, mounted_ext4
from tests.support.processes import finish, start_python

pytestmark = pytest.mark.timeout(240)

KILLED = """
    import os, pathlib, signal, sys
    import torch
    from megatron.offload import OffloadConfig, OffloadEngine
    from tests.support.models import Model, run_step

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    directory, when = sys.argv[1:]
    config = OffloadConfig(mode="ssd", directories=(pathlib.Path(directory),), min_bytes=1)
    engine = OffloadEngine(config)
    model, x = Model(hidden=64), torch.randn(8, 128, 64)
    run_step(model, x, engine)
    print("the file is there", flush=True)
    sys.stdin.readline()
    if when == "forward":
        model.blocks[2].register_forward_hook(kill)
    else:
        model.blocks[1].register_forward_hook(lambda *a: a[-1].register_hook(kill) and None)
    run_step(model, x, engine)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[MountedDisk]:
    with mounted_ext4(tmp_path, 64 * MIB) as mounted:
        yield mounted


@pytest.mark.slow
def test_kill_9_in_mid_step_leaves_an_empty_and_sound_file_system(disk: MountedDisk) -> None:
    before = disk.free_bytes
    processes = [start_python(KILLED, disk.path, when) for when in ("forward", "backward")]
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline(), finish(process)
    least = disk.free_bytes
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
    for code, _, errors in map(finish, processes):
        assert code == -signal.SIGKILL, errors
    assert least < before - 10 * MIB, "activations were on the disk"
    assert os.listdir(disk.path) == ["lost+found"]
    deadline = time.monotonic() + 20
    while disk.free_bytes < before:
        assert time.monotonic() < deadline, "the space was not given back"
        time.sleep(0.01)
    assert disk.unmount(), "somebody still uses it"
    assert disk.check() == ""


JOB = """
    import pathlib, sys, time
    import torch
    from megatron.offload import OffloadConfig, OffloadEngine
    from tests.support.models import Model, assert_same, run_step, ssd

    directory, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])

    def meet(name):
        (directory / f"{name}-{number}").touch()
        deadline = time.monotonic() + 30
        while not (directory / f"{name}-{1 - number}").exists():
            assert time.monotonic() < deadline, "the other job did not come"
            time.sleep(0.001)

    torch.manual_seed(number)
    model, x = Model(hidden=64), torch.randn(8, 128, 64)
    plain = run_step(model, x)
    config = OffloadConfig(mode="ssd", directories=(directory,), min_bytes=1)
    engine = OffloadEngine(config)
    for step in range(3):  # both have their activations on the disk at the same time
        ours = run_step(model, x, engine, between=lambda: meet(f"step-{step}"))
        assert_same(ours, plain)
        assert engine.statistics.read_bytes > 0 and ssd(engine).used_bytes == 0
    engine.close()
"""


@pytest.mark.slow
def test_two_jobs_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    processes = [start_python(JOB, tmp_path, number) for number in (0, 1)]
    for code, _, errors in map(finish, processes):
        assert code == 0, errors
    assert len(os.listdir(tmp_path)) == 2 * 3, "only the marks of where they met"
