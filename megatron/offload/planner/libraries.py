# SPDX-License-Identifier: Apache-2.0
"""The libraries that planning needs and nothing else does: `check_libraries`.

They are the extra `auto`. The settings and the commands that need a plan call it first, before a
model is built or anything of the simulator or the solver is imported. It imports none of them.
"""

from __future__ import annotations

import importlib.util

from megatron.offload.errors import ConfigurationError

_LIBRARIES = ("scipy", "numba")


def check_libraries(asked_for: str) -> None:
    """Checks that everything is installed that simulating and solving import.

    Args:
        asked_for: what needs them, as the user wrote it: `--activation-offload auto`.

    Raises:
        ConfigurationError: some of it is not installed.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise ConfigurationError(
            f"{asked_for} needs {' and '.join(missing)}, which {are} not installed; "
            "pip install 'megatron-offload[auto]' ('.[auto]' in a clone)"
        )
