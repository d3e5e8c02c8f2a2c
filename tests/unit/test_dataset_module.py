# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's module for data sets is compiled for the Python that trains."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron.offload.integration.megatron.dataset_module import set_python_of_datasets

OURS = str(sysconfig.get_config_var("EXT_SUFFIX"))
OTHER = ".cpython-399-x86_64-linux-gnu.so"


def program(folder: Path, says: str) -> str:
    """A folder whose python3-config says how modules are called."""
    folder.mkdir(parents=True)
    file = folder / "python3-config"
    file.write_text(f"#!/bin/sh\n[ $1 = --extension-suffix ] && echo {says}\n")
    file.chmod(0o755)
    return str(folder)


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sources, and a Python without a python3-config beside it."""
    folder = tmp_path / "datasets"
    folder.mkdir()
    (folder / "Makefile").write_text("default:\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    return folder


def path_after(monkeypatch: pytest.MonkeyPatch, datasets: Path, *folders: str) -> str:
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/usr/bin", "/bin"]))
    set_python_of_datasets(datasets)
    return os.environ["PATH"].partition("/usr/bin")[0]


def test_that_of_another_python_is_replaced_by_this_ones(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    other, base = program(tmp_path / "other", OTHER), program(tmp_path / "base" / "bin", OURS)
    with caplog.at_level(logging.INFO):
        found = path_after(monkeypatch, datasets, other)
    assert found.split(os.pathsep)[:3] == [f"{tmp_path}/venv/bin", base, other]
    assert "PATH begins with" in caplog.text


def test_a_python3_config_is_asked_in_the_folder_in_which_make_asks_it(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyenv's: which Python it is for is in a file there."""
    (datasets / "said").write_text(OTHER)
    (tmp_path / "said").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    base = program(tmp_path / "base" / "bin", OURS)
    shims = program(tmp_path / "shims", "$(cat said)")
    found = path_after(monkeypatch, datasets, shims)
    assert found.split(os.pathsep)[:3] == [f"{tmp_path}/venv/bin", base, shims]


@pytest.mark.parametrize("is_made", [False, True])
def test_nothing_changes_where_it_is_this_ones_or_the_module_is_there(
    datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_made: bool,
) -> None:
    program(tmp_path / "base" / "bin", OURS)
    first = program(tmp_path / "first", OTHER if is_made else OURS)
    if is_made:
        (datasets / f"helpers_cpp{OURS}").touch()
    assert path_after(monkeypatch, datasets, first) == first + os.pathsep
    assert caplog.text == ""


def test_where_there_is_none_of_this_python_a_warning_says_what_to_do(
    datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = program(tmp_path / "other", OTHER)
    assert path_after(monkeypatch, datasets, other) == other + os.pathsep
    assert f"{other}/python3-config is that of another one; install the development" in caplog.text


def test_without_sources_nothing_is_compiled_and_nothing_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = program(tmp_path / "broken", "; touch asked")
    assert path_after(monkeypatch, tmp_path, broken) == broken + os.pathsep
