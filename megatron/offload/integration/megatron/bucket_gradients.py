# SPDX-License-Identifier: Apache-2.0
"""Gradients of a Megatron model's layers on the tiers of its parameters: `BucketGradients`.

Note [Megatron's buffer of gradients, in buckets]
DistributedDataParallel adds gradients up in one buffer, in buckets, and reduces each bucket over
ranks when all its gradients are complete. One buffer cannot be given back in parts. So each bucket
gets memory of its own. Places in a bucket stay Megatron's, and with them every sum and every norm:
all bits are the same.

Note [What a bucket does in a step]
Between steps it has no memory. The backward pass of the first of its units gives it some, full of
zeros, and Megatron adds to `main_grad` as usual. At the unit's end ranks begin to reduce what is
complete, by Megatron's own function, where its hooks have not begun already. They do so while the
next unit runs. Then this rank's part of the bucket, all of it without the distributed optimizer, is
copied to go to a tier, and the bucket's memory is given back. In the place of `main_grad` there is
an `OffloadedGradient`: Megatron's optimizer cuts its shard out of it and takes its norm as it would
of the gradient.

Note [What stays]
Buckets with parameters outside of layers are never given back. Of the others those gradients stay
that Megatron changes once all buckets are reduced, which are small: it sums up those of norms,
biases and routers over tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.errors import GRADIENTS_PREFIX, OffloadError
from megatron.offload.integration.megatron.bucket_group import (
    BucketGroup,
    BucketState,
    all_of,
    check_bucket,
    forget_shards,
    main_grad_of,
    move_bucket,
    set_main_grad,
)
from megatron.offload.integration.megatron.main_weights import MainWeights
from megatron.offload.integration.own_attributes import put
from megatron.offload.moving.bucket import Bucket
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.parameters.offloaded_gradient import OffloadedGradient, away
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.window import ParameterWindow
from megatron.offload.tiers.tier import Tier


class BucketGradients(Gradients):
    """Gradients of layers in Megatron's buckets, which leave when they are reduced.

    Args:
        model_chunks: wrapped in DistributedDataParallel.
        optimizers: Megatron's, of these chunks, none of which consists of others.
        parts: this rank's shards, by the model's parameters; empty without the distributed
            optimizer.
        window: has the units of parameters.

    Raises:
        ConfigurationError: gradients have another type than fp32.
    """

    _copies = True

    def __init__(
        self,
        model_chunks: Sequence[Any],
        optimizers: Sequence[Any],
        parts: Mapping[torch.Tensor, Part],
        window: ParameterWindow,
    ) -> None:
        self._updated: dict[torch.Tensor, _Updated] = {}  # by the model's parameters
        units: list[list[torch.Tensor]] = [[] for _ in window.units]
        for optimizer in optimizers:
            weights = MainWeights(optimizer)
            for group in optimizer.optimizer.param_groups:
                for own in group["params"]:
                    param = weights.model_param(own)
                    number = window.number_of(param)
                    if number is not None:
                        self._updated[param] = _Updated(own, parts.get(param))
                        units[number].append(own)
        super().__init__(units, window.tiers, window.device, window.live_units)
        self._model_params = {one.param: param for param, one in self._updated.items()}
        self._complete: set[torch.Tensor] = set()  # gradients of these parameters, in this step
        self._under_way: list[BucketGroup] = []  # ranks are reducing them
        self._undo = contextlib.ExitStack()
        groups = [group for chunk in model_chunks for group in all_of(chunk, "bucket_groups")]
        for group in groups:
            for bucket in group.buckets:
                check_bucket(bucket)
        self._groups = [
            BucketGroup(group, window.device)
            for group in groups
            if all(window.has(param) for param in group.params)
        ]
        for one in self._groups:
            finish = functools.partial(self._finish, one)
            self._undo.callback(put(one.group, "finish_grad_sync", finish))
        for chunk in model_chunks:
            for buffer in all_of(chunk, "buffers"):
                self._give_up(buffer)
        self._undo.callback(forget_shards, groups)
        forget_shards(groups)

    # -- While layers compute -------------------------------------------------------------------

    def _begin_backward(self, params: Sequence[torch.Tensor]) -> None:
        """Their buckets have memory.

        Raises:
            OffloadError: `zero_grad_buffer` has not been called since the last step.
        """
        for one in self._groups:
            if not one.places.keys().isdisjoint(params):
                one.begin()

    def _end_unit(self, params: Sequence[torch.Tensor]) -> None:
        """Begins to reduce what is complete; what began a unit ago leaves."""
        self._complete.update(params)
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            self._finish(one)
        for one in self._groups:
            if one.state is BucketState.IN_MEMORY and one.places.keys() <= self._complete:
                one.begin_to_reduce()
                self._under_way.append(one)

    def _finish(self, one: BucketGroup, *args: Any, **kwargs: Any) -> None:
        """Replaces a bucket group's `finish_grad_sync`: waits for the reduction, then offloads."""
        if one.state is BucketState.AWAY:
            return
        one.begin()  # if no backward pass came to it
        one.finish_to_reduce(*args, **kwargs)
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for param, gradient in one.places.items():
            if changes_later(param):
                set_main_grad(param, gradient.clone())
                continue
            set_main_grad(param, None)  # another rank has it
            if param in self._updated:
                own = self._updated[param]
                gradients[own.param] = own.cut(gradient)
        self._leave(gradients)
        self._note_peak()
        one.leave()

    def _stand_in(self, param: torch.Tensor, gradient: torch.Tensor, bucket: Bucket) -> None:
        # Megatron gives it to what it updates itself, when the optimizer's step begins.
        model_param = self._model_params[param]
        part = self._updated[model_param].part
        own = away(gradient, bucket, is_vector_norm=True)
        set_main_grad(
            model_param, own if part is None else own.within(model_param.shape, part.start)
        )

    def _zero(self, groups: Sequence[BucketGroup]) -> None:
        """Gradients of these are zero; those that are away are dropped."""
        for one in groups:
            one.zero()
            self._complete -= one.places.keys()
        self._under_way = [one for one in self._under_way if one not in groups]

    # -- Where they are -------------------------------------------------------------------------

    def tier_of(self, param: torch.Tensor) -> Tier | None:
        """Where a gradient, or this rank's part of it, is to wait.

        Args:
            param: of the model.
        """
        moves = param in self._updated and any(param in one.places for one in self._groups)
        return self._tiers[0] if moves and not changes_later(param) else None

    @property
    def memory_bytes(self) -> int:
        """Bytes of these gradients that are in memory now."""
        return super().memory_bytes + sum(one.memory_bytes for one in self._groups)

    def bring(self) -> None:
        """Reads all gradients back into `main_grad`, until the optimizer's step.

        Raises:
            LostStateError: one could not be read back.
        """
        for one in self._groups:
            if one.state is not BucketState.AWAY:
                continue
            found = {param: main_grad_of(param) for param in one.places}
            one.zero()
            one.begin()
            for param, gradient in found.items():
                target = one.places[param]
                if isinstance(gradient, OffloadedGradient) and gradient.bucket is not None:
                    own = self._updated[param]
                    own.param.grad = own.cut(gradient)
                    self._bring(own.param)
                    own.cut(target).copy_(own.param.grad)
                    own.param.grad = None
                elif type(gradient) is torch.Tensor:
                    target.copy_(gradient)

    def close(self, *, restore: bool) -> None:
        """Gives Megatron one buffer again; as `Gradients.close`."""
        try:
            super().close(restore=restore)
        finally:
            self._undo.close()

    def _give_up(self, buffer: Any) -> None:
        """Frees a buffer's memory: its buckets have their own."""
        moving = {id(bucket): one for one in self._groups for bucket in one.group.buckets}
        staying = [bucket for bucket in buffer.buckets if id(bucket) not in moving]
        for bucket in staying:
            move_bucket(bucket, bucket.grad_data.clone())
        groups = list({moving[id(one)]: None for one in buffer.buckets if id(one) in moving})

        def zero() -> None:
            for bucket in staying:
                bucket.grad_data.zero_()
            self._zero(groups)

        def take_up() -> None:
            whole = torch.zeros(
                buffer.numel, dtype=buffer.grad_data.dtype, device=buffer.grad_data.device
            )
            for bucket in buffer.buckets:
                one = moving.get(id(bucket))
                own = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                if one is None or one.state is BucketState.IN_MEMORY:
                    own.copy_(bucket.grad_data)
                else:
                    one.zero()
                move_bucket(bucket, own)
            buffer.grad_data = whole

        buffer.grad_data = _InBuckets(buffer.grad_data, zero)
        self._undo.callback(take_up)


