# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer keeps its tensors, and what is there meanwhile: `OptimizerPlaces`.

The tensors of a bucket have their places in the optimizer's `state`; a parameter that moves with
them is a place itself. A tensor without bytes (`state_placeholder.py`) takes the place of a state
that is away, and a parameter that is away is full of NaN.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.offload.errors import STATES_PREFIX
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Layout, Name
from megatron.offload.moving.placeholder import all_nan
from megatron.offload.states.lazy_state import LazyStateTensor
from megatron.offload.states.optimizer_slice import State
from megatron.offload.states.sharded import as_part_of, local_of, part_of
from megatron.offload.states.state_placeholder import is_placeholder, placeholder_for

logger = logging.getLogger(__name__)

PARAM = "the parameter itself"  # the key of one that moves; no optimizer has a state of this name


def typed_states_bytes(optimizer: torch.optim.Optimizer, own: torch.Tensor) -> int | None:
    """Bytes of a parameter's states if the optimizer chooses their types, not the parameter.

    Transformer Engine's FusedAdam does, for Megatron's precision-aware optimizer: exp_avg and
    exp_avg_sq are in fp32 or bf16, and main weights may be kept beside them.

    Args:
        optimizer: whose states.
        own: the parameter, or this rank's part of it.

    Returns:
        None if the optimizer names no types.
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
    local = [part_of(t) for t in tensors if t.shape == param.shape and t.dim()]
    if there := sum(t.nbytes for t in local if has_own_bytes(t)):
        return there
    if (typed_bytes := typed_states_bytes(optimizer, own)) is not None:
        return typed_bytes
    if "momentum" in group:
        return own.nbytes if group["momentum"] else 0
    return own.nbytes * (3 if group.get("amsgrad") else 2)


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one range of memory: no wrapper of others, and not sparse."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


class OptimizerPlaces:
    """The places of an optimizer's tensors.

    Args:
        optimizer: whose tensors.
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
        self._staying: set[str] = set()  # kinds of states that cannot move, once it was said

    def usual_bytes(self, param: torch.Tensor) -> int:
        """Bytes of the states that a parameter will have, and of itself if it moves."""
        groups = self._optimizer.param_groups
        if groups is not self._groups or id(param) not in self._group_of:
            self._groups = groups
            self._group_of = {id(one): group for group in groups for one in group["params"]}
        group = self._group_of.get(id(param), self._optimizer.defaults)
        states_bytes = usual_states_bytes(self._optimizer, group, param)
        return states_bytes + (part_of(param).nbytes if self._moves_param(param) else 0)

    def attach(self, bucket: Bucket, views: dict[Name, torch.Tensor]) -> None:
        """Gives the parameters of a bucket that move the bucket's memory."""
        for index, param in enumerate(bucket.params):
            view = views.get((index, PARAM))
            if view is not None:
                param.data = view

    def states_of(self, bucket: Bucket) -> dict[torch.Tensor, State]:
        """The values in the places of a bucket's states."""
        state = self._optimizer.state
        return {param: state[param] for param in bucket.params if state.get(param)}

    def states_with(
        self, bucket: Bucket, views: dict[Name, torch.Tensor]
    ) -> dict[torch.Tensor, State]:
        """A bucket's states, with its tensors instead of the ones without bytes.

        Raises:
            OffloadError: another tensor without values is in the place of one.
        """
        slots = {} if bucket.layout is None else bucket.layout.slots
        return {
            param: {
                key: as_part_of(param, views[index, key])
                if is_placeholder(value, slots.get((index, key)))
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
        """Copies a bucket's states into its memory, and puts tensors without bytes in their places.

        Args:
            bucket: in memory, or without bytes yet.
            states: of its parameters, by the optimizer's keys.
            views: the tensors of it that are in its memory already.
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
                if _is_within(one, bucket.storage):  # a view that the copies could overwrite
                    moved[name] = one.clone()
            bucket.layout.store(moved.items(), bucket.storage)
        self.leave(bucket, states)

    def leave(self, bucket: Bucket, states: dict[torch.Tensor, State]) -> None:
        """Puts tensors without bytes in the places of a bucket's tensors."""
        slots = {} if bucket.layout is None else bucket.layout.slots
        for index, param in enumerate(bucket.params):
            if param in states:
                homes = bucket.devices[index], self._device
                self._optimizer.state[param] = {
                    key: placeholder_for(slots[index, key], homes)
                    if (index, key) in slots
                    else value
                    for key, value in states[param].items()
                }
            if (index, PARAM) in slots:
                shape = slots[index, PARAM].shape
                param.data = all_nan(shape, param.dtype, bucket.devices[index])

    def sort_new(self, num_known: int) -> None:
        """Puts new states in the order of the optimizer's parameters instead of buckets.

        Checkpoints list states in the order in which the optimizer made them: by steps, and in a
        step by parameters.

        Args:
            num_known: number of states that were there before the step.
        """
        state = self._optimizer.state
        new = set(itertools.islice(state, num_known, None))
        for group in self._optimizer.param_groups if new else ():
            for param in [param for param in group["params"] if param in new]:
                state[param] = state.pop(param)

    def have_more(self, bucket: Bucket) -> bool:
        """Whether a bucket's parameters have states that the bucket does not have."""
        assert bucket.layout is not None
        for index, param in enumerate(bucket.params):
            state = self._optimizer.state.get(param, {})
            loaded = {key for key, value in state.items() if isinstance(value, LazyStateTensor)}
            for key in loaded | self._movable(param, state).keys():
                if (index, key) not in bucket.layout.slots:
                    return True
        return False

    def are_away(self, bucket: Bucket) -> bool:
        """Whether a tensor without bytes is in the place of a bucket's state."""
        assert bucket.layout is not None
        return any(
            is_placeholder(self._optimizer.state.get(bucket.params[index], {}).get(key), slot)
            for (index, key), slot in bucket.layout.slots.items()
        )

    def have_params(self, bucket: Bucket) -> bool:
        """Whether a parameter itself is in a bucket."""
        assert bucket.layout is not None
        return any(key == PARAM for _, key in bucket.layout.slots)

    def _movable(self, param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """What moves of a parameter, by key: itself if it does, and states of its shape."""
        found = {PARAM: local_of(param)} if self._moves_param(param) else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                local = local_of(value)
                if has_own_bytes(local):
                    found[key] = local
                else:
                    is_sparse = type(local) is torch.Tensor
                    self._say_stays(str(local.layout) if is_sparse else type(local).__name__)
        return found

    def _say_stays(self, kind: str) -> None:
        if kind not in self._staying:
            self._staying.add(kind)
            logger.warning(
                "%sstates of %s are tensors of the kind %s, which have no bytes of their own to "
                "move; they stay in memory",
                STATES_PREFIX,
                type(self._optimizer).__name__,
                kind,
            )


def _is_within(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return 0 <= tensor.data_ptr() - storage.data_ptr() < storage.nbytes()
