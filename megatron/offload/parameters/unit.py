# SPDX-License-Identifier: Apache-2.0
"""The parameters of a unit of layers, which come and go together: `ParameterUnit`.

Note [A storage that stays]
What autograd saves of a weight in forward it wants in backward, and by then the weight has been
away. So a unit's parameters have a storage of their own for good, and only the memory behind it
comes and goes: `moving/memory.py`. Saved views hold the storage, never the bytes.

Note [What others change]
A parameter is in its place while its layer computes, while the optimizer updates it, and from when
it is touched until the next of these (`away_parameter.py`); else something that has no bytes is
there. So a script, a trainer or a library changes it where it is in its place. What was put there
is compared with what is there before it leaves: another version means that it was changed in place,
other memory that it was replaced. Then the unit takes new memory for what its parameters hold: who
has kept the memory of before (an average of the weights does, to put it back) has it as it was.

Note [Leaving a device]
The host runs ahead of a device. Memory that is let go while work with it is queued could not be
had again yet, and the unit that is read next would take more. So a unit leaves when the device has
come to its end, and the thread that trains waits for that; then reads go on while the next unit,
which is there, computes. Its launches begin that much later: some hundred microseconds for each
unit, against all micro-batches of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.moving.layout import Layout
from megatron.offload.moving.memory import open_staying_memory
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Ended, MovingStorage, Where
from megatron.offload.parameters.away_parameter import Away
from megatron.offload.parameters.places import Part, Places

_KEY = "param"  # in the names of a layout


def can_take_place(one: torch.device | str, other: torch.device | str) -> bool:
    """Whether a parameter on one device may be given memory on the other, as CUDA's and CPU's."""
    tensors = [torch.empty(0, device=device) for device in (one, other)]
    return bool(torch._has_compatible_shallow_copy_type(*tensors))


class ParameterUnit(MovingStorage):
    """Some parameters in one piece of memory, which have a block on a tier unless they changed.

    Args:
        name: of the unit, for people.
        params: they get new memory on the device, with the same bytes.
        device: where layers compute.
        parts: of some of these parameters.
        touched: called when one of them is touched while it is not in its place: it is to `show`
            them, and say what that says. None: that is all.
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
        self._places = Places(self.params, own_parts, away)
        self._homes = [param.device for param in self.params]
        self._take_memory([param.detach() for param in self.params])
        self._places.attach()

    def put_away(self, copies: OnlyCopy) -> bool:
        """Lets the memory go, once a tier has the bytes; whether one has, or takes them.

        Args:
            copies: has the tiers.
        """
        self.give_up_read()
        if self.where is not Where.IN_MEMORY:
            return True
        self._take_notice()
        self._places.detach()
        if self.block is not None:
            self._device.wait_for_event(self._device.record_event())  # Note [Leaving a device]
            self.let_go()
            return True
        if copies.put_away(self):
            return True
        self._places.attach()
        return False

    def bring(self) -> None:
        """Has them in memory and in their places.

        Raises:
            OSError: they could not be read; they are still on the tier.
        """
        self.read()
        self.use_here()
        self._take_notice()
        if not self._places.is_attached:
            self._places.attach()

    def make_room(self) -> None:
        """Has memory for bytes that will all be written: what they were is not read.

        Its parameters are there with the next `bring`, when they have been.
        """
        self.take_back()
        if self.where is Where.READING:
            self.bring()
        if self.where is Where.ON_TIER:
            self._obtain()
        self.use_here()

    def set_aside(self) -> None:
        """They are not computed with for now: who touches one tells of it."""
        if self.where is Where.IN_MEMORY and self._places.is_attached:
            self._take_notice()
            self._places.detach()

    # -- For whoever looks between steps --------------------------------------------------------

    @torch.inference_mode(False)
    def show(self) -> bool:
        """Puts them in their places wherever they are: what is on a tier is mapped there.

        On a device whose tensors cannot stand in a CPU tensor's place they are brought instead.

        Returns:
            Whether what is there stays as it is for who holds it, whatever becomes of the unit.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        if self._places.is_replaced:  # while it was away
            self.adopt()
        if self.where is not Where.ON_TIER or not can_take_place(self._device.device, "cpu"):
            self.bring()
        storage, is_on_tier = self.view(), self.where is Where.ON_TIER
        views = (
            self._layout.views_apart(storage)
            if self._device.is_host or is_on_tier
            else self._layout.views(storage)
        )
        self._places.show([views[index, _KEY] for index in range(len(self.params))])
        return is_on_tier

    @property
    def has_changed(self) -> bool:
        """Whether one was changed or replaced since it was put in its place."""
        return self._places.is_changed_in_place or self._places.is_replaced

    def _take_notice(self) -> None:
        """What others have changed counts from now on; it is in memory.

        Raises:
            OffloadError: something was written to what has no bytes.
        """
        if self._places.is_replaced:
            self.adopt()
        elif self._places.is_changed_in_place:
            self._places.forget_changes()
            if not self._places.is_attached:
                raise OffloadError(
                    f"{PARAMETERS_PREFIX}a parameter of {self.name} was written to while it was "
                    "on a tier, by what does not go through Python and would have brought it "
                    "there, and the change is lost; call expose() of the handle before"
                )
            self.block = None

    def adopt(self) -> None:
        """Takes over what the parameters hold now, wherever that is.

        Raises:
            OSError: some were replaced, and the others could not be read.
        """
        if self._places.is_replaced:
            if self._places.shown:
                self.renew()  # others may have been changed there
            self.read()  # for the others, and for what has kept views of them
            parts = self._places.held_by_parts()
            self._device.wait_for_event(self._device.record_event())  # Note [Leaving a device]
            self._take_memory(self._places.held())
            for index, value in parts.items():
                self._places.part_in_memory(index).copy_(value)
        elif self.where is Where.ON_TIER:
            values = self._places.held()
            self._obtain()
            self.use_here()
            for view, value in zip(self._places.views, values, strict=True):
                view.copy_(value)
        else:
            self.read()
        self.note_change()
        self._places.attach()

    def hide(self) -> None:
        """Ends `show`. What was changed in its place stays so, by whatever way it was changed.

        Raises:
            OSError: the tier could not take what was changed there; `adopt` does.
        """
        if self.where is Where.ON_TIER:
            self.renew()
            self._places.detach()
        elif self.where is Where.IN_MEMORY:
            self.note_change()
            self._places.detach()

    def give_back(self) -> None:
        """Gives parameters memory of their own again, as they had before."""
        self._places.give(
            [
                param.detach().to(home, copy=True)
                for param, home in zip(self.params, self._homes, strict=True)
            ]
        )

    def give_up(self) -> None:
        """Those that are away are gone: they are NaN for good."""
        self._places.give_up()

    # -- Bytes ----------------------------------------------------------------------------------

    @property
    def bytes(self) -> torch.Tensor:
        """Its memory, as bytes; it is in memory."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device.device)
        assert self.storage is not None
        return nothing.set_(self.storage)

    def bytes_of(self, index: int, start: int, end: int) -> slice:
        """Where in its bytes some elements of a parameter lie, counted as in memory."""
        slot = self._layout.slots[index, _KEY]
        size = slot.dtype.itemsize
        return slice(slot.start_bytes + start * size, slot.start_bytes + end * size)

    # -- Memory ---------------------------------------------------------------------------------

    def _obtain(self) -> None:
        """Memory again, whose bytes were other ones; they are on a tier until then."""
        assert self._memory is not None
        self._memory.for_read()
        self.hold(self._memory, self.num_bytes, [self._device.restored_is_free()])

    @torch.inference_mode(False)  # who evaluates may have replaced something
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        """Has new memory, with these in it."""
        layout = Layout({(index, _KEY): value for index, value in enumerate(values)})
        memory = open_staying_memory(layout.num_bytes, self._device)
        events = [self._device.restored_is_free()]  # after which it has its bytes
        self._device.use_after(memory.storage, events)
        views = layout.views(memory.storage)
        for index, value in enumerate(values):
            views[index, _KEY].copy_(value)
        self._places.use([views[index, _KEY] for index in range(len(values))])
        self._layout = layout
        self.hold(memory, layout.num_bytes, events)
