# SPDX-License-Identifier: Apache-2.0
"""The parameters of a unit of layers, which come and go together: `ParameterUnit`.

Note [A storage that stays]
What autograd saves of a weight in forward it wants in backward, and by then the weight has been
away. So a unit's parameters have a storage of their own for good, and only the memory behind it
comes and goes: `unit_memory.py`. Saved views hold the storage, never the bytes.

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

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.machine.condition import Condition
from megatron.offload.parameters.away_parameter import Away
from megatron.offload.parameters.places import Part, Places
from megatron.offload.parameters.unit_memory import open_unit_memory
from megatron.offload.states.layout import Layout
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

_KEY = "param"  # in the names of a layout


class Where(enum.Enum):
    """Where a unit's parameters are. Members name the transitions into them."""

    IN_MEMORY = "in memory"  # at first; their read has ended; their write failed or was taken back
    WRITING = "being written"  # put_away from IN_MEMORY, changed since they were last written
    AWAY = "on a tier"  # the write has ended well; or put_away, unchanged
    READING = "being read"  # begin_read from AWAY


def can_take_place(one: torch.device | str, other: torch.device | str) -> bool:
    """Whether a parameter on one device may be given memory on the other, as CUDA's and CPU's."""
    tensors = [torch.empty(0, device=device) for device in (one, other)]
    return bool(torch._has_compatible_shallow_copy_type(*tensors))


