# SPDX-License-Identifier: Apache-2.0
"""Settings that each stream of bytes has of its tiers: `TierSettings`, and the flags they share.

Activations, optimizer states and parameters have a class each that derives from it; `tiers/open.py`
opens what they ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron.offload.errors import ConfigurationError
from megatron.offload.flag import Settings, flag
from megatron.offload.sizes import parse_budget, parse_positive_size, parse_rate, parse_size
from megatron.offload.values import parse_paths, parse_threads

ON_SSD, ON_HOST = frozenset({"ssd", "tiered", "auto"}), frozenset({"host", "tiered"})


@dataclass(frozen=True)
class TierSettings(Settings):
    """Where the bytes of one stream go, and within which bounds. Sizes in bytes.

    Attributes:
        flags: what the names of its flags begin with.
        mode: `off`, `host`, `ssd`, `tiered` or `auto`.
        directories: on SSDs.
        host_budget: of each rank, in bytes; or a part of the machine's memory; None: half of what
            is available.
        ssd_budget_bytes: of each rank; None: as much as is needed.
        threads: for I/O, of each rank and directory; None: what suits the disks.
        io: `auto`, `direct`, `buffered` or `gds`.
        write_bytes_per_s: at most, of each rank; None: no bound.
    """

    flags: ClassVar[str]

    mode: str
    directories: tuple[Path, ...]
    host_budget: int | float | None
    ssd_budget_bytes: int | None
    threads: int | None
    io: str
    write_bytes_per_s: float | None

    @property
    def enabled(self) -> bool:
        """Whether any of the bytes may leave the memory that computes."""
        return self.mode != "off"

    @property
    def uses_ssd(self) -> bool:
        """Whether they may go to SSDs."""
        return self.mode in ON_SSD

    @property
    def uses_host(self) -> bool:
        """Whether they may go to host memory."""
        return self.mode in ON_HOST

    def check_directories(self, asks: str) -> None:
        """Raises ConfigurationError where directories are missing, or one is given twice.

        Args:
            asks: for an SSD: a flag and its value.
        """
        if self.uses_ssd and not self.directories:
            raise ConfigurationError(
                f"{self.prefix}{asks} needs a place on an SSD; give {self.flags}dir DIR"
            )
        if len(set(self.directories)) < len(self.directories):
            raise ConfigurationError(
                f"{self.prefix}{self.flags}dir names a directory twice; striping needs directories "
                "on different drives"
            )


# How each of them is read: its default, what parses it, and what stands for its value in the help.
_READ: dict[str, tuple[Any, Callable[[object], Any], str]] = {
    "dir": ((), parse_paths, "DIR[,DIR...]"),
    "host-budget": (None, parse_budget, "SIZE"),
    "ssd-budget": (None, parse_size, "SIZE"),
    "threads": (None, parse_threads, "N"),
    "write-limit": (None, parse_rate, "RATE"),
    "drive-tbw": (None, parse_positive_size, "SIZE"),
}


def tier_flag(name: str, help: str) -> Any:
    """The field of a stream for a flag that all streams have, `--STREAM-dir` and so on."""
    (kind,) = (one for one in _READ if name.endswith(f"-{one}"))
    default, parse, metavar = _READ[kind]
    return flag(name, default, help, parse=parse, metavar=metavar)


def io_flag(name: str, help: str, *more: str) -> Any:
    """The field `io`; `more` are values beside those that every stream has."""
    return flag(name, "auto", help, choices=("auto", "direct", "buffered", *more))
