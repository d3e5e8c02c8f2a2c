# SPDX-License-Identifier: Apache-2.0
"""The libraries that planning needs and nothing else does: `check_libraries`, `is_compiled`.

They are the extra `auto`. The settings and the commands that need a plan call it first, before a
model is built or anything of the simulator or the solver is imported. It imports none of them.
"""

from __future__ import annotations

from pathlib import Path

from megatron.offload.packages import check_packages

LIBRARIES = ("scipy", "numba")
_SIMULATOR = Path(__file__).with_name("simulator")


def check_libraries(asked_for: str) -> None:
    """Checks that everything is installed that simulating and solving import.

    Args:
        asked_for: what needs them, as the user wrote it: `--activation-offload auto`.

    Raises:
        ConfigurationError: some of it is not installed.
    """
    check_packages(asked_for, *LIBRARIES)


def is_compiled() -> bool:
    """Whether machine code of the simulator is on the disk, so that a first plan takes seconds."""
    return any(_SIMULATOR.glob("__pycache__/*.nbi"))  # where numba keeps it, beside the sources
