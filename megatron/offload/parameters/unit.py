# SPDX-License-Identifier: Apache-2.0
"""The parameters of a unit of layers, which are swapped out and in together: `ParameterUnit`.

Note [A storage that stays]
Autograd saves a weight in forward and uses it in backward, and meanwhile the unit has been away. So
a unit's parameters have one storage object for good, and only the memory behind it is freed and
allocated again: `moving/memory.py`. Saved views hold the storage, not the bytes.

Note [What others change]
A parameter is in its place while its layer computes, while the optimizer updates it, and from any
use of it until the next of these (`offloaded_parameter.py`). At other times a tensor without bytes
is in its place. So a script, a trainer or a library only changes it while it is in its place.
Before the parameter leaves, the unit compares it with what it put there: another version means a
change in place, other memory means that it was replaced. A layer that writes to its own parameters
through `param.data` is noticed otherwise (`offloaded_parameter.py`). Then the unit takes new memory
for the new values. A script that has kept the old memory (to put it back after an average of the
weights was used) finds it unchanged.

Note [Hooks of gradients]
An optimizer that steps within the backward pass does so in hooks of gradients, and may write
through `param.data`, whose versions are its own (LOMO does). So a unit whose parameters have such
hooks, other than ours, counts as changed by each backward pass of its layers.

Note [Leaving a device]
The host runs ahead of a device, and must: while it launches a layer, the device computes those
before. So `put_away` waits for nothing. Memory is released while kernels that use it are queued,
and the next unit gets it; the copy into it waits for them on the device (`Device.refill_after`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import PARAMETERS_PREFIX, LostStateError, OffloadError
from megatron.offload.moving.layout import Layout
from megatron.offload.moving.memory import open_staying_memory
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Ended, MovingStorage, Where
from megatron.offload.parameters.handed_out import HandedOut
from megatron.offload.parameters.offloaded_parameter import Away
from megatron.offload.parameters.parameter_places import ParameterPlaces, Part

_KEY = "param"  # in the names of a layout
_OURS = "megatron.offload."


def _has_hooks(param: torch.Tensor) -> bool:
    """Whether other code listens to a parameter's gradient; see Note [Hooks of gradients]."""
    kinds = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
    found = (hook for hooks in kinds if hooks for hook in hooks.values())
    return any(not str(getattr(one, "__module__", "")).startswith(_OURS) for one in found)


def can_take_place(one: torch.device | str, other: torch.device | str) -> bool:
    """Whether a tensor of one device may become `param.data` of the other, as with CUDA and CPU."""
    tensors = [torch.empty(0, device=device) for device in (one, other)]
    return bool(torch._has_compatible_shallow_copy_type(*tensors))


