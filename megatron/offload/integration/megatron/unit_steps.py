# SPDX-License-Identifier: Apache-2.0
"""Steps of a Megatron optimizer whose states stay in memory, unit by unit: `step_by_units`.

Where states move, `model_states.py` updates bucket by bucket; parameters wait on a tier in both.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.megatron.main_weights import COPY, PAIRS, MainWeights
from megatron.offload.integration.open_parameters import by_units, changing
from megatron.offload.integration.open_streams import OPEN, StepBy
from megatron.offload.integration.own_attributes import put
from megatron.offload.states.optimizer_slice import OptimizerSlice

# The optimizers that update each parameter by its gradient and state alone.
_KNOWN_KINDS = ("Adam", "AdamW", "FusedAdam")


def check_steps_by_units(optimizer: Any) -> None:
    """Raises ConfigurationError for what may not update parameters unit by unit.

    Args:
        optimizer: Megatron's, that consists of no others.
    """
    kind = type(optimizer).__name__
    if kind in PAIRS:
        kind = type(optimizer.optimizer).__name__
    if kind not in _KNOWN_KINDS or getattr(optimizer.optimizer, "capturable", False):
        raise ConfigurationError(
            f"{PARAMETERS_PREFIX}{kind} cannot be combined with --parameter-offload where that has "
            "it go unit by unit (--use-distributed-optimizer, --gradient-offload on): it is not "
            "known to update each parameter by its gradient and state alone; use --optimizer adam, "
            "not capturable, or drop one"
        )


def step_by_units(optimizer: Any) -> Callable[[], None]:
    """Makes a Megatron optimizer update one unit after the other, while that unit is in memory.

    Args:
        optimizer: with parameters that are offloaded.

    Returns:
        A function that undoes it.
    """
    inner, weights = optimizer.optimizer, MainWeights(optimizer)
    own_step = OptimizerSlice(inner)

    @torch.no_grad()
    def step(self: torch.optim.Optimizer) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        pieces = by_units(params, weights.model_param)
        own_step.begin_step(pieces)
        for own in pieces:
            states = {param: self.state[param] for param in own if self.state.get(param)}
            with changing(own):
                self.state.update(own_step.step(own, states))
                weights.copy(own)
        own_step.end_step()

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    OPEN.steps[inner] = StepBy.PARTS
    undo = contextlib.ExitStack()
    undo.callback(OPEN.steps.pop, inner, None)
    undo.callback(put(inner, "step", types.MethodType(hooked, inner)))
    undo.callback(put(optimizer, COPY, lambda: None))  # Note [Main weights go to the model at once]
    return undo.close
