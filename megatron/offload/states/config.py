# SPDX-License-Identifier: Apache-2.0
"""Every setting of model states on tiers, once: `StatesConfig`.

The command-line flags, their help texts and the checks of their values all come from its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.offload.errors import STATES_PREFIX
from megatron.offload.flag import flag
from megatron.offload.sizes import MIB, parse_positive_size, parse_size
from megatron.offload.tier_settings import TierSettings, io_flag, tier_flag

DEFAULT_WINDOW_BYTES = 256 * MIB


@dataclass(frozen=True)
class StatesConfig(TierSettings):
    """Where an optimizer's states are between its steps, and within which bounds. Sizes in bytes.

    Raises:
        ConfigurationError: the values contradict each other (checked on construction).
    """

    group: ClassVar[str] = "model states"
    prefix: ClassVar[str] = STATES_PREFIX
    flags: ClassVar[str] = "--optimizer-state-"
    other_names: ClassVar[Mapping[str, str]] = {"--optimizer-state-dir": "directory"}

    mode: str = flag(
        "--optimizer-state-offload",
        "off",
        "off: optimizer states stay in memory. ssd: they and the main weights are on "
        "--optimizer-state-dir, and each step reads them bucket by bucket. host: the same, in "
        "host memory. tiered: in both together, in proportion to their measured bandwidth. "
        "auto: on the SSD, with as large a window as --device-memory-budget leaves beside "
        "activations. "
        "Results are bit-identical.",
        choices=("off", "host", "ssd", "tiered", "auto"),
    )
    directories: tuple[Path, ...] = tier_flag(
        "--optimizer-state-dir",
        "directory on the SSD for optimizer states, or several on different SSDs. Default: "
        "--activation-offload-dir.",
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
        "most bytes of optimizer states in memory at a time. States that fit stay from one step to "
        "the next and are neither written nor read. With an accelerator and ssd it is page-locked "
        "host memory; the device has three buckets during a step.",
        parse=parse_size,
        metavar="SIZE",
    )
    bucket_bytes: int = flag(
        "--optimizer-state-bucket",
        32 * MIB,
        "size of a bucket: the states of consecutive parameters that move together.",
        parse=parse_positive_size,
        metavar="SIZE",
    )
    host_budget: int | float | None = tier_flag(
        "--optimizer-state-host-budget",
        "host memory for the optimizer states of each rank, as a size; or a fraction of the "
        "machine's memory for all its ranks together. Default: half of what is available.",
    )
    ssd_budget_bytes: int | None = tier_flag(
        "--optimizer-state-ssd-budget",
        "most SSD space for the optimizer states of each rank. Default: as much as they need.",
    )
    threads: int | None = tier_flag(
        "--optimizer-state-threads",
        "I/O threads of each rank and directory. Default: as --activation-offload-threads.",
    )
    io: str = io_flag(
        "--optimizer-state-io",
        "as --activation-offload-io, without gds.",
    )
    write_bytes_per_s: float | None = tier_flag(
        "--optimizer-state-write-limit",
        "most bytes a second that optimizer states write to the SSDs, for example 500MB/s.",
    )
    drive_endurance_bytes: int | None = tier_flag(
        "--optimizer-state-drive-tbw",
        "bytes that each SSD is rated to endure. Default: as --activation-offload-drive-tbw.",
    )
    device_memory_budget_bytes: int | None = flag(
        "--device-memory-budget",
        None,
        "with auto: most memory of the device that weights, gradients, states and activations of a "
        "rank may take together, for example 70GiB; on a CPU the most memory of the process. With "
        "--activation-offload auto the planner decides both together. Default: states take what "
        "helps, up to half of the memory that is free.",
        parse=parse_positive_size,
        metavar="SIZE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_directories(f"--optimizer-state-offload {self.mode}")
