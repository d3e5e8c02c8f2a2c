# SPDX-License-Identifier: Apache-2.0
"""Settings that each stream of bytes has of its tiers: `TierSettings`, and the flags they share.

Activations, optimizer states and parameters have a class each that derives from it; `tiers/open.py`
opens what they ask for.
"""

from __future__ import annotations

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
                f"{self.prefix}{asks} needs a place on an SSD; give it with {self.flags}dir DIR"
            )
        if len(set(self.directories)) < len(self.directories):
            raise ConfigurationError(
                f"{self.prefix}{self.flags}dir names a directory twice; striping needs directories "
                "on different drives"
            )


def directories_flag(flags: str, help: str) -> Any:
    """The field `directories`. `flags` is what the stream's flags begin with, as in all these."""
    return flag(f"{flags}dir", (), help, parse=parse_paths, metavar="DIR[,DIR...]")


def host_budget_flag(flags: str, help: str) -> Any:
    """The field `host_budget`."""
    return flag(f"{flags}host-budget", None, help, parse=parse_budget, metavar="SIZE")


def ssd_budget_flag(flags: str, help: str) -> Any:
    """The field `ssd_budget_bytes`."""
    return flag(f"{flags}ssd-budget", None, help, parse=parse_size, metavar="SIZE")


def threads_flag(flags: str, help: str) -> Any:
    """The field `threads`."""
    return flag(f"{flags}threads", None, help, parse=parse_threads, metavar="N")


def io_flag(flags: str, help: str, *more: str) -> Any:
    """The field `io`; `more` are values beside those that every stream has."""
    return flag(f"{flags}io", "auto", help, choices=("auto", "direct", "buffered", *more))


def write_limit_flag(flags: str, help: str) -> Any:
    """The field `write_bytes_per_s`."""
    return flag(f"{flags}write-limit", None, help, parse=parse_rate, metavar="RATE")


def drive_endurance_flag(flags: str, help: str) -> Any:
    """The field `drive_endurance_bytes`."""
    return flag(f"{flags}drive-tbw", None, help, parse=parse_positive_size, metavar="SIZE")
