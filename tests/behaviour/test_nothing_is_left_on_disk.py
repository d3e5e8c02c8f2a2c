# SPDX-License-Identifier: Apache-2.0
"""Invariant 8: no file can be seen, and a directory that cannot work is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from tests.support.models import Model, assert_same, run_step, settle, ssd


def test_the_file_has_no_name_and_mode_0600(engine, tmp_path):
    engine.hooks.pack(torch.randn(1000))
    settle(engine)
    assert os.listdir(tmp_path) == []
    status = os.fstat(ssd(engine).drives[0].file.fd)
    assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) == 0o600


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
