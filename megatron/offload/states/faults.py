# SPDX-License-Identifier: Apache-2.0
"""What is said when states cannot go where they should, or do not come back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from megatron.offload.errors import STATES_PREFIX, InterruptedStepError, LostStateError
from megatron.offload.sizes import format_size
from megatron.offload.states.bucket import Bucket

logger = logging.getLogger(__name__)


def lost(
    bucket: Bucket, optimizer: torch.optim.Optimizer, error: Exception, checkpoint: str
) -> LostStateError:
    """The error for a bucket that could not be read back.

    Args:
        bucket: on a tier.
        optimizer: knows its parameters by number, or by name.
        error: that the tier gave.
        checkpoint: to resume from; empty: not known.
    """
    return LostStateError(
        f"{STATES_PREFIX}those of {_names(bucket.params, optimizer)} "
        f"({format_size(bucket.num_bytes)}; {bucket.block}) could not be read back: {error}; there "
        "is no other copy, so training stops; check the disk and resume from "
        f"{checkpoint or 'the last checkpoint'}"
    )


def interrupted_step(checkpoint: str) -> InterruptedStepError:
    """The error for whoever would go on after a step that ended in its middle."""
    return InterruptedStepError(
        f"{STATES_PREFIX}a step ended in its middle, by an error or an interrupt: some parameters "
        "are updated and others are not, which is no state to go on from or to save; load weights "
        f"and optimizer from {checkpoint or 'the last checkpoint'}"
    )


def warn_of_retry(error: Exception) -> None:
    """A read failed and is tried once more."""
    logger.warning("%sa read failed (%s); trying once more", STATES_PREFIX, error)


def warn_of_full_tiers(num_bytes: int, total_bytes: int, window_bytes: int, reason: str) -> None:
    """States stay in memory beside the window.

    Args:
        num_bytes: that no tier took.
        total_bytes: of all states.
        window_bytes: that may be in memory.
        reason: of the last write that failed; empty: there was no room.
    """
    logger.warning(
        "%sno tier takes %s of %s (%s); they stay in memory beside the window of %s "
        "(--optimizer-state-window) and nothing is lost, but more memory is needed; check the "
        "disk, make room there, and resume from a checkpoint if memory runs short",
        STATES_PREFIX,
        format_size(num_bytes),
        format_size(total_bytes),
        reason or "full or failed",
        format_size(window_bytes),
    )


def _names(params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> str:
    """Parameters by name if the optimizer was given names, else by number, as in `state_dict`."""
    wanted = {id(param) for param in params}
    found: list[str] = []
    number = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or range(number, number + len(group["params"]))
        number += len(group["params"])
        found += [
            str(name)
            for name, param in zip(names, group["params"], strict=True)
            if id(param) in wanted
        ]
    if len(found) == 1:
        return f"parameter {found[0]}"
    return f"{len(found)} parameters, {found[0]} to {found[-1]}" if found else "parameters"