class ParameterUnit:
    """Some parameters in one piece of memory, which have a block on a tier unless they changed.

    Args:
        name: of the unit, for people.
        params: they get new memory on the device, with the same bytes.
        device: where layers compute.
        parts: of some of these parameters.
        touched: called when one of them is touched while it is not in its place: it is to `show`
            them, and say what that says. None: that is all.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[torch.nn.Parameter],
        device: Device,
        parts: Mapping[torch.Tensor, Part] | None = None,
        touched: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.params = list(params)
        own_parts = {n: parts[p] for n, p in enumerate(self.params) if parts and p in parts}
        away = Away(name, self.params, touched or self.show)
        self._places = Places(self.params, own_parts, away)
        self.where = Where.IN_MEMORY
        self._device = device
        self._homes = [param.device for param in self.params]
        self.block: Any = None  # has their bytes; None: they have changed since
        self._transfer: Transfer | None = None
        self._is_watched = False  # the end of the write under way is told
        # Protects what the end of a write changes, and tells of it.
        self._lock = Condition()
        self._take_memory([param.detach() for param in self.params])
        self._places.attach()

    # -- To a tier ------------------------------------------------------------------------------

    def put_away(self, tiers: Sequence[Tier]) -> bool:
        """Lets the memory go, once a tier has the bytes; whether one has, or takes them.

        Args:
            tiers: the first that takes them has them.
        """
        self.give_up_read()
        if self.where is not Where.IN_MEMORY:
            return True
        self._take_notice()
        if self.block is not None:
            self._places.detach()
            self.where = Where.AWAY
            self._device.wait_for_event(self._device.record_event())  # Note [Leaving a device]
            self._memory.release()
            return True
        after = self._device.record_event()
        for tier in tiers:
            started = tier.begin_write(self._memory.storage, after)
            if started is not None:
                self._places.detach()
                block, transfer = started
                with self._lock:  # all at once: a block counts as written unless it says WRITING
                    self._is_watched = False
                    self.block, self.where, self._transfer = block, Where.WRITING, transfer
                self._watch()
                return True
        return False

    def _watch(self) -> None:
        """Registers for the end of a write. A method that waits for it calls this again: an
        interrupt may have come before the first call was through."""
        transfer = self._transfer
        if transfer is not None and self.where is Where.WRITING and not self._is_watched:
            transfer.add_done_callback(self._write_ended)
            self._is_watched = True

    # Runs in an I/O thread; or in the one that watches, if the write had ended before.
    def _write_ended(self, transfer: Transfer) -> None:
        is_written = transfer.error is None
        with self._lock:
            if self._transfer is not transfer:
                return  # taken back meanwhile
            # All at once, so that an interrupt leaves it in one of the states.
            if is_written:
                self._transfer, self.where = None, Where.AWAY
                self._memory.release()
            else:  # not in their places
                self._transfer, self.where, self.block = None, Where.IN_MEMORY, None
            self._lock.notify_all()

    def wait_for_write(self) -> None:
        """Blocks until no write is under way, well or badly."""
        self._watch()
        with self._lock:
            self._lock.wait_for(lambda: self.where is not Where.WRITING)

    def take_back(self) -> None:
        """Its parameters are needed: a write under way is given up."""
        with self._lock:
            if self.where is not Where.WRITING:
                return
            transfer, self._transfer = self._transfer, None
            self.where, self.block = Where.IN_MEMORY, None
        assert transfer is not None
        transfer.cancel()

    # -- And back -------------------------------------------------------------------------------

    def begin_read(self) -> None:
        """Starts to bring them back, if they are away."""
        if self.where is Where.AWAY:
            self._memory.obtain()
            try:
                _, transfer = self.block.tier.begin_read(self.block, into=self._memory.storage)
            except BaseException:
                self._memory.release()
                raise
            self._transfer, self.where = transfer, Where.READING

    def bring(self) -> None:
        """Has them in memory and in their places.

        Raises:
            OSError: they could not be read; they are still away.
        """
        self._read()
        self.use_here()
        self._take_notice()
        if not self._places.is_attached:
            self._places.attach()

    def _read(self) -> None:
        self.take_back()
        self.begin_read()
        if self.where is Where.READING:
            assert self._transfer is not None
            try:
                self._transfer.wait()
            except BaseException:
                if self._transfer.done():  # else the wait was interrupted, and the read goes on
                    self._forget_read()
                raise
            self._events = self._transfer.events or ()
            self.where, self._transfer = Where.IN_MEMORY, None

    def give_up_read(self) -> None:
        """They are not needed yet after all: lets the memory of a read go, if there is one."""
        if self.where is Where.READING:
            assert self._transfer is not None
            self._transfer.cancel()
            self._transfer.wait_until_done()
            self._forget_read()

    def _forget_read(self) -> None:
        """A read has ended, and what it has read is not wanted, or wrong."""
        self.where, self._transfer = Where.AWAY, None
        self._memory.release()

    def make_room(self) -> None:
        """Has memory for bytes that will all be written: what they were is not read.

        Its parameters are there with the next `bring`, when they have been.
        """
        self.take_back()
        if self.where is Where.READING:
            self.bring()
        if self.where is Where.AWAY:
            self._obtain()
            self.where, self.block = Where.IN_MEMORY, None
        self.use_here()

    def use_here(self) -> None:
        """The stream of the thread that calls uses them from now on; they are in memory."""
        self._device.use_after(self._memory.storage, self._events)

    def note_change(self) -> None:
        """They have other bytes from now on than their block; they are in memory."""
        assert self.where is Where.IN_MEMORY, self.where
        self.block = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes now."""
        return 0 if self.where is Where.AWAY else self.num_bytes

    @property
    def tier(self) -> Tier | None:
        """Which has its bytes, at the end of a write that is under way; None: memory has them."""
        with self._lock:
            is_leaving = self.where in (Where.AWAY, Where.WRITING)
            return self.block.tier if is_leaving else None

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
        if self.where is not Where.AWAY or not can_take_place(self._device.device, "cpu"):
            self.bring()
            storage = self._memory.storage
        else:
            storage = self.block.tier.view(self.block)
        views = (
            self._layout.views_apart(storage)
            if self._device.is_host or (self.where is Where.AWAY)
            else self._layout.views(storage)
        )
        self._places.show([views[index, _KEY] for index in range(len(self.params))])
        return self.where is Where.AWAY

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
            if self.where is Where.AWAY and self._places.shown:
                self.block.tier.renew(self.block)  # others may have been changed there
            self._read()  # for the others, and for what has kept views of them
            parts = self._places.held_by_parts()
            self._device.wait_for_event(self._device.record_event())  # Note [Leaving a device]
            self._take_memory(self._places.held())
            for index, value in parts.items():
                self._places.part_in_memory(index).copy_(value)
        elif self.where is Where.AWAY:
            values = self._places.held()
            self._obtain()
            self.use_here()
            for view, value in zip(self._places.views, values, strict=True):
                view.copy_(value)
        else:
            self.take_back()
        self.where, self.block = Where.IN_MEMORY, None
        self._places.attach()

    def hide(self) -> None:
        """Ends `show`. What was changed in its place stays so, by whatever way it was changed.

        Raises:
            OSError: the tier could not take what was changed there; `adopt` does.
        """
        if self.where is Where.AWAY:
            self.block.tier.renew(self.block)
            self._places.detach()
        elif self.where is Where.IN_MEMORY:
            self.block = None
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
        return nothing.set_(self._memory.storage)

    def bytes_of(self, index: int, start: int, end: int) -> slice:
        """Where in its bytes some elements of a parameter lie, counted as in memory."""
        slot = self._layout.slots[index, _KEY]
        size = slot.dtype.itemsize
        return slice(slot.start_bytes + start * size, slot.start_bytes + end * size)

    # -- Memory ---------------------------------------------------------------------------------

    def _obtain(self) -> None:
        self._memory.obtain()
        self._events = [self._device.restored_is_free()]

    @torch.inference_mode(False)  # who evaluates may have replaced something
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        """Has new memory, with these in it."""
        layout = Layout({(index, _KEY): value for index, value in enumerate(values)})
        memory = open_unit_memory(layout.num_bytes, self._device)
        events = [self._device.restored_is_free()]  # after which it has its bytes
        self._device.use_after(memory.storage, events)
        views = layout.views(memory.storage)
        for index, value in enumerate(values):
            views[index, _KEY].copy_(value)
        self._places.use([views[index, _KEY] for index in range(len(values))])
        self._layout, self._memory, self._events = layout, memory, events
        self.num_bytes = layout.num_bytes
