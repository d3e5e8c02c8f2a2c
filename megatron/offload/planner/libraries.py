# SPDX-License-Identifier: Apache-2.0
"""The libraries that planning needs and nothing else does: `check_libraries`.

They are the extra `auto`. The settings and the commands that need a plan call it first, before a
model is built or anything of the simulator or the solver is imported. It imports none of them.
"""

from __future__ import annotations

from megatron.offload.packages import check_packages

LIBRARIES = ("scipy", "numba")


def check_libraries(asked_for: str) -> None:
    """Checks that everything is installed that simulating and solving import.

    Args:
        asked_for: what needs them, as the user wrote it: `--activation-offload auto`.

    Raises:
        ConfigurationError: some of it is not installed.
    """
    check_packages(asked_for, *LIBRARIES)
