# SPDX-License-Identifier: Apache-2.0
"""What a run of gpu_check.py was asked for: `Settings`, and the `Size` of a model.

The command line makes one, every section reads it. Nothing here touches a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

SECTIONS = ("ordering", "parity", "memory", "overlap", "bandwidth", "compare")


@dataclass(frozen=True)
class Size:
    """A GPT: `4096x16x2048x4` is hidden x layers x sequence length x micro-batch size."""

    hidden: int
    num_layers: int
    seq_length: int
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """From its written form.

        Raises:
            ValueError: it is not one.
        """
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text.strip())
        numbers = [int(part) for part in match.groups()] if match else []
        if not numbers or min(numbers) < 1 or numbers[0] % 64:
            raise ValueError(
                f"{text!r} is no size; write hidden x layers x sequence length x micro-batch size "
                "with a hidden size that 64 divides, for example 4096x16x2048x4"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.hidden}x{self.num_layers}x{self.seq_length}x{self.micro_batch}"

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.seq_length * self.micro_batch

    @property
    def num_heads(self) -> int:
        """Heads of 128, as large models have them; of 64 where that does not divide."""
        return self.hidden // (128 if self.hidden % 128 == 0 else 64)


@dataclass(frozen=True)
class Settings:
    """Everything that a section needs to know."""

    device: torch.device
    directory: Path  # on the SSD
    quick: bool
    seed: int
    stress_s: float
    sizes: tuple[Size, ...]
    rounds: int
    num_steps: int  # timed in each round
    limit_s: float  # for a section
    trace: Path | None

    @property
    def on_gpu(self) -> bool:
        """Else this only tries the script out."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
