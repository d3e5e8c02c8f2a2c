# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers between their unit's backward pass and the optimizer's step: `Gradients`.

In a layer-major step the gradients of a unit's layers are complete when its backward pass has run
for all micro-batches. Then they leave, and each comes back once, when the optimizer updates its
parameter; behind that it is dropped.

Note [What leaves, and who owns it]
A large gradient leaves as it is, small ones of a unit are packed together: a piece (`Bucket`). In
the place of a gradient that is away there is an `AwayGradient`, and it alone refers to the piece.
So `zero_grad` drops the bytes with it, memory and space on the tier, wherever they are. A piece
that no tier takes has its memory until then.

Note [How much is in memory]
While one unit's gradients are made, those of the unit before are written; compute waits for these
before it hands over more. In the optimizer's step what is read ahead takes no more than the
parameters' window lets live of units.
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
from megatron.offload.parameters.away_gradient import AwayGradient, away, piece_of
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import TRANSFER_ERRORS

_KEY = "grad"  # in the names of a layout
ALONE_BYTES = 1 << 20  # a gradient that is as large is a piece by itself


class Gradients:
    """Gradients of units of layers, which leave when they are complete.

    Args:
        units: parameters of the layers, in the order in which these run.
        tiers: where gradients go; the first that takes a piece has it. Not closed here.
        device: where layers compute.
        live_units: that may be in memory in the optimizer's step.

    Attributes:
        copies: brings pieces and puts them away.
        peak_bytes: the most of them in memory, looked at when a unit's are complete and when the
            optimizer updates parameters.
    """

    _copies = False  # whether the memory of gradients is somebody else's, who wants to have it back

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
        self._pieces: weakref.WeakSet[Bucket] = weakref.WeakSet()
        self.copies = OnlyCopy(GRADIENTS_PREFIX, tiers, device, self._pieces, self._name)
        self._in_layer_major = False
        self._at, self._direction = 0, 1  # the unit that was updated last, and where to from there

    def has(self, param: torch.Tensor) -> bool:
        """Whether a parameter's gradient may leave."""
        return id(param) in self._numbers

    # -- While layers compute -------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, params: Iterable[torch.Tensor], *, is_last: bool) -> Iterator[None]:
        """Around a backward pass of a unit.

        Args:
            params: whose gradients are complete behind the last pass. Those that are away from a
                step before come back: they are added to.
            is_last: of the micro-batches.

        Raises:
            LostStateError: one could not be read back.
            OffloadError: an optimizer has used them, and nobody has said that they are zero now.
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
        """What is away is there again, to be added to."""
        for param in [param for param in params if self.has(param)]:
            if isinstance(param.grad, AwayGradient) and param.grad.piece is None:
                raise OffloadError(
                    f"{GRADIENTS_PREFIX}a backward pass would add to gradients that the "
                    "optimizer's step has used and dropped; call zero_grad() after the step"
                )
            self._bring(param)

    def _end_unit(self, params: Sequence[torch.Tensor]) -> None:
        """Gradients of a unit are complete."""
        own = [param for param in params if self.has(param)]
        self._leave({param: param.grad for param in own if _is_whole(param.grad)})

    def check_is_told(self) -> None:
        """Raises OffloadError where a backward pass of layers runs that nobody has told of."""
        if not self._in_layer_major:
            raise OffloadError(
                f"{GRADIENTS_PREFIX}a backward pass of layers ran that is no part of a "
                "layer-major step, so nobody knows when gradients are complete; run steps with "
                "LayerMajor, or leave --gradient-offload off"
            )

    def _leave(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """These are complete: they go to the tiers.

        Args:
            gradients: by parameter.
        """
        self._note_peak()
        with self.copies.waiting():
            for piece in list(self._pieces):  # of the unit before
                piece.wait_for_write()
        if self._device.is_host:
            return_freed_memory()  # an allocator keeps much of what it cannot use for the next unit
        small: dict[torch.Tensor, torch.Tensor] = {}
        for param, gradient in gradients.items():
            if gradient.nbytes >= ALONE_BYTES:
                self._put_away({param: gradient})
            else:
                small[param] = gradient
        if small:
            self._put_away(small)

    def _put_away(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Starts to write the gradients of some parameters as one piece."""
        tensors = {(i, _KEY): gradient for i, gradient in enumerate(gradients.values())}
        layout = Layout(tensors)
        if len(tensors) == 1 and not self._copies:
            storage = tensors[0, _KEY].untyped_storage()
        else:
            storage = layout.new_storage(self._device.device)
            layout.store(tensors.items(), storage)
        piece = Bucket(list(gradients), self._device, self.copies.ended)
        piece.fill(layout, storage)
        if not self.copies.put_away(piece):
            self.copies.warn_of_refused("until the optimizer's step")
        self._pieces.add(piece)
        for param, gradient in gradients.items():
            self._stand_in(param, gradient, piece)

    def _stand_in(self, param: torch.Tensor, gradient: torch.Tensor, piece: Bucket) -> None:
        """Puts something in the place of a gradient that has left."""
        param.grad = away(gradient, piece)

    def _name(self, piece: Bucket) -> str:
        number = self._numbers.get(id(piece.params[0]), -1)
        return f"unit {number + 1} of {len(self._units)}"

    # -- While the optimizer steps --------------------------------------------------------------

    def begin_reads(self, params: Iterable[torch.Tensor]) -> None:
        """These are needed now: starts to bring them, and reads ahead in the step's direction."""
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
                piece = piece_of(param)
                if piece is not None and piece.where is Where.ON_TIER:
                    if self.memory_bytes + piece.num_bytes > self._live_bytes:
                        return
                    self._begin_read(param)

    @contextlib.contextmanager
    def used(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around the update of some parameters: has their gradients in memory, and drops them.

        Raises:
            LostStateError: one could not be read back.
        """
        own = [param for param in params if id(param) in self._numbers]
        were_away = {param for param in own if piece_of(param) is not None}
        for param in own:
            self._bring(param)
        self._note_peak()
        yield
        for param in own:
            if param.grad is not None and (param in were_away or _is_whole(param.grad)):
                param.grad = away(param.grad, None)

    def bring(self) -> None:
        """Has all gradients in memory, until the optimizer's step.

        Raises:
            LostStateError: one could not be read back.
        """
        for params in self._units:
            for param in params:
                self._bring(param)

    def _begin_read(self, param: torch.Tensor) -> None:
        piece = piece_of(param)
        if piece is not None and piece.where is Where.ON_TIER:
            with contextlib.suppress(*TRANSFER_ERRORS):  # `_bring` tries again, and says so
                piece.begin_read()

    def _bring(self, param: torch.Tensor) -> None:
        """Has a parameter's gradient in its place, and those that are in one piece with it."""
        piece = piece_of(param)
        if piece is None:
            return
        piece.take_back()
        if piece.where is not Where.IN_MEMORY:
            with self.copies.waiting():
                self.copies.bring(piece)
        views = piece.views
        for index, one in enumerate(piece.params):
            away, view = one.grad, views[index, _KEY]
            if isinstance(away, AwayGradient) and away.piece is piece:
                one.grad = away.brought(view if len(views) == 1 else view.clone())
        self._pieces.discard(piece)

    # -- Where they are -------------------------------------------------------------------------

    def tier_of(self, param: torch.Tensor) -> Tier | None:
        """Which has a gradient's bytes; of one that is not there yet, where it is to wait."""
        if not self.has(param):
            return None
        piece = piece_of(param)
        if piece is not None:
            return piece.tier
        is_there = param.grad is not None and not isinstance(param.grad, AwayGradient)
        return None if is_there else self._tiers[0]

    @property
    def memory_bytes(self) -> int:
        """Bytes of these gradients that are in memory now."""
        there = 0
        for params in self._units:
            for param in params:
                if param.grad is not None and not isinstance(param.grad, AwayGradient):
                    there += param.grad.nbytes
        return there + self.copies.memory_bytes

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes)

    def close(self, *, restore: bool) -> None:
        """Ends it, before the tiers.

        Args:
            restore: brings all gradients back before; else those that are away are gone.

        Raises:
            LostStateError: some could not be read back.
        """
        try:
            if restore:
                self.bring()
        finally:
            for params in self._units:
                for param in params:
                    if isinstance(param.grad, AwayGradient):
                        param.grad = None
            self._units = []


def _is_whole(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether memory is given back when a gradient is: it is no part of something larger."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.nbytes > 0
        and gradient.stride() == dense_stride(gradient)
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
