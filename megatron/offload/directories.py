# SPDX-License-Identifier: Apache-2.0
"""Where on a disk bytes may go: `resolved_directories`, `resolved_directory`.

Doors call it once, so that what a link or the working directory becomes later changes nothing;
tiers call it when they open their files. It looks, and never writes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from megatron.offload.errors import ConfigurationError


def resolved_directories(directories: Iterable[Path], prefix: str, flag: str) -> tuple[Path, ...]:
    """The directories themselves, without links and `..` on the way to them.

    Args:
        directories: that a person has named.
        prefix: what sentences begin with.
        flag: that names them.

    Raises:
        ConfigurationError: one of them cannot be used, or two are the same.
    """
    found: dict[tuple[int, int], Path] = {}
    resolved = []
    for directory in directories:
        real = resolved_directory(directory, prefix, flag)
        at = os.stat(real)
        other = found.setdefault((at.st_dev, at.st_ino), directory)
        if other is not directory:
            raise ConfigurationError(
                f"{prefix}{flag} names a directory twice: {other} and {directory} are both {real}; "
                "striping needs directories on different drives"
            )
        resolved.append(real)
    return tuple(resolved)


def resolved_directory(directory: Path, prefix: str, flag: str) -> Path:
    """The directory itself; `resolved_directories` for one.

    Raises:
        ConfigurationError: it does not exist, is none, or cannot be written to.
    """
    advice = f"give an existing, writable one on an SSD ({flag})"
    try:
        real = os.path.realpath(directory, strict=True)
        is_directory = stat.S_ISDIR(os.stat(real).st_mode)
        is_writable = os.access(real, os.W_OK | os.X_OK)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{prefix}directory {directory} does not exist; {advice}"
        ) from None
    except (OSError, ValueError) as error:  # a dead drive or server; a NUL byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"{prefix}directory {directory} cannot be reached ({reason}); {advice}"
        ) from None
    if not is_directory:
        raise ConfigurationError(f"{prefix}{directory} is not a directory; {advice}")
    if not is_writable:
        raise ConfigurationError(f"{prefix}directory {directory} is not writable; {advice}")
    return Path(real)
