# SPDX-License-Identifier: Apache-2.0
"""What a run of gpu_check.py was asked for: `Settings`; the `Size` of a model; `settle`.

The command line makes the settings, every section reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What each section shows, and the seconds that it is sized for: quick and in full.
SECTIONS = {
    "ordering": ("every byte that comes back is right while all streams lag behind", 20, 65),
    "two_gpus": ("work on one GPU touches no other; two engines in one process", 20, 25),
    "side_streams": ("layers that compute on streams of their own; shared experts", 20, 60),
    "parity": ("losses and gradients of GPT, BERT and T5 are the same bits as without", 60, 240),
    "transformer_engine": ("the same of Transformer Engine's layers, bf16 and FP8", 40, 120),
    "states": ("optimizer states on tiers are the same bits as in memory", 20, 40),
    "parameters": ("parameters on tiers are the same bits as in memory", 8, 18),
    "codecs": ("numbers in few bits are the same as on the host, and how fast", 20, 40),
    "memory": ("the peak falls below a bound that is derived term by term", 20, 60),
}
_SETTLE_S = 60.0


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its micro-batch."""

    hidden: int
    num_layers: int
    seq_length: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.hidden}x{self.num_layers}x{self.seq_length}x{self.micro_batch}"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
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

    @property
    def on_gpu(self) -> bool:
        """Else this only tries the script out."""
        return self.device.type == "cuda"


def settle(engine: Any) -> None:
    """Waits until no write of an engine (None: offload is off) is queued or running.

    Raises:
        TimeoutError: one did not end.
    """
    if engine is not None and not engine.wait_for_writes(_SETTLE_S):
        raise TimeoutError(f"writes did not end within {_SETTLE_S:.0f} s")
