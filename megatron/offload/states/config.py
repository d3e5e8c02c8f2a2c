# SPDX-License-Identifier: Apache-2.0
"""Every setting of what happens to model states, once: `StatesConfig`.

The command-line flags, their help texts and the checks of their values all come from its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.offload.errors import STATES_PREFIX, ConfigurationError
from megatron.offload.flag import Settings, flag
from megatron.offload.sizes import (
    MIB,
    parse_budget,
    parse_positive_size,
    parse_rate,
    parse_size,
)
from megatron.offload.values import parse_paths, parse_threads

DEFAULT_WINDOW_BYTES = 256 * MIB
_ON_SSD, _ON_HOST = ("ssd", "tiered", "auto"), ("host", "tiered")


@dataclass(frozen=True)
class StatesConfig(Settings):
    """Where an optimizer's states are between its steps, and within which bounds. Sizes in bytes.

    Raises:
        ConfigurationError: the values contradict each other (checked on construction).
    """

    group: ClassVar[str] = "model states"
    prefix: ClassVar[str] = STATES_PREFIX
    other_names: ClassVar[Mapping[str, str]] = {"--optimizer-state-dir": "directory"}

    mode: str = flag(
        "--optimizer-state-offload",
        "off",
        "off: optimizer states stay in memory. ssd: they and the main weights are on "
        "--optimizer-state-dir, and each step brings them bucket by bucket. host: the same, in "
        "host memory. tiered: in both side by side, in proportion to their measured bandwidth. "
        "auto: on the SSD, with as large a window as --device-memory-budget leaves beside "
        "activations. "
        "Results are bit-identical.",
        choices=("off", "host", "ssd", "tiered", "auto"),
    )
    directories: tuple[Path, ...] = flag(
        "--optimizer-state-dir",
        (),
        "directory on the SSD for optimizer states, or several on different SSDs. Default: "
        "--activation-offload-dir.",
        parse=parse_paths,
        metavar="DIR[,DIR...]",
    )
    step_on: str = flag(
        "--optimizer-step-on",
        "device",
        "where the optimizer's step is computed. device: where the parameters are. cpu: on the "
        "host, with main weights there, so that states never come to the device; another kernel, "
        "and so other bits, than on an accelerator.",
        choices=("device", "cpu"),
    )
    window_bytes: int = flag(
        "--optimizer-state-window",
        DEFAULT_WINDOW_BYTES,
        "most optimizer states in memory at a time. What fits stays from one step to the next and "
        "is neither written nor read. With an accelerator and ssd it is page-locked host memory; "
        "the device has three buckets during a step.",
        parse=parse_size,
        metavar="SIZE",
    )
    bucket_bytes: int = flag(
        "--optimizer-state-bucket",
        32 * MIB,
        "optimizer states that move together: those of so many consecutive parameters.",
        parse=parse_positive_size,
        metavar="SIZE",
    )
    host_budget: int | float | None = flag(
        "--optimizer-state-host-budget",
        None,
        "host memory for the optimizer states of each rank, as a size; or a fraction of the "
        "machine's memory for all its ranks together. Default: half of what is available.",
        parse=parse_budget,
        metavar="SIZE",
    )
    ssd_budget_bytes: int | None = flag(
        "--optimizer-state-ssd-budget",
        None,
        "most SSD space for the optimizer states of each rank. Default: as much as they need.",
        parse=parse_size,
        metavar="SIZE",
    )
    threads: int | None = flag(
        "--optimizer-state-threads",
        None,
        "I/O threads of each rank and directory. Default: as --activation-offload-threads.",
        parse=parse_threads,
        metavar="N",
    )
    io: str = flag(
        "--optimizer-state-io",
        "auto",
        "as --activation-offload-io, without gds.",
        choices=("auto", "direct", "buffered"),
    )
    write_bytes_per_s: float | None = flag(
        "--optimizer-state-write-limit",
        None,
        "most bytes a second that optimizer states write to the SSDs, for example 500MB/s.",
        parse=parse_rate,
        metavar="RATE",
    )
    drive_endurance_bytes: int | None = flag(
        "--optimizer-state-drive-tbw",
        None,
        "bytes that each SSD is rated to endure. Default: as --activation-offload-drive-tbw.",
        parse=parse_positive_size,
        metavar="SIZE",
    )
    device_memory_budget_bytes: int | None = flag(
        "--device-memory-budget",
        None,
        "with auto: most memory of the device that weights, gradients, states and activations of a "
        "rank may take together, for example 70GiB; on a CPU the most that the process may. With "
        "--activation-offload auto both are decided together. Default: states take what helps, up "
        "to half of the memory that is free.",
        parse=parse_positive_size,
        metavar="SIZE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_ssd and not self.directories:
            raise ConfigurationError(
                f"{self.prefix}--optimizer-state-offload {self.mode} needs a place on an SSD; give "
                "it with --optimizer-state-dir DIR or --activation-offload-dir DIR"
            )
        if len(set(self.directories)) < len(self.directories):
            raise ConfigurationError(
                f"{self.prefix}--optimizer-state-dir names a directory twice; striping needs "
                "directories on different drives"
            )

    @property
    def enabled(self) -> bool:
        """Whether any state may leave the device's memory."""
        return self.mode != "off"

    @property
    def uses_ssd(self) -> bool:
        """Whether states may go to an SSD."""
        return self.mode in _ON_SSD

    @property
    def uses_host(self) -> bool:
        """Whether states may go to host memory."""
        return self.mode in _ON_HOST
