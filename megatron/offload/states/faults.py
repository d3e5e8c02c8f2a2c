# SPDX-License-Identifier: Apache-2.0
"""Parts of sentences about states: `names_of`, `interrupted_step`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.offload.errors import STATES_PREFIX, InterruptedStepError


def interrupted_step(checkpoint: str) -> InterruptedStepError:
    """The error for going on after an error or an interrupt has ended a step half way."""
    return InterruptedStepError(
        f"{STATES_PREFIX}a step ended in its middle, by an error or an interrupt: some parameters "
        "may be updated and others not, which is no state to go on from or to save; load weights "
        f"and optimizer from {checkpoint or 'the last checkpoint'}"
    )


def names_of(params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> str:
    """Parameters by name if the optimizer has names, else by number, as in `state_dict`."""
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