class _Updated(NamedTuple):
    """What an optimizer updates for a parameter of the model.

    Attributes:
        param: the model's, or another one in its place.
        part: of the model's that it is; None: all of it.
    """

    param: torch.Tensor
    part: Part | None

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """Its elements of the whole parameter's gradient, as Megatron cuts them out."""
        if self.part is None:
            return gradient
        return gradient.view(-1)[self.part.start : self.part.end]


class _InBuckets:
    """Takes the place of a buffer's `grad_data`, whose memory is freed.

    Args:
        gradients: in its place before.
        zero: has all gradients of the buffer be zero.
    """

    def __init__(self, gradients: torch.Tensor, zero: Callable[[], None]) -> None:
        self.dtype, self.device = gradients.dtype, gradients.device
        self._zero = zero

    def zero_(self) -> None:
        """What Megatron's `zero_grad_buffer` does."""
        self._zero()

    def __imul__(self, factor: object) -> _InBuckets:
        raise OffloadError(
            f"{GRADIENTS_PREFIX}scale_gradients of Megatron's DistributedDataParallel was called "
            "when they were on a tier; with --gradient-offload on scale the loss instead"
        )


def changes_later(param: torch.Tensor) -> bool:
    """Whether Megatron changes a gradient once all are reduced."""
    names = ("sequence_parallel", "average_gradients_across_tp_domain")
    return param.dim() < 2 or any(getattr(param, name, False) for name in names)