class ParameterUnit(MovingStorage):
    """Parameters in one storage; a tier has a block with the same bytes unless they changed.

    Args:
        name: of the unit, for sentences.
        params: they get new memory on the device, with the same bytes.
        device: where layers compute.
        parts: of some of these parameters.
        touched: called when a parameter is used while it is away; it must call `show` and return
            its result. None: `show` itself.
        ended: see `MovingStorage`.
    """

    keeps_block = True

    def __init__(
        self,
        name: str,
        params: Sequence[torch.nn.Parameter],
        device: Device,
        parts: Mapping[torch.Tensor, Part] | None = None,
        touched: Callable[[], bool] | None = None,
        ended: Ended | None = None,
    ) -> None:
        super().__init__(device, ended)
        self.name = name
        self.params = list(params)
        own_parts = {n: parts[p] for n, p in enumerate(self.params) if parts and p in parts}
        away = Away(name, self.params, touched or self.show)
        self._places = ParameterPlaces(self.params, own_parts, away)
        self._homes = [param.device for param in self.params]
        self._has_had_backward = False  # since the last look at what others have changed
        self._lost = ""  # why its values are, until all of them are overwritten
        self.told_of = -1  # the backward pass that a layer was told of last
        self.was_shown = False  # since then: a graph may have what was shown
        # A graph of before has no hook that brings the unit; so its backward pass is an error.
        torch.autograd.graph.increment_version(list(params))
        self._take_memory([param.detach() for param in self.params])
        self._places.attach()

    def check(self) -> None:
        """Raises OffloadError if a layer or an optimizer may not use the parameters any more."""

    def put_away(self, copies: OnlyCopy) -> bool:
        """Frees the memory once a tier has the bytes; False: no tier has room for them.

        It stays while other code holds it: Note [Views that others hold] (`handed_out.py`).
        """
        self.give_up_read()
        if self.where is not Where.IN_MEMORY:
            return True
        self._take_notice()
        self._count_hooks()
        self._places.detach()
        if self._handed_out.is_held:
            return True
        if self.block is not None:
            self.let_go()  # Note [Leaving a device]
            return True
        if copies.put_away(self):
            assert self._memory is not None
            self._memory.leave()  # before an I/O thread releases it, which may be long after
            return True
        self._places.attach()
        return False

    def bring(self) -> None:
        """Brings the parameters to memory and puts them in their places.

        Raises:
            OSError: they could not be read; they are still on the tier.
        """
        self.read()
        self.use_here()
        self._take_notice()
        if not self._places.is_attached:
            self._places.attach()

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters show the unit's memory, as a layer that computes finds them."""
        return self.where is Where.IN_MEMORY and self._places.is_attached

    def watch_params(self) -> None:
        """A layer computes with the parameters, which are in memory, and may write to them."""
        self._places.watch()

    def end_watch_params(self) -> None:
        """An optimizer is to change the parameters: they are plain ones meanwhile."""
        self._places.end_watch()

    def make_room(self) -> None:
        """Allocates memory for bytes that will all be overwritten, and reads nothing.

        Once they are written, the next `bring` puts the parameters in their places.
        """
        self.take_back()
        self.give_up_read()
        if self.where is Where.ON_TIER:
            self._obtain()
        self.use_here()

    def note_backward(self) -> None:
        """A backward pass computes with it; see Note [Hooks of gradients]."""
        self._has_had_backward = True
        self.told_of = torch._C._current_graph_task_id()
        self.was_shown = False

    def set_aside(self) -> None:
        """No layer computes with the parameters for now: a use of one is noticed."""
        if self.where is Where.IN_MEMORY and self._places.is_attached:
            self._take_notice()
            self._count_hooks()
            self._places.detach()
            self._handed_out.look()

    # -- Between steps --------------------------------------------------------------------------

    @torch.inference_mode(False)
    def show(self) -> bool:
        """Puts the parameters in their places without moving them: maps what is on a tier.

        Where a CPU tensor cannot take the place of the device's tensors, it brings them instead.

        Returns:
            Whether the shown values stay valid for their holders when the unit moves.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        self.was_shown = True
        if self._places.is_replaced:  # replaced while it was away
            self.adopt()
        if self.where is not Where.ON_TIER or not can_take_place(self._device.device, "cpu"):
            self.bring()
        storage, is_on_tier = self.view(), self.where is Where.ON_TIER
        views = (
            self._layout.views_apart(storage)
            if self._device.is_host or is_on_tier
            else self._layout.views(storage)
        )
        shown = [views[index, _KEY] for index in range(len(self.params))]
        self._handed_out.add(shown, self.told_of, is_on_tier=is_on_tier)
        self._places.show(shown)
        return is_on_tier

    def warns_of_views(self) -> bool:
        """Says so, and returns whether it did, if other code has held a view over a step."""
        return self._handed_out.warns(self.name, self.told_of)

    def lose(self, why: str) -> None:
        """Its values are lost and are about to be overwritten: in memory, and NaN."""
        self._lost = why
        self.make_room()
        for view in self._places.views:
            view.fill_(float("nan"))

    def check_values(self) -> None:
        """Raises LostStateError if not all values were overwritten since they were lost."""
        if self._lost and not self._places.are_all_changed:
            raise LostStateError(self._lost)
        self._lost = ""

    @property
    def has_changed(self) -> bool:
        """Whether a parameter was changed or replaced since it was put in its place."""
        return self._places.is_changed_in_place or self._places.is_replaced

    def _take_notice(self) -> None:
        """Counts what other code has changed as the unit's values; the unit is in memory.

        Raises:
            OffloadError: a tensor without bytes was written to.
        """
        if self._places.is_replaced:
            self.adopt()
        elif self._places.is_changed_in_place:
            self._places.forget_changes()
            if not self._places.is_attached:
                raise OffloadError(
                    f"{PARAMETERS_PREFIX}a parameter of {self.name} was written to while it was "
                    "on a tier, by code that bypasses Python's dispatch, so the parameter was not "
                    "read first and the change is lost; call expose() of the handle before"
                )
            self.note_change()

    def _count_hooks(self) -> None:
        """See Note [Hooks of gradients]; the unit is in memory, and no layer computes with it."""
        if self._has_had_backward and any(map(_has_hooks, self.params)):
            self.note_change()
        self._has_had_backward = False

    def adopt(self) -> None:
        """Takes over the values that the parameters hold now, in whatever memory these are.

        Raises:
            OSError: the tier has values that were not replaced, and could not read them.
        """
        if self._places.is_replaced:
            if self._places.shown:
                self.renew()  # other parameters may have been changed on the tier
            self.read()  # for the other parameters, and for holders of old views
            self.use_here()
            parts = self._places.held_by_parts()
            # The old memory is not refilled but dropped: the allocator keeps it until kernels end.
            self._device.wait_for_event(self._device.record_event())
            self._take_memory(self._places.held())
            for index, value in parts.items():
                self._places.part_in_memory(index).copy_(value)
        elif self.where is Where.ON_TIER:
            # Not what the parameters show: a read of that would end the process if it failed.
            shown = self._layout.views(self.copy_of_view())
            values = [shown[index, _KEY] for index in range(len(self.params))]
            self._obtain()
            self.use_here()
            for view, value in zip(self._places.views, values, strict=True):
                view.copy_(value)
        else:
            self.read()
            self.use_here()
        self.note_change()
        self._places.attach()

    def hide(self) -> None:
        """Ends `show`. Changes of the shown values stay, however they were made.

        Raises:
            OSError: the tier could not take the changes; `adopt` can.
        """
        if self.where is Where.ON_TIER:
            self.renew()
            self._places.detach()
        elif self.where is Where.IN_MEMORY:
            self.note_change()
            self._places.detach()
            self._handed_out.look()

    def give_back(self) -> None:
        """Gives the parameters memory of their own, on the devices that they came from."""
        self._places.give(
            [
                param.detach().to(home, copy=True)
                for param, home in zip(self.params, self._homes, strict=True)
            ]
        )

    def give_up(self) -> None:
        """The parameters that are away are lost: they are NaN for good."""
        self._places.give_up()

    # -- Bytes ----------------------------------------------------------------------------------

    @property
    def bytes(self) -> torch.Tensor:
        """Its memory, as bytes; the unit is in memory."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device.device)
        assert self.storage is not None
        return nothing.set_(self.storage)

    def bytes_of(self, index: int, start: int, end: int) -> slice:
        """The range of its bytes that some elements of a parameter take, in memory order."""
        slot = self._layout.slots[index, _KEY]
        size = slot.dtype.itemsize
        return slice(slot.start_bytes + start * size, slot.start_bytes + end * size)

    # -- Memory ---------------------------------------------------------------------------------

    def _obtain(self) -> None:
        """Allocates its memory again, to overwrite; until then the bytes are on a tier."""
        assert self._memory is not None
        self._memory.for_read()
        self.hold(self._memory, self.num_bytes, [self._device.restored_is_free()])

    @torch.inference_mode(False)  # the caller may be in inference mode and have replaced values
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        """Takes new memory, filled with these values."""
        layout = Layout({(index, _KEY): value for index, value in enumerate(values)})
        memory = open_staying_memory(layout.num_bytes, self._device)
        events = [self._device.restored_is_free()]  # after these it may be written
        memory.use_after(self._device, events)
        views = layout.views(memory.storage)
        for index, value in enumerate(values):
            views[index, _KEY].copy_(value)
        self._places.use([views[index, _KEY] for index in range(len(values))])
        self._layout = layout
        self.hold(memory, layout.num_bytes, events)
        self._handed_out = HandedOut(memory.storage)
