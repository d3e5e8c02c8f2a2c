# SPDX-License-Identifier: Apache-2.0
"""Buckets of Megatron's gradients in memory that comes and goes: `BucketGroup`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import GRADIENTS_PREFIX, ConfigurationError, OffloadError
from megatron.offload.moving.memory import open_staying_memory

_GRADIENT = "main_grad"  # of a parameter of Megatron's


class BucketState(enum.Enum):
    """Where the gradients of a group of buckets are. Members name the transitions into them."""

    NOWHERE = "nowhere"  # at first; `zero`
    IN_MEMORY = "in memory"  # `begin` from NOWHERE; Megatron adds to them and reduces them
    AWAY = "away"  # `leave` from IN_MEMORY: they have been reduced


class BucketGroup:
    """Some buckets that Megatron reduces together, in memory that comes and goes.

    Attributes:
        places: of the gradients, by the model's parameters; valid for good.
        state: where the gradients are.
    """

    def __init__(self, group: Any, device: Device) -> None:
        self.group = group
        self.state = BucketState.NOWHERE
        self.places: dict[torch.Tensor, torch.Tensor] = {}
        self._device = device
        self._memory = []
        self._finish = group.finish_grad_sync
        for bucket in group.buckets:
            memory = open_staying_memory(bucket.grad_data.nbytes, device)
            whole = torch.empty(0, dtype=bucket.grad_data.dtype, device=device.device)
            whole.set_(memory.storage, 0, bucket.grad_data.shape, (1,))
            move_bucket(bucket, whole)
            self.places |= {param: main_grad_of(param) for param in bucket.params_list}
            memory.release()
            self._memory.append(memory)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes now."""
        if self.state is not BucketState.IN_MEMORY:
            return 0
        return sum(bucket.grad_data.nbytes for bucket in self.group.buckets)

    def begin(self) -> None:
        """Takes memory; at first gradients are zero.

        Raises:
            OffloadError: they have left, and `zero_grad_buffer` has not been called since.
        """
        if self.state is BucketState.IN_MEMORY:
            return
        if self.state is BucketState.AWAY:
            raise OffloadError(
                f"{GRADIENTS_PREFIX}a backward pass would add to gradients that have been reduced; "
                "call zero_grad_buffer() of the model before each step's first one"
            )
        for memory, bucket in zip(self._memory, self.group.buckets, strict=True):
            memory.for_read()
            self._device.use_after(memory.storage, [self._device.restored_is_free()])
            bucket.grad_data.zero_()
        self.state = BucketState.IN_MEMORY

    def begin_to_reduce(self) -> None:
        """Their sums are complete on this rank."""
        if self.group.grad_reduce_handle is None:
            self.group.start_grad_sync()

    def finish_to_reduce(self, *args: Any, **kwargs: Any) -> None:
        """Waits until they are reduced; with the arguments of Megatron's `finish_grad_sync`."""
        self._finish(*args, **kwargs)

    def leave(self) -> None:
        """Gives the memory back; the caller has taken what is in it."""
        self.state = BucketState.AWAY
        for memory in self._memory:
            memory.release()

    def zero(self) -> None:
        """They are zero, and take no memory."""
        if self.state is BucketState.IN_MEMORY:
            self.leave()
        self.state = BucketState.NOWHERE
        for param, place in self.places.items():
            set_main_grad(param, place)


def main_grad_of(param: torch.Tensor) -> Any:
    """What stands in the place of a parameter's gradient."""
    return getattr(param, _GRADIENT)


def set_main_grad(param: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Puts something there; None: nothing, because this rank does not update the parameter."""
    setattr(param, _GRADIENT, gradient)


def move_bucket(bucket: Any, whole: torch.Tensor) -> None:
    """Puts a bucket into other memory, without copying its contents."""
    start = bucket.grad_data.storage_offset()
    for param in bucket.params_list:
        place = main_grad_of(param).storage_offset() - start
        set_main_grad(param, whole[place : place + param.numel()].view(param.shape))
    bucket.grad_data = whole


def forget_shards(groups: Sequence[Any]) -> None:
    """Makes Megatron find its shards of buckets anew: its cached ones are in the former memory."""
    for group in groups:
        group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


def count_anew(chunk: Any) -> None:
    """Has DistributedDataParallel learn anew how often a step adds to each gradient.

    It counts in its first step, and in later ones reduces a bucket as soon as it has counted as
    many. A layer-major step adds to a parameter once for each unit that uses it.

    Args:
        chunk: a model chunk; nothing is done where it is not wrapped.
    """
    if not hasattr(chunk, "bucket_groups"):
        return
    for group in all_of(chunk, "bucket_groups"):
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}


def check_bucket(bucket: Any) -> None:
    """Raises ConfigurationError where gradients have another type than fp32."""
    if bucket.grad_data.dtype is not torch.float32:
        raise ConfigurationError(
            f"{GRADIENTS_PREFIX}with --gradient-offload on Megatron's gradients must be fp32; "
            f"these are {bucket.grad_data.dtype}; drop --grad-reduce-in-bf16"
        )


def all_of(chunk: Any, name: str) -> list[Any]:
    """Of a chunk wrapped in DistributedDataParallel, and of its experts: buffers, bucket groups."""
    return [*getattr(chunk, name), *getattr(chunk, f"expert_parallel_{name}")]
