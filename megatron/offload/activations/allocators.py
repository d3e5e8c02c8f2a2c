# SPDX-License-Identifier: Apache-2.0
"""Says what allocators may keep of the memory that activations free: `say_what_stays`."""

from __future__ import annotations

import logging

import torch

from megatron.offload.device.cuda_allocator import START_WITH_EXPANDABLE, keeps_fragments
from megatron.offload.machine.allocator import (
    START_WITH_ENVIRONMENT,
    allocator_name,
    keeps_freed_memory,
)

logger = logging.getLogger(__name__)


def say_what_stays(device: torch.device, *, plans: bool) -> None:
    """Logs a sentence where the allocator behind a device's tensors may keep freed memory.

    Args:
        device: where activations live.
        plans: a plan counts on that memory; then the sentence is a warning.
    """
    level = logging.WARNING if plans else logging.INFO
    if device.type == "cpu" and keeps_freed_memory():
        logger.log(
            level,
            "activation offload: memory comes from %s, which may keep what offload frees; %s, or "
            "%s",
            allocator_name(),
            START_WITH_ENVIRONMENT,
            "auto measures too much memory" if plans else "memory does not fall",
        )
    if keeps_fragments(device):
        logger.log(
            level,
            "activation offload: PyTorch's allocator may keep freed memory in pieces that fit "
            "nothing; %s, or %s",
            START_WITH_EXPANDABLE,
            "auto plans with less" if plans else "more stays reserved than is used",
        )
