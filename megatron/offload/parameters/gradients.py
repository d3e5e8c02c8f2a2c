# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers between their unit's backward pass and the optimizer's step: `Gradients`.

In a layer-major step the gradients of a unit's layers are complete when its backward pass has run
for all micro-batches. Then they are offloaded. Each comes back once, when the optimizer updates its
parameter, and is dropped after that.

Note [What leaves, and who owns it]
A large gradient moves by itself, small gradients of a unit move together: both are a `Bucket`. An
`OffloadedGradient` takes the place of each gradient that is away, and only these refer to the
bucket. So `zero_grad` frees the bucket's bytes as well, in memory and on the tier. If no tier has
room for a bucket, it stays in memory until then.

Note [How much is in memory]
While the gradients of one unit are computed, those of the previous unit are written; compute waits
for these writes before it offloads more. In the optimizer's step, reads ahead fill no more memory
than `live_units` units of parameters take.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import GRADIENTS_PREFIX, OffloadError
from megatron.offload.machine.allocator import return_freed_memory
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Layout, dense_stride
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.offloaded_gradient import OffloadedGradient, away, bucket_of
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import TRANSFER_ERRORS

_KEY = "grad"  # in the names of a layout
ALONE_BYTES = 1 << 20  # a gradient of this size or more is a bucket by itself


