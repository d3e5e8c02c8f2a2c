# SPDX-License-Identifier: Apache-2.0
"""Which units have their parameters in memory: `ParameterWindow`.

Note [Live units]
A unit's parameters stay in memory from their first use until the window needs the room. Compute
goes through the units in one direction for a while: up in forward, down in backward, and back. So
when a unit is used, the window starts to read the next units in that direction, as many as may live
beside it, and all others leave. Parameters change in the optimizer's step, or where other code
changes them, which is noticed (`unit.py`): at any other time a unit leaves without a write, because
its bytes are on the tier already.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.device.cuda import check_not_captured
from megatron.offload.device.device import Device
from megatron.offload.errors import (
    PARAMETERS_PREFIX,
    InterruptedStepError,
    LostStateError,
    OffloadError,
)
from megatron.offload.machine.own_process import OwnProcess
from megatron.offload.machine.transform import outside_of_transforms
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.order import live_units
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.encoded_unit import EncodedUnit
from megatron.offload.parameters.file_tier import FileTier
from megatron.offload.parameters.filed_unit import FiledUnit
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.parameters.unit_encoding import moves_encoded
from megatron.offload.parameters.weight_codec import WeightCodec
from megatron.offload.parameters.weight_files import SavedPiece
from megatron.offload.tiers.tier import Tier, close_when_dropped
from megatron.offload.tiers.transfer import TRANSFER_ERRORS


class ParameterWindow:
    """Brings units of parameters to memory and puts them away.

    Args:
        tiers: where units go; a unit goes to the first that has room. `close` closes them.
        device: where layers compute.
        live_units: units in memory at a time.
        codec: of units whose parameters are all frozen; None: they move as they are.
        files: from which units are read whose values are there; closed with the tiers.

    Attributes:
        device: where layers compute.
        units: in the order in which layers run.
        copies: brings units and puts them away.
        live_units: in memory at a time.
        gradients: of these parameters, if they are offloaded too.
        is_lost: closed before all parameters were in memory again.
        is_whole: false while parameters are gathered from several ranks, and for good if an error
            ended the gathering.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        device: Device,
        live_units: int,
        codec: WeightCodec | None = None,
        files: FileTier | None = None,
    ) -> None:
        self._files, self._writable = files, list(tiers)
        self.tiers = self._writable if files is None else [*tiers, files]
        self.units: list[ParameterUnit] = []
        self.copies = OnlyCopy(
            PARAMETERS_PREFIX, self.tiers, device, self.units, lambda unit: unit.name
        )
        self.gradients: Gradients | None = None
        self.is_whole = True
        self.is_lost = False
        self._process = OwnProcess(PARAMETERS_PREFIX)
        self.device = device
        self.live_units = live_units
        self._codec = codec
        self._used = 0  # number of the unit that was used last
        # Numbers of units, by the identity of their parameters and of parts of these.
        self._numbers: dict[int, int] = {}
        self._direction = 1
        self._shown: set[int] = set()  # units
        self._loading = -1  # the unit whose parameters are being overwritten
        self._has_warned = False  # of views that other code holds
        self._when_dropped = close_when_dropped(self, self.tiers)

    def add(
        self,
        name: str,
        params: Sequence[torch.nn.Parameter],
        parts: Mapping[torch.Tensor, Part] | None = None,
        saved: Sequence[Sequence[SavedPiece]] | None = None,
    ) -> None:
        """Adds a unit after the others; its parameters leave.

        Args:
            name: of the unit, for sentences.
            params: of the unit.
            parts: of some parameters, which may be of any unit.
            saved: of what in `files` each parameter is made; None: the unit is not read there.

        Raises:
            OSError: a file cannot be read.
        """
        number = len(self.units)
        touched = functools.partial(self.show, number)
        of_unit = name, params, self.device, parts, touched, self.copies.ended
        if self._codec is not None and moves_encoded(params):
            unit: ParameterUnit = EncodedUnit(*of_unit, codec=self._codec, tiers=self._writable)
        elif saved is not None and self._files is not None:
            for piece in itertools.chain.from_iterable(saved):
                self._files.open(piece.tensor)
            unit = FiledUnit(*of_unit, saved=saved, files=self._files, tiers=self._writable)
        else:
            unit = ParameterUnit(*of_unit)
        self.units.append(unit)
        self._numbers |= {id(param): number for param in params}
        self._numbers |= (
            {id(parts[param].tensor): number for param in params if param in parts} if parts else {}
        )
        self._put_away(unit)
        unit_before = self.units[number - 1] if number else None
        if unit_before is not None and unit_before.where is Where.WRITING:
            unit_before.wait_for_write()  # only one unit at a time is in memory twice

    # -- While layers compute -------------------------------------------------------------------

    @outside_of_transforms
    def use(self, number: int, direction: int, *, unread: Container[int] = ()) -> None:
        """Brings a unit to memory and reads ahead.

        Args:
            number: of the unit.
            direction: 1: units with larger numbers come next, -1: with smaller ones.
            unread: units whose bytes will all be overwritten: they get memory without a read.

        Raises:
            LostStateError: its parameters could not be read back.
        """
        check_not_captured(
            PARAMETERS_PREFIX,
            "a layer whose parameters are",
            "capture other layers, or close() the handle before",
        )
        self._process.check()
        unit = self.units[number]
        unit.check()
        here = (number, direction) == (self._used, self._direction)
        if here and unit.where is Where.IN_MEMORY and not self._shown:
            self._bring(unit)  # attaches them, and this thread may be on another stream
            unit.watch_params()
            return
        self.conceal()
        there = [n for n in range(len(self.units)) if self._is_here(n)]
        wanted, leaving = live_units(number, direction, self.live_units, len(self.units), there)
        for other in leaving:
            self._put_away(self.units[other])
        # What is still being written takes memory until its write ends: one such unit at most.
        for one in [one for one in self.units if one.where is Where.WRITING][:-1]:
            one.wait_for_write()
        self._used, self._direction = number, direction
        if number in unread:
            self.device.room.read(unit.make_room)
        else:
            self._bring(unit)
            unit.watch_params()
        for other in [n for n in wanted[1:] if n not in unread]:
            with contextlib.suppress(*TRANSFER_ERRORS):  # `_bring` reads again and reports
                self.units[other].take_back()
                self.units[other].begin_read()
        self.copies.note_peak()

    @outside_of_transforms
    def set_aside(self, numbers: Iterable[int] | None = None) -> None:
        """Layers have computed: a use of their parameters before the next time is noticed.

        Args:
            numbers: of the layers' units; None: all.
        """
        for number in range(len(self.units)) if numbers is None else numbers:
            if number not in self._shown:
                self.units[number].set_aside()

    def _bring(self, unit: ParameterUnit) -> None:
        with self.copies.waiting():
            self.copies.bring(unit)

    def _is_here(self, number: int) -> bool:
        return self.units[number].where in (Where.IN_MEMORY, Where.READING)

    def _put_away(self, unit: ParameterUnit) -> None:
        if not unit.put_away(self.copies):
            bound = "beside the units that may live (--parameter-offload-live-units)"
            self.copies.warn_of_refused(bound)
        self._has_warned = self._has_warned or unit.warns_of_views()

    # -- While the optimizer steps --------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """A context around the update of parameters: brings them; they have other bytes after it.

        It brings their gradients too, and drops them after it. It leaves parameters alone that
        belong to no unit.

        Raises:
            LostStateError: some could not be read back.
        """
        check_not_captured(
            PARAMETERS_PREFIX,
            "an optimizer's step whose parameters are",
            "run the step without a graph, or close() the handle before",
        )
        self._process.check()
        params = list(params)
        is_in_backward = torch._C._current_graph_task_id() != -1  # a hook of a gradient steps
        used: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.gradients is not None:
            self.gradients.begin_reads(params)
            used = self.gradients.used(params)
        numbers = sorted({n for p in params if (n := self._numbers.get(id(p))) is not None})
        if len(numbers) <= self.live_units:
            for number in numbers:
                self.use(number, -1 if number < self._used else 1)
        self.conceal()
        for number in numbers:
            self.units[number].check()
            self._bring(self.units[number])
            self.units[number].note_change()  # before the update, which may raise at any point
            self.units[number].end_watch_params()
        self.copies.note_peak()
        with used:
            yield
        for number in () if is_in_backward else numbers:  # there their layer may still need them
            unit = self.units[number]
            self.device.room.read(unit.set_aside)  # which copies what an optimizer has assigned

    def number_of(self, param: torch.Tensor) -> int | None:
        """The number of the unit that a parameter, or a part of one, belongs to; None: no unit."""
        return self._numbers.get(id(param))

    def has(self, param: torch.Tensor) -> bool:
        """Whether a parameter, a part of one or its gradient is offloaded here."""
        gradients = self.gradients
        return id(param) in self._numbers or (gradients is not None and gradients.has(param))

    def tier_of(self, param: torch.Tensor) -> Tier | None:
        """The tier with a parameter's bytes once writes have ended; None: they are in memory."""
        number = self._numbers.get(id(param))
        return None if number is None else self.units[number].tier

    def gradient_tier_of(self, param: torch.Tensor) -> Tier | None:
        """The tier with its gradient's bytes; before there is one, the tier it will go to."""
        return None if self.gradients is None else self.gradients.tier_of(param)

    def check_whole(self) -> None:
        """Raises InterruptedStepError if an error ended the gathering of parameters."""
        if not self.is_whole:
            raise InterruptedStepError(
                f"{PARAMETERS_PREFIX}a step ended in its middle, by an error or an interrupt: "
                "ranks have some of its parameters from each other and others not, which is no "
                "state to go on from or to save; resume from the last checkpoint"
            )

    def check_backward(self) -> None:
        """Raises OffloadError if a backward pass would find weights without bytes."""
        if self.is_lost:
            raise OffloadError(
                f"{PARAMETERS_PREFIX}a backward pass needs those of a layer, and the handle was "
                "closed without bringing them back; call close() after the backward pass, or with "
                "restore=True"
            )
        if self.units and torch.is_grad_enabled():
            raise OffloadError(
                f"{PARAMETERS_PREFIX}a backward pass with create_graph=True, as torch.func.grad "
                "runs it, makes a graph that needs weights of all layers, and they come layer by "
                "layer; for such gradients keep parameters in memory: close() the handle before "
                "the forward pass"
            )

    # -- Between steps --------------------------------------------------------------------------

    def expose(self) -> None:
        """Puts all parameters in their places until the next use: for checkpoints.

        What is on a drive is compared with its checksums and mapped. A change in place is a change
        of the parameter, through `param.data` too.

        Raises:
            LostStateError: parameters could not be read.
            InterruptedStepError: an error or an interrupt ended the last step.
        """
        self._loading = -1
        for number in range(len(self.units)):
            self.show(number)

    @outside_of_transforms
    def show(self, number: int) -> bool:
        """`expose` for one unit; a use of one of its parameters calls this.

        Returns:
            See `ParameterUnit.show`.
        """
        self.check_whole()
        unit = self.units[number]
        if number in self._shown:
            if number != self._loading:
                unit.check_values()
            return unit.where is Where.ON_TIER
        self._process.check()
        for tier in self.tiers:
            tier.wait_for_writes()  # a queued write would overwrite changes on the drive
        try:
            unit.show()
        except (torch.OutOfMemoryError, OffloadError):
            raise
        except TRANSFER_ERRORS:
            self._bring(unit)
            unit.show()
        self._shown.add(number)
        self.copies.note_peak()
        return unit.where is Where.ON_TIER

    @outside_of_transforms
    def show_to_load(self, number: int) -> None:
        """Shows a unit whose parameters are to be overwritten: in memory, not mapped.

        A write to mapped memory cannot fail with an error: where the disk is full and copies on
        write, the system ends the process. So the unit gets its values in memory, and leaves for
        its tier when the next one is shown here.

        If its values are lost, they are NaN until they are overwritten. Where only some are, the
        next use of the unit is a LostStateError.

        Raises:
            InterruptedStepError: an error or an interrupt ended the last step.
        """
        self.check_whole()
        self._process.check()
        for other, unit in enumerate(self.units):
            if other != number and unit.where is not Where.ON_TIER:
                self._end_show(other)
                self._put_away(unit)
                unit.wait_for_write()
        unit, self._loading = self.units[number], number
        try:
            if unit.where is Where.ON_TIER:
                self._end_show(number)
            if number not in self._shown:
                self._bring(unit)
        except LostStateError as error:
            self._shown.discard(number)
            unit.lose(str(error))
        self.show(number)

    def end_load(self, *_: Any) -> None:
        """The parameters of a layer have been overwritten."""
        self._loading = -1

    @outside_of_transforms
    def conceal(self) -> None:
        """Ends `expose`; takes over what was changed or replaced meanwhile."""
        while self._shown:
            self._end_show(min(self._shown))

    def _end_show(self, number: int) -> None:
        if number in self._shown:
            self._conceal(self.units[number])
            self._shown.discard(number)

    def _conceal(self, unit: ParameterUnit) -> None:
        unit.check_values()
        if not unit.has_changed:
            with contextlib.suppress(OSError):
                unit.hide()
                return
        self.copies.bring(unit, unit.adopt)
        self._put_away(unit)
        unit.wait_for_write()

    @property
    def memory_bytes(self) -> int:
        """Bytes of these parameters that are in memory now."""
        return self.copies.memory_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all these parameters."""
        return self.copies.num_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes of them as they move."""
        return sum(unit.moved_bytes for unit in self.units)

    def close(self, *, restore: bool = True) -> None:
        """Ends the offload and closes the tiers.

        Args:
            restore: first brings all parameters and gradients back to memory of their own.

        Raises:
            LostStateError: some could not be read back and are NaN; all others are in memory.
        """
        self._process.check()
        error: LostStateError | None = None
        if self.gradients is not None:
            try:
                self.gradients.close(restore=restore)
            except LostStateError as one:
                error = one
        for number in sorted(self._shown):
            try:
                self._conceal(self.units[number])
            except LostStateError as one:
                error = error or one
        self._shown.clear()
        for unit in self.units if restore else ():
            try:
                self._bring(unit)
                unit.give_back()
            except LostStateError as one:
                error = error or LostStateError(
                    f"{one}; what is lost is NaN from now on: do not save the model"
                )
        for unit in self.units:
            unit.give_up()
        self._when_dropped.detach()
        for tier in self.tiers:
            tier.close()
        self.units.clear()
        self._numbers.clear()
        self.is_lost = not restore or error is not None
        if error is not None and restore:
            raise error
