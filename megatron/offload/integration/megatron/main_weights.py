# SPDX-License-Identifier: Apache-2.0
"""What a Megatron optimizer updates in place of the model's parameters: `MainWeights`.

Note [Main weights go to the model at once]
After its step Megatron copies all main weights to the model's parameters. By then most of them are
on a tier. So those that move together are copied while they are in memory, by Megatron's own
function on a shallow twin of its optimizer that has no other parameters, and the copy after the
step is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.integration.open_parameters import changing

# Attributes of a Megatron optimizer: lists of groups of the model's parameters, and of what the
# inner optimizer updates in their place. The first pair that it has is its main weights.
PAIRS = {
    "Float16OptimizerWithFloat16Params": (("float16_groups", "fp32_from_float16_groups"),),
    "DistributedOptimizer": (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ),
    "FP32Optimizer": (),
}
COPY = "_copy_main_params_to_model_params"


def optimizers_in(optimizer: Any) -> list[Any]:
    """The optimizers that a Megatron optimizer consists of, but those of frozen models."""
    if type(optimizer).__name__ == "ChainedOptimizer":
        return [one for part in optimizer.chained_optimizers for one in optimizers_in(part)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


class MainWeights:
    """Megatron's own copy of main weights to the model's parameters, for a few at a time.

    Attributes:
        pairs: names of the attributes that hold the groups, see `PAIRS`.

    Args:
        optimizer: Megatron's, of a kind in `PAIRS`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.pairs = PAIRS[type(optimizer).__name__]
        if _keeps_main_weights_inside(optimizer.config):
            self.pairs = ()  # they are states of the inner optimizer, whose step copies them
        # Of what the inner optimizer updates: which pair, and the model's parameter.
        self._place: dict[int, tuple[int, torch.Tensor]] = {}
        for index, (model_name, own_name) in enumerate(self.pairs):
            groups = zip(getattr(optimizer, model_name), getattr(optimizer, own_name), strict=True)
            for of_model, own in groups:
                for model_param, param in zip(of_model, own, strict=True):
                    self._place[id(param)] = index, model_param

    def is_main_weight(self, param: torch.Tensor) -> bool:
        """Whether it is Megatron's own, and not the model's parameter or a part of it."""
        index, _ = self._place.get(id(param), (-1, None))
        return index == 0

    def model_param(self, param: torch.Tensor) -> torch.Tensor:
        """The model's parameter that one of the inner optimizer's is, or is updated for."""
        _, found = self._place.get(id(param), (-1, param))
        return found

    def order(self, param: torch.Tensor) -> int:
        """Puts what the inner optimizer updates in the order of the model, last layers first.

        Its own groups part the weights of a layer from its biases and norms.
        """
        gradient = getattr(self.model_param(param), "main_grad", None)
        return 0 if gradient is None else gradient.data_ptr()

    def copy(self, params: Sequence[torch.Tensor]) -> None:
        """Copies these to the model's parameters."""
        if not self.pairs:
            return
        kind = type(self._optimizer)
        twin = object.__new__(kind)
        twin.__dict__.update(self._optimizer.__dict__)
        for index, (model_name, own_name) in enumerate(self.pairs):
            own = [param for param in params if self._place[id(param)][0] == index]
            setattr(twin, own_name, [own])
            setattr(twin, model_name, [[self._place[id(param)][1] for param in own]])
        if any(param.device != self._place[id(param)][1].device for param in params):
            twin._dummy_overflow_buf = None  # its kernel is for one device; copy_ is for any two
        # Those of the model may be on a tier of their own.
        with changing([self._place[id(param)][1] for param in params]):
            getattr(kind, COPY)(twin)


def _keeps_main_weights_inside(settings: Any) -> bool:
    """Whether main weights are states of the inner optimizer (precision-aware)."""
    return bool(getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
