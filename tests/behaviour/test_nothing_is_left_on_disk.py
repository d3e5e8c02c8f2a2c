# SPDX-License-Identifier: Apache-2.0
"""Invariant 8: no file can be seen, nothing is left after SIGKILL, two jobs never meet."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from tests.support.models import Model, assert_same, run_step, settle, ssd
from tests.support.processes import finish, start_python

RESERVED = 4 << 30


def free_bytes(directory):
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def test_the_file_has_no_name_and_mode_0600(engine, tmp_path):
    engine.hooks.pack(torch.randn(1000))
    settle(engine)
    assert os.listdir(tmp_path) == []
    status = os.fstat(ssd(engine).drives[0].file.fd)
    assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.slow
def test_kill_9_in_mid_step_leaves_nothing(tmp_path):
    script = """
        import os, pathlib, signal, sys, torch
        from megatron.offload import OffloadConfig, OffloadEngine
        directory, reserved = pathlib.Path(sys.argv[1]), int(sys.argv[2])
        config = OffloadConfig(mode="ssd", directories=(directory,), min_bytes=1)
        engine = OffloadEngine(config, reserve_bytes=reserved)
        with engine.step():
            packed = [engine.hooks.pack(torch.randn(1 << 20)) for _ in range(8)]
            os.kill(os.getpid(), signal.SIGKILL)
    """
    before = free_bytes(tmp_path)
    if before < 2 * RESERVED:
        pytest.skip(f"needs {2 * RESERVED >> 30} GiB of free disk space")
    assert finish(start_python(script, tmp_path, RESERVED))[0] == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    # Others use this disk too, so the file is large, and freeing it may take the kernel a moment.
    deadline = time.monotonic() + 20
    while free_bytes(tmp_path) < before - RESERVED // 2:
        assert time.monotonic() < deadline, "the file's space was not given back"
        time.sleep(0.1)


def test_a_file_system_without_o_tmpfile_gets_a_file_that_is_unlinked_at_once(
    make_engine, tmp_path, monkeypatch
):
    open_file = os.open

    def refuse_tmpfile(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return open_file(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_tmpfile)
    engine = make_engine()
    assert os.listdir(tmp_path) == []
    model, x = Model(), torch.randn(3, 17, 32)
    assert_same(run_step(model, x, engine), run_step(model, x))


def test_two_engines_in_one_directory_do_not_meet(make_engine):
    model, x, other_x = Model(), torch.randn(3, 17, 32), torch.randn(3, 17, 32)
    plain, other_plain = run_step(model, x), run_step(model, other_x)
    first, second = make_engine(io="buffered"), make_engine(io="buffered")
    other: list[object] = []
    ours = run_step(
        model, x, first, between=lambda: other.append(run_step(Model(), other_x, second))
    )
    assert_same(ours, plain)
    assert_same(other[0], other_plain)


@pytest.mark.parametrize("kind", ["missing", "a file", "too small"])
def test_a_directory_that_cannot_work_is_one_sentence(tmp_path, kind):
    directory = tmp_path / "d"
    if kind == "a file":
        directory.touch()
    elif kind == "too small":
        directory.mkdir()
    config = OffloadConfig(mode="ssd", directories=(directory,))
    with pytest.raises(ValueError) as raised:
        OffloadEngine(config, reserve_bytes=1 << 60 if kind == "too small" else 0)
    message = str(raised.value)
    assert str(directory) in message and "\n" not in message
    if kind == "too small":
        assert "free some space" in message
        assert os.listdir(directory) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="not writable"):
        OffloadEngine(OffloadConfig(mode="ssd", directories=(tmp_path,)))


def test_a_directory_in_which_no_file_can_be_made_is_refused_even_for_root():
    with pytest.raises(ValueError, match="no file can be created in /proc"):
        OffloadEngine(OffloadConfig(mode="ssd", directories=(Path("/proc"),)))
