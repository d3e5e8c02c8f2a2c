# SPDX-License-Identifier: Apache-2.0
"""What the parameters of a unit show, and what other code has assigned: `ParameterPlaces`.

`unit.py` chooses the memory that its parameters show, and asks here whether they still show it.
This file moves no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.moving.placeholder import all_nan
from megatron.offload.parameters.offloaded_parameter import Away, arrive, leave, watch


class Part(NamedTuple):
    """A tensor that is some elements of a parameter: a distributed optimizer updates such shards.

    Attributes:
        tensor: of one dimension; it shows its elements of whatever memory the parameter shows.
        start: index of its first element in the parameter, in memory order.
        end: index after its last element.
    """

    tensor: torch.Tensor
    start: int
    end: int

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """These elements of a value of the parameter."""
        return value.view(-1)[self.start : self.end]


class ParameterPlaces:
    """What the parameters of a unit show.

    Args:
        params: of the unit.
        parts: of some of them, by the parameter's number.
        away: what parameters share that are not in their places.

    Attributes:
        views: the parameters in the unit's memory.
        is_attached: whether the parameters show these views.
        shown: the other values that they show, while the unit is shown to a script.
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
        self._read: list[torch.Tensor] = []  # through `param.data`, since `_versions`

    def use(self, views: Sequence[torch.Tensor]) -> None:
        """The unit has other memory from now on: these views."""
        self.views, self.is_attached = views, False
        # One tensor for each parameter, because two parameters must not share an element to write.
        self._nothing = [all_nan(view.shape, view.dtype, view.device) for view in views]

    def attach(self) -> None:
        """The parameters show the unit's memory."""
        self.give(self.views)
        self.is_attached, self.shown = True, ()

    def watch(self) -> None:
        """A layer computes with attached parameters: Note [Written through data] has them watched.

        (`offloaded_parameter.py` has the note.)
        """
        for param in self._params:
            watch(param, self._read)

    def end_watch(self) -> None:
        """Attached parameters are plain ones again; changes through `param.data` are not seen."""
        for param in self._params:
            arrive(param)

    def give(self, values: Sequence[torch.Tensor]) -> None:
        """The parameters are ordinary parameters again, with these values."""
        self._put(values)
        self.end_watch()

    def show(self, values: Sequence[torch.Tensor]) -> None:
        """The parameters show these values to any code that uses them."""
        self.is_attached, self.shown = False, values  # first: Ctrl-C may end this method half way
        for param in self._params:
            leave(param, self._away)
        self._put(values)

    def detach(self) -> None:
        """The parameters show no values; a use of one is noticed (`offloaded_parameter.py`)."""
        self.is_attached = False  # first: Ctrl-C may end this method half way
        for param in self._params:
            leave(param, self._away)
        self._put(self._nothing)
        self.shown = ()

    def give_up(self) -> None:
        """The values are lost: a use of such a parameter finds NaN."""
        if self.shown:  # of a file that fails: a use would end the process
            self._put(self._nothing)
        for param in self._params:
            arrive(param)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, value in zip(self._params, values, strict=True):
                param.data = value
            for index, part in self._parts.items():
                part.tensor.data = part.of(values[index])
        self.forget_changes()

    # -- What other code has done --------------------------------------------------------------

    @property
    def is_changed_in_place(self) -> bool:
        """Whether one was changed in place since it was attached, as autograd's versions tell."""
        return self._versions_now() != self._versions or any(map(_is_written, self._read))

    @property
    def are_all_changed(self) -> bool:
        """Whether each was changed in place or replaced since it was put in its place."""
        changes = zip(self._versions_now(), self._versions, strict=True)
        changed = {i for i, (now, before) in enumerate(changes) if now != before}
        return changed.issuperset(set(range(len(self._params))).difference(self._replaced()))

    def forget_changes(self) -> None:
        """Takes the present versions as unchanged."""
        self._versions = self._versions_now()
        self._read.clear()

    def _versions_now(self) -> list[int]:
        tensors = [*self._params, *(part.tensor for part in self._parts.values())]
        with torch._C.DisableTorchFunctionSubclass():
            return [tensor._version for tensor in tensors]

    @property
    def is_replaced(self) -> bool:
        """Whether a parameter shows other memory than was put in its place, or in another way."""
        return bool(self._replaced() or self._replaced_parts())

    def held(self) -> list[torch.Tensor]:
        """The values of all parameters; of one that was not replaced, the unit's memory."""
        with torch._C.DisableTorchFunctionSubclass():
            values = [param.detach() for param in self._params]
        replaced = self._replaced()
        return [values[i] if i in replaced else view for i, view in enumerate(self.views)]

    def held_by_parts(self) -> dict[int, torch.Tensor]:
        """The values of parts that other code replaced, by the number of their parameter."""
        return {index: self._parts[index].tensor.detach() for index in self._replaced_parts()}

    def part_in_memory(self, index: int) -> torch.Tensor:
        """A part's view of the unit's memory."""
        return self._parts[index].of(self.views[index])

    def _replaced(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            found = [_how(param) for param in self._params]
        return [i for i, how in enumerate(found) if how not in map(_how, self._own(i))]

    def _replaced_parts(self) -> list[int]:
        replaced = []
        for index, part in self._parts.items():
            starts = {
                # `_nothing` has a single element, which all of its indices show.
                one.data_ptr() + (0 if one.stride() != self.views[index].stride() else size)
                for one in self._own(index)
                for size in [part.start * one.dtype.itemsize]
            }
            if part.tensor.data_ptr() not in starts:
                replaced.append(index)
        return replaced

    def _own(self, index: int) -> list[torch.Tensor]:
        return [of[index] for of in (self.views, self.shown, self._nothing) if of]


def _is_written(read: torch.Tensor) -> bool:
    """Whether a tensor was written to that `param.data` has returned."""
    return read.is_inference() or read._version > 0


def _how(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which memory a tensor shows, and how."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
