# SPDX-License-Identifier: Apache-2.0
"""Whose Python Megatron-LM compiles its data sets' module for: `set_python_of_datasets`.

Rank 0 runs make in `megatron/core/datasets`, which asks the first `python3-config` on PATH how the
module's file is called. That of another Python makes a module which this one does not find.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_log = logging.getLogger(__name__)

_PROGRAM = "python3-config"
_PATIENCE_S = 10.0


def set_python_of_datasets(datasets: Path) -> None:
    """Puts this Python's programs first on PATH where make would ask another's; else it warns.

    Args:
        datasets: the folder `megatron/core/datasets` that is imported.
    """
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    is_made = (datasets / f"helpers_cpp{suffix}").is_file()
    if is_made or not (datasets / "Makefile").is_file():
        return
    found = shutil.which(_PROGRAM)
    if _suffix_of(found, datasets) == suffix:
        return
    # python3-config is beside the Python that a virtual environment was made with.
    folders = [str(Path(sys.executable).parent), str(Path(sys.base_prefix) / "bin")]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    if _suffix_of(shutil.which(_PROGRAM, path=path), datasets) == suffix:
        os.environ["PATH"] = path
        _log.info(
            "Megatron-LM compiles a module of its data sets: PATH begins with %s now, as %s on it "
            "was that of another Python",
            os.pathsep.join(folders),
            _PROGRAM,
        )
        return
    _log.warning(
        "Megatron-LM compiles a module of its data sets for the wrong Python: %s; install the "
        "development files of Python %d.%d and put its %s first on PATH, or the data sets cannot "
        "be built",
        f"{found} is that of another one" if found else f"there is no {_PROGRAM} on PATH",
        *sys.version_info[:2],
        _PROGRAM,
    )


def _suffix_of(program: str | None, folder: Path) -> str | None:
    """What a python3-config says that modules are called; None: nothing.

    Args:
        program: where it is.
        folder: in which make asks it: pyenv's answers as a `.python-version` above it says.
    """
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--extension-suffix"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
