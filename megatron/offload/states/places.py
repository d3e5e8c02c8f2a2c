# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer keeps its tensors, and what stands there while they are away: `Places`.

A bucket's tensors have their places in the optimizer's `state`, and parameters that move with them
are places themselves. What is away is a tensor without bytes there (`stand_in.py`), and a parameter
that is away is full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Layout, Name
from megatron.offload.moving.placeholder import all_nan
from megatron.offload.states.loaded import Loaded
from megatron.offload.states.optimizer_slice import State
from megatron.offload.states.sharded import as_part_of, local_of, part_of
from megatron.offload.states.stand_in import is_stand_in, stand_in

PARAM = "the parameter itself"  # the key of one that moves; no optimizer calls a state so


def typed_states_bytes(optimizer: torch.optim.Optimizer, own: torch.Tensor) -> int | None:
    """Bytes of a parameter's states where these have types of their own, whatever its type is.

    As with Transformer Engine's FusedAdam, for Megatron's precision-aware optimizer: exp_avg and
    exp_avg_sq in fp32 or bf16, and perhaps main weights beside them.

    Args:
        optimizer: whose states.
        own: the parameter, or this rank's part of it.

    Returns:
        None where the optimizer says no types.
    """
    kinds = getattr(optimizer, "name_to_dtype_map", None)
    if not kinds:
        return None
    names = ["exp_avg", "exp_avg_sq"]
    names += ["master_param"] if getattr(optimizer, "master_weights", False) else []
    return sum(own.numel() * kinds[name].itemsize for name in names)


def usual_states_bytes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor
) -> int:
    """Bytes of a parameter's states that will move.

    Exact for Adam, AdamW and SGD, and where there are states already; else as for Adam.

    Args:
        optimizer: whose states.
        group: of its groups, that has the parameter.
        param: as the optimizer has it.
    """
    own = part_of(param)
    tensors = [t for t in optimizer.state.get(param, {}).values() if isinstance(t, torch.Tensor)]
    if there := sum(part_of(t).nbytes for t in tensors if t.shape == param.shape and t.dim()):
        return there
    if (typed_bytes := typed_states_bytes(optimizer, own)) is not None:
        return typed_bytes
    if "momentum" in group:
        return own.nbytes if group["momentum"] else 0
    return own.nbytes * (3 if group.get("amsgrad") else 2)


class Places:
    """The places of an optimizer's tensors.

    Args:
        optimizer: whose.
        device: in whose memory buckets are.
        moves_param: whether a parameter itself moves with its states.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        moves_param: Callable[[torch.Tensor], bool],
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._moves_param = moves_param
        self._groups: Sequence[Mapping[str, Any]] = ()  # of the optimizer, which replaces the list
        self._group_of: dict[int, Mapping[str, Any]] = {}  # by the identity of a parameter

    def usual_bytes(self, param: torch.Tensor) -> int:
        """Of states of a parameter: those that it will have, and itself where it moves."""
        groups = self._optimizer.param_groups
        if groups is not self._groups or id(param) not in self._group_of:
            self._groups = groups
            self._group_of = {id(one): group for group in groups for one in group["params"]}
        group = self._group_of.get(id(param), self._optimizer.defaults)
        states_bytes = usual_states_bytes(self._optimizer, group, param)
        return states_bytes + (part_of(param).nbytes if self._moves_param(param) else 0)

    def attach(self, bucket: Bucket, views: dict[Name, torch.Tensor]) -> None:
        """Parameters of a bucket that move are its memory from now on."""
        for index, param in enumerate(bucket.params):
            view = views.get((index, PARAM))
            if view is not None:
                param.data = view

    def states_of(self, bucket: Bucket) -> dict[torch.Tensor, State]:
        """What is in the places of a bucket's states."""
        state = self._optimizer.state
        return {param: state[param] for param in bucket.params if state.get(param)}

    def states_with(
        self, bucket: Bucket, views: dict[Name, torch.Tensor]
    ) -> dict[torch.Tensor, State]:
        """A bucket's states, with its tensors where others only stand for them.

        Raises:
            OffloadError: something else without values is in the place of one.
        """
        slots = {} if bucket.layout is None else bucket.layout.slots
        return {
            param: {
                key: as_part_of(param, views[index, key])
                if is_stand_in(value, slots.get((index, key)))
                else value
                for key, value in self._optimizer.state[param].items()
            }
            for index, param in enumerate(bucket.params)
            if self._optimizer.state.get(param)
        }

    def take_over(
        self,
        bucket: Bucket,
        states: dict[torch.Tensor, State],
        views: dict[Name, torch.Tensor],
    ) -> None:
        """Takes a bucket's states into its own memory, and leaves what stands for them.

        Args:
            bucket: in memory, or nowhere yet.
            states: of its parameters, by the optimizer's keys.
            views: the tensors of them that are in its memory already.
        """
        tensors: dict[Name, torch.Tensor] = {}
        for index, param in enumerate(bucket.params):
            for key, value in self._movable(param, states.get(param, {})).items():
                tensors[index, key] = value
        if bucket.layout is None or not bucket.layout.fits(tensors):
            if tensors:
                layout = Layout(tensors)
                storage = layout.new_storage(self._device)
                layout.store(tensors.items(), storage)
                bucket.fill(layout, storage)
        else:
            assert bucket.storage is not None
            moved = {
                name: one
                for name, one in tensors.items()
                if name not in views or one.data_ptr() != views[name].data_ptr()
            }
            for name, one in moved.items():
                if _is_within(one, bucket.storage):  # under another name, where others may go
                    moved[name] = one.clone()
            bucket.layout.store(moved.items(), bucket.storage)
        self.leave(bucket, states)

    def leave(self, bucket: Bucket, states: dict[torch.Tensor, State]) -> None:
        """Puts what stands for a bucket's tensors in their places."""
        slots = {} if bucket.layout is None else bucket.layout.slots
        for index, param in enumerate(bucket.params):
            if param in states:
                homes = bucket.devices[index], self._device
                self._optimizer.state[param] = {
                    key: stand_in(slots[index, key], homes) if (index, key) in slots else value
                    for key, value in states[param].items()
                }
            if (index, PARAM) in slots:
                shape = slots[index, PARAM].shape
                param.data = all_nan(shape, param.dtype, bucket.devices[index])

    def have_more(self, bucket: Bucket) -> bool:
        """Whether states were added to a bucket's: its parameters may have been all of it."""
        assert bucket.layout is not None
        for index, param in enumerate(bucket.params):
            state = self._optimizer.state.get(param, {})
            loaded = {key for key, value in state.items() if isinstance(value, Loaded)}
            for key in loaded | self._movable(param, state).keys():
                if (index, key) not in bucket.layout.slots:
                    return True
        return False

    def _movable(self, param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """What moves of a parameter, by key: itself if it does, what has its shape of its state."""
        found = {PARAM: local_of(param)} if self._moves_param(param) else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                found[key] = local_of(value)
        return found


def _is_within(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return 0 <= tensor.data_ptr() - storage.data_ptr() < storage.nbytes()
