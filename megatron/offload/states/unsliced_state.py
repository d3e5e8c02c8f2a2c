# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps beside its parameters' states: slices of a step may not change it.

A step of some of the parameters runs in a twin of the optimizer (`optimizer_slice.py`). We take
over what the step writes into its groups. Anything else that it changes would be lost with the
twin, or would be changed once for each slice: so such a change raises, as far as it can be
detected. A change in place of a list or a dict of the optimizer cannot be detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.offload.errors import STATES_PREFIX, ConfigurationError, OffloadError

# Attributes that steps write with the same value in all slices, or that hold scratch memory.
_HARMLESS = {
    "param_groups",
    "state",
    "_need_device_dtype_check_for_fused",  # torch's
    "_warned_capturable_if_run_uncaptured",  # torch's
    "_dummy_overflow_buf",  # of Apex and Transformer Engine
    "initialized",  # of bitsandbytes: whether states are on the device
    "_cpu_paged_warned",  # of bitsandbytes: whether it has warned
}


class UnslicedState:
    """What an optimizer keeps beside its parameters' states, as it was before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._attributes = _attributes(optimizer)
        self._versions = _versions(optimizer)

    def check(self, optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
        """Raises OffloadError if the step has changed it.

        Args:
            optimizer: after the step.
            params: all parameters that it has.
        """
        own = set(params)
        if keys := [key for key in optimizer.state if key not in own]:
            raise OffloadError(refusal(optimizer, f"keeps {_listed(keys)} in its state"))
        before, after = self._attributes, _attributes(optimizer)
        changed = [
            name
            for name in before.keys() | after.keys()
            if name not in before or name not in after or not _is_same(before[name], after[name])
        ]
        versions = _versions(optimizer)
        changed += [
            name
            for name, (tensor, version) in self._versions.items()
            if name in versions and versions[name][0] is tensor and versions[name][1] != version
        ]
        if changed:
            raise OffloadError(refusal(optimizer, f"changes what it has as {_listed(changed)}"))


def check_state_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError for an optimizer whose state has keys that are no parameters."""
    if keys := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise ConfigurationError(refusal(optimizer, f"keeps {_listed(keys)} in its state"))


def check_groups(
    optimizer: torch.optim.Optimizer, one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    """Raises OffloadError if a group has other values after one slice than after another."""
    differing = [
        key
        for key in one.keys() | other.keys()
        if key != "params" and not _is_same(one.get(key), other.get(key))
    ]
    if differing:
        what = f"computes {_listed(differing)} of a group from several parameters"
        raise OffloadError(refusal(optimizer, what))


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _HARMLESS}


def _versions(optimizer: torch.optim.Optimizer) -> dict[str, tuple[torch.Tensor, int]]:
    """Tensors of an optimizer and of its groups, with their versions."""
    named = list(_attributes(optimizer).items())
    for number, group in enumerate(optimizer.param_groups):
        named += [(f"{key} of group {number}", value) for key, value in group.items()]
    return {
        name: (value, value._version)
        for name, value in named
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        kinds = [(tensor.device, tensor.dtype) for tensor in (one, other)] if both else []
        return both and kinds[0] == kinds[1] and torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors or arrays in it
        return False


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, names)))


def refusal(optimizer: torch.optim.Optimizer, what: str) -> str:
    """The sentence for an optimizer whose step cannot run in slices."""
    return (
        f"{STATES_PREFIX}those of {type(optimizer).__name__} cannot be offloaded: its step {what}, "
        "where one parameter after the other has to be updated by its own gradient and state; "
        "leave its states in memory, or use another optimizer"
    )
