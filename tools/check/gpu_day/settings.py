# SPDX-License-Identifier: Apache-2.0
"""What a run of gpu_day.py was asked for: `Settings`; the models that it trains: `Shape`.

The command line makes the settings, every job reads them in a process of its own. Computes the
bytes and operations of a model; measures nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.offload.sizes import GIB, MIB

_ELEMENT_BYTES = 2  # bf16
_SAVED_UNITS = 24.5  # tensors of tokens x hidden that a layer of Llama-3 8B saves, SDPA, bf16
_MOST_BESIDE = 6  # jobs of at most 10 GiB each
_LOGIT_BYTES = 12  # of a token and word: logits in bf16 and fp32, and the gradients of both


@dataclass(frozen=True)
class Shape:
    """A Llama, and the tokens of a step.

    Attributes:
        seq: tokens of a sequence.
        batch: sequences of a step.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.batch

    @property
    def layer_bytes(self) -> int:
        """About what a layer saves for backward in a step."""
        return int(_SAVED_UNITS * self.tokens * self.hidden * _ELEMENT_BYTES)

    @property
    def head_bytes(self) -> int:
        """About what output layer and loss take at the most."""
        return self.tokens * self.vocab * _LOGIT_BYTES

    @property
    def step_flops(self) -> float:
        """Operations of forward and backward that the model asks for: no recomputation counts.

        Of attention only what its causal mask leaves.
        """
        head_dim = self.hidden // self.heads
        attention = self.hidden * 2 * (self.hidden + self.kv_heads * head_dim)
        weights = self.layers * (attention + 3 * self.hidden * self.intermediate)
        weights += self.hidden * self.vocab
        scores = self.layers * self.hidden * self.seq  # two products, half of each
        return 3.0 * self.tokens * 2 * (weights + scores)

    def budget(self, share: float) -> int:
        """A budget of activations: output layer and loss, and this share of what layers save."""
        least = 3 * self.layer_bytes  # one computes, two are on their way
        return self.head_bytes + max(int(share * self.layers * self.layer_bytes), least)


_LLAMA_8B = Shape(32, 4096, 14336, 32, 8, vocab=128256, seq=4096, batch=1)
_TINY = Shape(2, 64, 128, 4, 2, vocab=128, seq=32, batch=2)
_SHAPES = {
    "full": _LLAMA_8B,
    # A quarter of the layers: all states fit beside all activations, so every way can be measured.
    "stack": replace(_LLAMA_8B, layers=8, vocab=32768, batch=2),
    "bits": replace(_LLAMA_8B, layers=2, vocab=32768, seq=2048),
}


@dataclass(frozen=True)
class Settings:
    """Everything that a job needs to know.

    Attributes:
        is_tiny: the sizes of a dry run.
        directory: on the SSD.
        host_budget_bytes: of host memory, for activations.
        states_budget_bytes: of host memory, for optimizer states and parameters.
    """

    device: torch.device
    directory: Path
    is_tiny: bool
    host_budget_bytes: int = 48 * GIB
    states_budget_bytes: int = 40 * GIB

    @property
    def on_gpu(self) -> bool:
        """Else this only tries the script out."""
        return self.device.type == "cuda"

    @property
    def min_bytes(self) -> int:
        """Smaller storages stay: the default, and in a dry run next to none."""
        return 1024 if self.is_tiny else MIB

    @property
    def compiler(self) -> str:
        """Of torch.compile; in a dry run without code generation, which takes minutes."""
        return "aot_eager" if self.is_tiny else "inductor"

    def shape(self, name: str, *, seq: int | None = None, batch: int | None = None) -> Shape:
        """One of the models, with other sequences or another batch where these are given."""
        if self.is_tiny:
            return replace(_TINY, seq=_TINY.seq * (2 if seq == 8192 else 1), batch=batch or 2)
        shape = _SHAPES[name]
        return replace(shape, seq=seq or shape.seq, batch=batch or shape.batch)

    @property
    def num_beside(self) -> int:
        """Jobs that run beside one another where none of them measures time."""
        return max(min((os.cpu_count() or 1) // 2, _MOST_BESIDE), 1)

    def few(self, full: int, tiny: int) -> int:
        """A count: of the full size or of a dry run."""
        return tiny if self.is_tiny else full
