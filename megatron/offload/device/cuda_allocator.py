# SPDX-License-Identifier: Apache-2.0
"""The allocator under torch's CUDA tensors: whether what is freed stays in pieces that fit nothing.

The engine, the planner and `doctor` ask. Nothing is set here: torch reads its settings before the
first allocation, and they are its user's.

Note [Why expandable segments]
Activations leave device memory when a drive or a copy has taken them, so blocks are freed in an
order that differs from step to step. torch's allocator cuts fixed segments into blocks: what lies
free between two blocks in use serves nothing larger, and grows over steps. With expandable segments
free pages are moved to where a larger block is wanted, and what is reserved can nearly all be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from megatron.offload.device.cuda import segments_expand

# As torch reads them: the first one that is set counts.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE, _BACKEND = "expandable_segments", "backend"
EXPANDABLE_ENVIRONMENT = f"{_VARIABLES[0]}={_EXPANDABLE}:True"
# What to do about fragments: the end of a sentence for people.
START_WITH_EXPANDABLE = f"start training with {EXPANDABLE_ENVIRONMENT}, as the examples do"


def keeps_fragments(device: torch.device, environment: Mapping[str, str] | None = None) -> bool:
    """Whether freed memory of a device may stay in pieces that fit nothing: see the Note above.

    Args:
        device: other kinds than CUDA have allocators of their own.
        environment: that torch was started with; default: what torch says itself, once it has
            begun to use CUDA (some versions know one of the variables only, and code may have set
            it), before that this process's.
    """
    if device.type != "cuda":
        return False
    if environment is None and (expands := segments_expand()) is not None:
        return not expands
    environment = os.environ if environment is None else environment
    text = next((environment[name] for name in _VARIABLES if name in environment), "")
    pairs = (setting.partition(":") for setting in text.split(","))
    settings = {name.strip(): value.strip() for name, _, value in pairs}
    # Another backend is CUDA's own pool, which moves pages as well.
    is_native = settings.get(_BACKEND, "native") == "native"
    return is_native and settings.get(_EXPANDABLE, "").lower() != "true"
