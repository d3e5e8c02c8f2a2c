# SPDX-License-Identifier: Apache-2.0
"""Packages that some settings and commands need and the rest does not: `check_packages`.

What needs one calls it where flags are checked, before a model is built or anything is measured.
It imports none of them. The advice names the packages themselves, so that it holds in a clone as
for a wheel.
"""

from __future__ import annotations

import importlib.util

from megatron.offload.errors import PREFIX, ConfigurationError

_MODULES = {"megatron-core": "megatron.core"}  # where a package and its module differ


def check_packages(asked_for: str, *packages: str, prefix: str = PREFIX) -> None:
    """Checks that packages are installed, all of them at once.

    Args:
        asked_for: what needs them, as the user wrote it: `--activation-offload auto`.
        packages: as pip names them, also `NAME==VERSION`, of which the version is not looked at.
        prefix: what the sentence begins with.

    Raises:
        ConfigurationError: some are not.
    """
    missing = [one for one in packages if not _is_there(one.partition("==")[0])]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        *others, last = (one.partition("==")[0] for one in missing)
        names = f"{', '.join(others)} and {last}" if others else last
        raise ConfigurationError(
            f"{prefix}{asked_for} needs {names}, which {are} not installed; "
            f"pip install {' '.join(missing)}"
        )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(_MODULES.get(package, package)) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
