# SPDX-License-Identifier: Apache-2.0
"""Every setting of parameters on tiers: `ParametersConfig`. Its flags are made of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.flag import flag
from megatron.offload.parameters.weight_codec import CODECS
from megatron.offload.tier_settings import TierSettings, io_flag, tier_flag
from megatron.offload.values import parse_count


@dataclass(frozen=True)
class ParametersConfig(TierSettings):
    """Where the parameters of layers are while other layers compute. Sizes in bytes.

    Raises:
        ConfigurationError: the values contradict each other (checked on construction).
    """

    group: ClassVar[str] = "parameters"
    prefix: ClassVar[str] = PARAMETERS_PREFIX
    flags: ClassVar[str] = "--parameter-offload-"
    other_names: ClassVar[Mapping[str, str]] = {"--parameter-offload-dir": "directory"}

    mode: str = flag(
        "--parameter-offload",
        "off",
        "off: parameters stay in memory. ssd: those of layers are on --parameter-offload-dir, and "
        "are read before their unit of layers runs. host: the same, in host memory. tiered: in "
        "both together. Parameters outside of layers (embeddings, the output layer) stay in "
        "memory. Results are bit-identical.",
        choices=("off", "host", "ssd", "tiered"),
    )
    gradients: str = flag(
        "--gradient-offload",
        "off",
        "on: with layer-major steps, the gradients of a unit of layers are written to the tier of "
        "its parameters when its backward pass has run for all micro-batches, and read for the "
        "optimizer's step; with Megatron give --overlap-grad-reduce too. off: they stay in memory.",
        choices=("off", "on"),
    )
    codec: str = flag(
        "--parameter-codec",
        "off",
        "off: frozen parameters move as they are. int8: in units of layers that are frozen as a "
        "whole, matrices are rounded once, to 8 bits a value, and move so; layers compute "
        "with the rounded values, in the type that the weights have. nf4: the same in 4 bits. For "
        "adapters (LoRA) on a model that is larger than memory.",
        choices=("off", *CODECS),
    )
    directories: tuple[Path, ...] = tier_flag(
        "--parameter-offload-dir",
        "directory on the SSD for parameters, or several on different SSDs. Default: "
        "--activation-offload-dir.",
    )
    live_units: int = flag(
        "--parameter-offload-live-units",
        2,
        "units of layers whose parameters are in memory at a time, at least 2: one computes while "
        "the next one is read.",
        parse=parse_count,
        metavar="N",
    )
    host_budget: int | float | None = tier_flag(
        "--parameter-offload-host-budget",
        "host memory for the parameters of each rank, as a size; or a fraction of the machine's "
        "memory for all its ranks together. Default: half of what is available.",
    )
    ssd_budget_bytes: int | None = tier_flag(
        "--parameter-offload-ssd-budget",
        "most SSD space for the parameters of each rank. Default: as much as they need.",
    )
    threads: int | None = tier_flag(
        "--parameter-offload-threads",
        "I/O threads of each rank and directory. Default: what suits the disks.",
    )
    io: str = io_flag(
        "--parameter-offload-io",
        "as --activation-offload-io, without gds.",
    )
    write_bytes_per_s: float | None = tier_flag(
        "--parameter-offload-write-limit",
        "most bytes a second that parameters write to the SSDs, for example 500MB/s.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_directories(f"--parameter-offload {self.mode}")
        if self.offloads_gradients and not self.enabled:
            raise ConfigurationError(
                f"{self.prefix}--gradient-offload on needs a place for gradients, which is where "
                "parameters wait; give --parameter-offload"
            )
        if self.codec != "off" and not self.enabled:
            raise ConfigurationError(
                f"{self.prefix}--parameter-codec {self.codec} is for parameters that wait on a "
                "tier; give --parameter-offload"
            )
        if self.live_units < 2:
            raise ConfigurationError(
                f"{self.prefix}--parameter-offload-live-units {self.live_units} leaves no room to "
                "read ahead; give at least 2"
            )

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients move."""
        return self.gradients == "on"