class Gradients:
    """Offloads gradients of units of layers when they are complete.

    Args:
        units: parameters of the layers, in the order in which the layers run.
        tiers: where gradients go; a bucket goes to the first that has room. The caller closes them.
        device: where layers compute.
        live_units: units whose gradients may be in memory in the optimizer's step.

    Attributes:
        copies: brings buckets and puts them away.
        peak_bytes: the most gradient bytes in memory, measured when a unit's gradients are complete
            and when the optimizer updates parameters.
    """

    _copies = False  # whether to copy gradients, because their owner needs their memory again

    def __init__(
        self,
        units: Sequence[Sequence[torch.Tensor]],
        tiers: Sequence[Tier],
        device: Device,
        live_units: int,
    ) -> None:
        self.peak_bytes = 0
        self._units = [list(params) for params in units]
        self._numbers = {id(p): n for n, params in enumerate(self._units) for p in params}
        self._tiers = tiers
        self._device = device
        sizes = [sum(param.nbytes for param in params) for params in self._units]
        self._live_bytes = live_units * max(sizes)
        self._buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()
        self.copies = OnlyCopy(GRADIENTS_PREFIX, tiers, device, self._buckets, self._name)
        self._in_layer_major = False
        self._at, self._direction = 0, 1  # the unit that was updated last, and the order of updates

    def has(self, param: torch.Tensor) -> bool:
        """Whether a parameter's gradient may leave."""
        return id(param) in self._numbers

    # -- While layers compute -------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, params: Iterable[torch.Tensor], *, is_last: bool) -> Iterator[None]:
        """A context around a backward pass of a unit.

        Args:
            params: whose gradients are complete after the last pass. Gradients that are away since
                an earlier step are read back: the pass adds to them.
            is_last: whether this is the last micro-batch.

        Raises:
            LostStateError: a gradient could not be read back.
            OffloadError: the optimizer has used them, and zero_grad() was not called since.
        """
        params = list(params)
        self._begin_backward(params)
        self._in_layer_major = True
        try:
            yield
        finally:
            self._in_layer_major = False
        if is_last:
            self._end_unit(params)

    def _begin_backward(self, params: Sequence[torch.Tensor]) -> None:
        """Brings back the gradients that are away, so that the pass can add to them."""
        for param in [param for param in params if self.has(param)]:
            if isinstance(param.grad, OffloadedGradient) and param.grad.bucket is None:
                raise OffloadError(
                    f"{GRADIENTS_PREFIX}a backward pass would add to gradients that the "
                    "optimizer's step has used and dropped; call zero_grad() after the step"
                )
            self._bring(param)

    def _end_unit(self, params: Sequence[torch.Tensor]) -> None:
        """The gradients of a unit are complete: offloads them."""
        own = [param for param in params if self.has(param)]
        self._leave({param: param.grad for param in own if _is_whole(param.grad)})

    def check_is_told(self) -> None:
        """Raises OffloadError if a backward pass of layers runs outside of a layer-major step."""
        if not self._in_layer_major:
            raise OffloadError(
                f"{GRADIENTS_PREFIX}a backward pass of layers ran outside of a layer-major step, "
                "so it is not known when gradients are complete; run steps with LayerMajor, or "
                "leave --gradient-offload off"
            )

    def _leave(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Offloads complete gradients."""
        self._note_peak()
        with self.copies.waiting():
            for bucket in list(self._buckets):  # of the unit before
                bucket.wait_for_write()
        if self._device.is_host:
            return_freed_memory()  # the allocator could not reuse much of it for the next unit
        small: dict[torch.Tensor, torch.Tensor] = {}
        for param, gradient in gradients.items():
            if gradient.nbytes >= ALONE_BYTES:
                self._put_away({param: gradient})
            else:
                small[param] = gradient
        if small:
            self._put_away(small)

    def _put_away(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Starts to write the gradients of some parameters as one bucket."""
        tensors = {(i, _KEY): gradient for i, gradient in enumerate(gradients.values())}
        layout = Layout(tensors)
        if len(tensors) == 1 and not self._copies:
            storage = tensors[0, _KEY].untyped_storage()
        else:
            storage = layout.new_storage(self._device.device)
            layout.store(tensors.items(), storage)
        bucket = Bucket(list(gradients), self._device, self.copies.ended)
        bucket.fill(layout, storage)
        if not self.copies.put_away(bucket):
            self.copies.warn_of_refused("until the optimizer's step")
        self._buckets.add(bucket)
        for param, gradient in gradients.items():
            self._stand_in(param, gradient, bucket)

    def _stand_in(self, param: torch.Tensor, gradient: torch.Tensor, bucket: Bucket) -> None:
        """Puts an `OffloadedGradient` in the place of a gradient that has left."""
        param.grad = away(gradient, bucket)

    def _name(self, bucket: Bucket) -> str:
        number = self._numbers.get(id(bucket.params[0]), -1)
        return f"unit {number + 1} of {len(self._units)}"

    # -- While the optimizer steps --------------------------------------------------------------

    def begin_reads(self, params: Iterable[torch.Tensor]) -> None:
        """The optimizer needs these now: starts to read them, and reads ahead in its order."""
        own = [param for param in params if id(param) in self._numbers]
        for param in own:
            self._begin_read(param)
        if not own:
            return
        at = self._numbers[id(own[-1])]
        if at != self._at:
            self._at, self._direction = at, 1 if at > self._at else -1
        for number in (at, at + self._direction):
            for param in self._units[number] if 0 <= number < len(self._units) else ():
                bucket = bucket_of(param)
                if bucket is not None and bucket.where is Where.ON_TIER:
                    if self.memory_bytes + bucket.num_bytes > self._live_bytes:
                        return
                    self._begin_read(param)

    @contextlib.contextmanager
    def used(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """A context around the update of some parameters: brings their gradients, then drops them.

        Raises:
            LostStateError: a gradient could not be read back.
        """
        own = [param for param in params if id(param) in self._numbers]
        were_away = {param for param in own if bucket_of(param) is not None}
        for param in own:
            self._bring(param)
        self._note_peak()
        yield
        for param in own:
            if param.grad is not None and (param in were_away or _is_whole(param.grad)):
                param.grad = away(param.grad, None)

    def bring(self) -> None:
        """Brings all gradients to memory, until the optimizer's step.

        Raises:
            LostStateError: a gradient could not be read back.
        """
        for params in self._units:
            for param in params:
                self._bring(param)

    def _begin_read(self, param: torch.Tensor) -> None:
        bucket = bucket_of(param)
        if bucket is not None and bucket.where is Where.ON_TIER:
            with contextlib.suppress(*TRANSFER_ERRORS):  # `_bring` reads again and reports
                bucket.begin_read()

    def _bring(self, param: torch.Tensor) -> None:
        """Puts a parameter's gradient in its place, and all gradients of the same bucket."""
        bucket = bucket_of(param)
        if bucket is None:
            return
        bucket.take_back()
        if bucket.where is Where.IN_MEMORY:
            bucket.use_here()  # Ctrl-C may have come before
        else:
            with self.copies.waiting():
                self.copies.bring(bucket)
        views = bucket.views
        for index, one in enumerate(bucket.params):
            away, view = one.grad, views[index, _KEY]
            if isinstance(away, OffloadedGradient) and away.bucket is bucket:
                one.grad = away.brought(view if len(views) == 1 else view.clone())
        self._buckets.discard(bucket)

    # -- Where they are -------------------------------------------------------------------------

    def tier_of(self, param: torch.Tensor) -> Tier | None:
        """The tier with a gradient's bytes; before there is a gradient, the tier it will go to."""
        if not self.has(param):
            return None
        bucket = bucket_of(param)
        if bucket is not None:
            return bucket.tier
        is_there = param.grad is not None and not isinstance(param.grad, OffloadedGradient)
        return None if is_there else self._tiers[0]

    @property
    def memory_bytes(self) -> int:
        """Bytes of these gradients that are in memory now."""
        there = 0
        for params in self._units:
            for param in params:
                if param.grad is not None and not isinstance(param.grad, OffloadedGradient):
                    there += param.grad.nbytes
        return there + self.copies.memory_bytes

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes)

    def close(self, *, restore: bool) -> None:
        """Ends the offload of gradients. Call it before the tiers are closed.

        Args:
            restore: first brings all gradients back; else those that are away are lost.

        Raises:
            LostStateError: some gradients could not be read back.
        """
        try:
            if restore:
                self.bring()
        finally:
            for params in self._units:
                for param in params:
                    if isinstance(param.grad, OffloadedGradient):
                        param.grad = None
            self._units = []


def _is_whole(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether dropping a gradient frees its memory: it is not a part of a larger storage."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.nbytes > 0
        and gradient.stride() == dense_stride(gradient)
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
