# SPDX-License-Identifier: Apache-2.0
"""What is in the places of a unit's parameters, and what others have put there: `Places`.

`unit.py` says which memory its parameters show, and asks here whether they still show it. Nothing
here moves a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.moving.placeholder import all_nan
from megatron.offload.parameters.away_parameter import Away, arrive, leave


class Part(NamedTuple):
    """A tensor that is some elements of a parameter: a distributed optimizer updates such shards.

    Attributes:
        tensor: of one dimension; where the parameter is, it is too.
        start: of its elements in the parameter, counted as in memory.
        end: behind them.
    """

    tensor: torch.Tensor
    start: int
    end: int

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """These elements of what the parameter shows."""
        return value.view(-1)[self.start : self.end]


class Places:
    """Where the parameters of a unit are.

    Args:
        params: of the unit.
        parts: of some of them, by their number.
        away: of those that are not in their places.

    Attributes:
        views: what they are in the unit's memory.
        is_attached: whether they show that.
        shown: what else they show, where their unit is shown to others.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], parts: Mapping[int, Part], away: Away
    ) -> None:
        self._params = params
        self._parts = parts
        self._away = away
        self.is_attached = False
        self.views: Sequence[torch.Tensor] = ()
        self.shown: Sequence[torch.Tensor] = ()
        self._nothing: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    def use(self, views: Sequence[torch.Tensor]) -> None:
        """The unit has other memory from now on."""
        self.views, self.is_attached = views, False
        # Something for each parameter alone, and never two elements in one place to write to.
        self._nothing = [all_nan(view.shape, view.dtype, view.device) for view in views]

    def attach(self) -> None:
        """They show the unit's memory."""
        self.give(self.views)
        self.is_attached, self.shown = True, ()

    def give(self, values: Sequence[torch.Tensor]) -> None:
        """They are these, and ordinary parameters."""
        self._put(values)
        for param in self._params:
            arrive(param)

    def show(self, values: Sequence[torch.Tensor]) -> None:
        """They show these to who touches them."""
        self.is_attached, self.shown = False, values  # first: an interrupt may end this half way
        for param in self._params:
            leave(param, self._away)
        self._put(values)

    def detach(self) -> None:
        """They show nothing; who touches one tells of it."""
        self.is_attached = False  # first: an interrupt may end this half way
        for param in self._params:
            leave(param, self._away)
        self._put(self._nothing)
        self.shown = ()

    def give_up(self) -> None:
        """Who touches those that show nothing finds that."""
        for param in self._params:
            arrive(param)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, value in zip(self._params, values, strict=True):
                param.data = value
            for index, part in self._parts.items():
                part.tensor.data = part.of(values[index])
        self._versions = self._versions_now()

    # -- What others have done ------------------------------------------------------------------

    @property
    def is_changed_in_place(self) -> bool:
        """Whether one was changed in place since it is there, as far as autograd sees it."""
        return self._versions_now() != self._versions

    def forget_changes(self) -> None:
        """What was changed in place until now counts."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        tensors = [*self._params, *(part.tensor for part in self._parts.values())]
        with torch._C.DisableTorchFunctionSubclass():
            return [tensor._version for tensor in tensors]

    @property
    def is_replaced(self) -> bool:
        """Whether one shows other memory than was put in its place, or in another way."""
        return bool(self._replaced() or self._replaced_parts())

    def held(self) -> list[torch.Tensor]:
        """What each of them holds; of those that show nothing, what the unit's memory has."""
        nothing = [_how(one) for one in self._nothing]
        with torch._C.DisableTorchFunctionSubclass():
            values = [param.detach() for param in self._params]
        return [
            view if _how(value) == none else value
            for value, view, none in zip(values, self.views, nothing, strict=True)
        ]

    def held_by_parts(self) -> dict[int, torch.Tensor]:
        """What parts hold that were replaced, by the number of their parameter."""
        return {index: self._parts[index].tensor.detach() for index in self._replaced_parts()}

    def part_in_memory(self, index: int) -> torch.Tensor:
        """What a part is in the unit's memory."""
        return self._parts[index].of(self.views[index])

    def _replaced(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            found = [_how(param) for param in self._params]
        return [i for i, how in enumerate(found) if how not in map(_how, self._own(i))]

    def _replaced_parts(self) -> list[int]:
        replaced = []
        for index, part in self._parts.items():
            starts = {
                # `_nothing` has one element, which all of it shows.
                one.data_ptr() + (0 if one.stride() != self.views[index].stride() else size)
                for one in self._own(index)
                for size in [part.start * one.dtype.itemsize]
            }
            if part.tensor.data_ptr() not in starts:
                replaced.append(index)
        return replaced

    def _own(self, index: int) -> list[torch.Tensor]:
        return [of[index] for of in (self.views, self.shown, self._nothing) if of]


def _how(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which memory a tensor shows, and how."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
