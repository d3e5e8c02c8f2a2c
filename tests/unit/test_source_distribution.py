# SPDX-License-Identifier: Apache-2.0
"""The source distribution has all of the repository, and installs the package alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "megatron", "patches", "tests", "tools")
FILES = ("CONTRIBUTING.md", "Dockerfile", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def test_it_has_tests_docs_and_tools(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 is not installed")
    copy, out = tmp_path / "copy", tmp_path / "out"
    out.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=left_out, symlinks=True)
    for name in (*FILES, "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    wanted = {str(one.relative_to(copy)) for one in copy.rglob("*") if one.is_file()}
    (copy / "tests" / "__pycache__").mkdir()
    (copy / "tests" / "__pycache__" / "old.cpython-311.pyc").touch()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=True,
    )
    with tarfile.open(out / done.stdout.splitlines()[-1]) as archive:
        found = {one.name.partition("/")[2] for one in archive if one.isfile()}
    assert wanted - found == set()
    assert not any("__pycache__" in name for name in found)
