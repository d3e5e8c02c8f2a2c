# SPDX-License-Identifier: Apache-2.0
"""States on their way into an optimizer: `LazyStateTensor`, which torch passes on unchanged.

torch's `Optimizer.load_state_dict` converts every tensor to its parameter's device and type before
it keeps the first: all states would be in memory at once. It passes on objects of other types, so
`OptimizerStates` converts these bucket by bucket.
"""

from __future__ import annotations

from typing import Any

import torch


class LazyStateTensor:
    """A tensor of a state dict for one parameter, not converted yet."""

    def __init__(self, value: torch.Tensor, key: str) -> None:
        self.value = value
        self._key = key

    def tensor_for(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor as torch converts it for a parameter: of its type, on its device."""
        tensor: torch.Tensor = torch.optim.Optimizer._process_value_according_to_param_policy(
            param, self.value, param_id=-1, param_groups=[], key=self._key
        )
        return tensor


def with_lazy_states(optimizer: torch.optim.Optimizer, state_dict: Any) -> Any:
    """A state dict whose tensors torch passes on; the same one if hooks or a subclass read it.

    Scalars, such as a parameter's number of steps, stay tensors.
    """
    plain = torch.optim.Optimizer
    hooks = (
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    kind = type(optimizer)
    has_own = kind.load_state_dict is not plain.load_state_dict or not _is_of_torch(
        kind.__setstate__
    )
    if has_own or any(hooks):
        return state_dict
    return {
        **state_dict,
        "state": {
            name: {key: _as_lazy(key, value) for key, value in state.items()}
            if isinstance(state, dict)
            else state
            for name, state in state_dict["state"].items()
        },
    }


def _is_of_torch(function: Any) -> bool:
    """Whether a method is that of an optimizer of torch, which reads none but scalars."""
    return str(function.__module__).partition(".")[0] == "torch"


def _as_lazy(key: str, value: Any) -> Any:
    is_large = isinstance(value, torch.Tensor) and value.dim() > 0
    return LazyStateTensor(value, key) if is_large else value
