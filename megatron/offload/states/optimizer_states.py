# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer on tiers: `OptimizerStates`.

Its `step` reads, updates and writes one bucket at a time. Read it top to bottom: a bucket is read,
the optimizer's own step updates its parameters, it is written back; meanwhile the next bucket is
read and the previous one written (`window.py`). `moving/only_copy.py` handles reads and writes that
fail.

Note [A step that ends in its middle]
An error or an interrupt between the update of the first bucket and that of the last leaves some
parameters updated and others not. In memory torch goes on with them, and saves them, without an
error. Here the next step, and any access to the states, raises `InterruptedStepError` until states
are loaded again; `close` brings the states back as they are.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from megatron.offload.device.cuda import check_not_captured
from megatron.offload.device.device import Device
from megatron.offload.errors import STATES_PREFIX, LostStateError
from megatron.offload.machine.allocator import return_freed_memory
from megatron.offload.machine.own_process import OwnProcess
from megatron.offload.moving.bucket import Bucket, divided
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Where
from megatron.offload.states.exposed import Exposed, Unshown, shown, warn_of
from megatron.offload.states.faults import interrupted_step, names_of
from megatron.offload.states.lazy_state import LazyStateTensor
from megatron.offload.states.optimizer_places import OptimizerPlaces
from megatron.offload.states.optimizer_slice import OptimizerSlice, State
from megatron.offload.states.statistics import StatesMeter
from megatron.offload.states.window import Window
from megatron.offload.tiers.tier import Tier, close_when_dropped

_Context = contextlib.AbstractContextManager[None]
_nothing = contextlib.nullcontext
_Slices = Sequence[Sequence[torch.Tensor]]
_F = TypeVar("_F", bound=Callable[..., Any])


def _makes_ordinary_tensors(function: _F) -> _F:
    """Makes a function create ordinary tensors, also if the caller is in `inference_mode`."""
    # `inference_mode(False)` also turns the recording of graphs on, so `no_grad` comes after it.
    return torch.inference_mode(False)(torch.no_grad()(function))


class OptimizerStates:
    """Keeps an optimizer's states on tiers, and runs its steps.

    Between steps the optimizer's `state` has tensors without bytes in place of the states that are
    away, and parameters that are away, such as main weights, are full of NaN. `expose` puts the
    real ones there.

    Args:
        optimizer: updates each parameter by its gradient and state alone (Adam, SGD, and most).
        tiers: where buckets go; a bucket goes to the first that has room. `close` closes them.
        device: in whose memory the optimizer's step uses the states.
        bucket_bytes: of states that move together.
        window_bytes: of states that may be in its memory; one bucket always may, on an accelerator
            three.
        moves_param: whether a parameter itself moves with its states, as main weights do.
        updated: called with the parameters of each bucket, once updated and still in memory.
        changing: makes a context around the update of parameters and `updated`.
        slices_of: divides a bucket's parameters into slices, which are updated one after another.
        order: of parameters in buckets; those of equal rank stay in the optimizer's order.
        step_by: runs the optimizer's step; None: where the parameters are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tiers: Sequence[Tier],
        device: Device,
        *,
        bucket_bytes: int,
        window_bytes: int,
        moves_param: Callable[[torch.Tensor], bool] = lambda param: False,
        updated: Callable[[Sequence[torch.Tensor]], None] = lambda params: None,
        changing: Callable[[Sequence[torch.Tensor]], _Context] = lambda params: _nothing(),
        slices_of: Callable[[Sequence[torch.Tensor]], _Slices] = lambda params: [params],
        order: Callable[[torch.Tensor], int] = lambda param: 0,
        step_by: OptimizerSlice | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._slice = step_by or OptimizerSlice(optimizer)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._updated = updated
        self._changing = changing
        self._slices_of = slices_of
        self._order = order
        self._places = OptimizerPlaces(optimizer, device.device, moves_param)
        self.buckets: list[Bucket] = []  # all states, in the order of the optimizer's parameters
        self._copies = OnlyCopy(STATES_PREFIX, tiers, device, self.buckets, self._names)
        self._window = Window(
            self.buckets, self._copies, device, window_bytes, self._expected_bytes
        )
        self._exposed: list[Exposed] = []
        self._num_loading = 0
        self._is_half_done = False  # see Note [A step that ends in its middle]
        self._process = OwnProcess(STATES_PREFIX)
        self.meter = StatesMeter(device, self.tiers, lambda: self.memory_bytes)
        self._when_dropped = close_when_dropped(self, self.tiers)
        self._find_buckets()
        try:
            self.adopt()
        except BaseException:
            self.close()  # brings back what has left already
            raise

    # -- A step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates all parameters that have a gradient, bucket by bucket.

        Raises:
            LostStateError: states could not be read back.
            InterruptedStepError: an error or an interrupt ended a step, and no states were loaded
                since.
            OffloadError: this is a child process.
        """
        check_not_captured(
            STATES_PREFIX,
            "an optimizer's step whose states are",
            "run the step without a graph, or close() the handle before",
        )
        self._process.check()
        self._check_whole()
        self.conceal()
        self._find_buckets()
        with self.meter.step():
            self._step()

    def _step(self) -> None:
        window = self._window
        buckets = self._slice.to_visit(list(window.begin_step()))
        stays = window.first_to_stay(buckets)
        ahead = collections.deque(buckets)
        num_known = len(self._optimizer.state)
        slices = [self._slices_of(bucket.params) for bucket in buckets]
        self._slice.begin_step([params for one in slices for params in one])
        for index, bucket in enumerate(buckets):
            window.read_ahead(ahead)
            with self.meter.waiting():
                window.bring(bucket, ahead)
            while ahead and ahead[0].where is not Where.ON_TIER:
                ahead.popleft()
            had_none = bucket.where is Where.NOWHERE
            with self.meter.updating():
                self._update(bucket, slices[index])
            if had_none and bucket.where is not Where.NOWHERE and self._device.is_host:
                return_freed_memory()  # the allocator would keep what the optimizer has freed
            self.meter.updated(bucket.num_bytes)
            if index < stays:
                window.put_away(bucket)
        self._slice.end_step()
        self._places.sort_new(num_known)
        self._is_half_done = False
        window.end_step()

    def _update(self, bucket: Bucket, slices: _Slices) -> None:
        """Runs the optimizer's step for the parameters of a bucket that is in memory."""
        self._places.attach(bucket, views := bucket.views)
        states = self._places.states_with(bucket, views)
        after: dict[torch.Tensor, State] = {}
        for params in slices:
            with self._changing(params):
                own = {param: states[param] for param in params if param in states}
                self._is_half_done = True  # not before parameters have come, which may fail
                after |= self._slice.step(params, own)
                self._updated(params)
        self._places.take_over(bucket, after, views)

    def _check_whole(self) -> None:
        """Raises InterruptedStepError if an error or an interrupt has ended a step."""
        if self._is_half_done:
            raise interrupted_step(self._copies.checkpoint)

    def prefetch(self) -> None:
        """The next step is near: starts to read what it needs first, as far as there is room."""
        if self._exposed or self._is_half_done:
            return
        self._process.check()
        self.meter.prefetch()
        self._window.prefetch()

    # -- Where states are -------------------------------------------------------------------------

    @property
    def tiers(self) -> list[Tier]:
        """Where buckets go, in this order."""
        return self._copies.tiers

    @property
    def checkpoint(self) -> str:
        """The checkpoint to resume from if states are lost; empty: not known."""
        return self._copies.checkpoint

    @checkpoint.setter
    def checkpoint(self, name: str) -> None:
        self._copies.checkpoint = name

    @property
    def window_bytes(self) -> int:
        """Bytes of states that may be in memory; may be set between two steps."""
        return self._window.window_bytes

    @window_bytes.setter
    def window_bytes(self, num_bytes: int) -> None:
        self._window.window_bytes = num_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of states that are in memory now, of all buckets."""
        return self._copies.memory_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all states that move."""
        return self._copies.num_bytes

    @property
    def expected_bytes(self) -> int:
        """Bytes of all states, before the first step as well."""
        return sum(map(self._expected_bytes, self.buckets))

    @property
    def staying_bytes(self) -> int:
        """Bytes of states in memory between two steps, once writes have ended."""
        stays = self.buckets[self._window.first_to_stay(self.buckets) :]
        return sum(map(self._expected_bytes, stays))

    def wait_for_writes(self) -> None:
        """Blocks until no write is under way."""
        self._copies.wait_for_writes()

    def _find_buckets(self) -> None:
        """Puts new parameters into buckets of their own, and drops buckets whose ones are gone."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        new = {id(param): param for group in groups for param in group["params"]}
        for bucket in list(self.buckets):
            if not any(id(param) in new or param in state for param in bucket.params):
                bucket.forget()
                self.buckets.remove(bucket)
            for param in bucket.params:
                new.pop(id(param), None)
        params = sorted(new.values(), key=self._order)
        for own in divided(params, self._places.usual_bytes, self._bucket_bytes):
            self.buckets.append(Bucket(own, self._device, self._copies.ended))

    def _expected_bytes(self, bucket: Bucket) -> int:
        usual_bytes = sum(map(self._places.usual_bytes, bucket.params))
        if not self.meter.num_steps:  # the bucket may have only parameters that move so far
            return max(bucket.num_bytes, usual_bytes)
        return bucket.num_bytes or usual_bytes

    def _names(self, bucket: Bucket) -> str:
        return names_of(bucket.params, self._optimizer)

    # -- Between steps ----------------------------------------------------------------------------

    @_makes_ordinary_tensors
    def expose(self, *, lost: list[Bucket] | None = None) -> None:
        """Puts all states in their places, without moving them: for checkpoints and scripts.

        What is on a drive is compared with its checksums and mapped: the system can take back the
        memory of pages that were read. A change in place is a change of the state. Lasts until the
        next step.

        Args:
            lost: gets the buckets that could not be read, whose states stay away; None: an error.

        Raises:
            LostStateError: states could not be read, or are not those that were written.
            InterruptedStepError: an error or an interrupt ended the last step.
        """
        if not self._num_loading:
            self._check_whole()
        if self._exposed:
            return
        self._process.check()
        unshown: Unshown = []
        ways = self._optimizer, self._places.attach, self._window.bring, unshown
        try:
            for bucket in self.buckets:
                bucket.give_up_read()
                if bucket.where is Where.IN_MEMORY and not self._device.is_host:
                    self._window.put_away(bucket)  # a checkpoint needs all of them on the host
            self.wait_for_writes()
            for bucket in self.buckets:
                if bucket.layout is None:
                    continue
                try:
                    self._exposed.append(shown(bucket, *ways))
                except LostStateError:
                    if lost is None or self._places.have_params(bucket):
                        raise
                    lost.append(bucket)
        except BaseException:
            self.conceal()
            raise
        warn_of(unshown)

    @_makes_ordinary_tensors
    def conceal(self, *, keeps: bool = True) -> None:
        """Ends `expose`: takes over what was changed or replaced meanwhile.

        A change through `.data` or numpy leaves no trace. So it reads what is on a drive once more,
        for new checksums.

        Args:
            keeps: states are needed afterwards.

        Raises:
            LostStateError: some were replaced, and the others could not be read.
        """
        while self._exposed:
            one = self._exposed[-1]
            if keeps and (not one.keeps(self._optimizer) or self._places.have_more(one.bucket)):
                read = functools.partial(one.to_memory, self._optimizer, self._places.attach)
                self._copies.bring(one.bucket, read)
                self._adopt(one.bucket)
            else:
                self._places.leave(one.bucket, self._places.states_of(one.bucket))
            self._exposed.pop()  # frees the bucket's old block, if it has another now

    @contextlib.contextmanager
    def loading(self, *, at_once: bool = False, is_whole: bool = True) -> Iterator[None]:
        """A context around code that loads states: shows all of them, then takes over the new ones.

        Args:
            at_once: take over at the end of this context even if it is within another one. The code
                replaces all states, so one that could not be read back is no error.
            is_whole: states are loaded too, and not main weights alone. Only then may a run go on
                after an error or an interrupt has ended its last step.
        """
        self._num_loading += 1
        lost: list[Bucket] = []
        try:
            self.expose(lost=lost if at_once else None)
            yield
            self._is_half_done = self._is_half_done and not is_whole
        finally:
            self._num_loading -= 1
            if at_once or not self._num_loading:
                for bucket in lost:
                    if not self._places.are_away(bucket):
                        bucket.forget()
                self.conceal()
                self.adopt()
            if self._num_loading:
                self.expose()

    @_makes_ordinary_tensors
    def adopt(self) -> None:
        """Takes all tensors that are in the optimizer's state now, and puts them on tiers.

        Called after states were loaded, and when states exist before the offload begins.
        """
        self.conceal()
        self._find_buckets()
        for bucket in self.buckets:
            if bucket.layout is None:
                self._adopt(bucket)

    def _adopt(self, bucket: Bucket) -> None:
        """Takes what is in the places of a bucket's tensors now, instead of what it had."""
        states = self._places.states_of(bucket)
        for param, state in states.items():
            state.update(
                {k: v.tensor_for(param) for k, v in state.items() if isinstance(v, LazyStateTensor)}
            )
        self._window.wait_for_room(self._expected_bytes(bucket))
        bucket.take_back()
        bucket.layout = None
        self._places.take_over(bucket, states, {})
        self._window.keep(bucket)

    @_makes_ordinary_tensors
    def make_states(self, make: Callable[[torch.optim.Optimizer], None]) -> None:
        """Makes states before the first step, bucket by bucket, so that a checkpoint can be loaded.

        Args:
            make: fills the state of the optimizer that it gets: each time one with some of the
                parameters that have no state yet.
        """
        self.conceal()
        self._find_buckets()
        for bucket in self.buckets:
            if self._places.states_of(bucket):
                continue
            self._window.bring(bucket)
            self._places.attach(bucket, views := bucket.views)
            self._places.take_over(bucket, self._slice.fill(bucket.params, make), views)
            self._window.keep(bucket)

    def close(self, *, restore: bool = True) -> None:
        """Ends the offload and closes the tiers.

        Args:
            restore: first brings all states back to memory. Else those that are away are lost,
                which is right if training has ended and memory cannot hold all of them.

        Raises:
            LostStateError: states could not be read back; all others are in memory.
            OffloadError: a script has changed what was in the place of a state; all others are in
                memory.
        """
        self._process.check()
        error: Exception | None = None
        try:
            try:
                self.conceal(keeps=restore)
            except Exception as one:
                error = one
            for bucket in self.buckets if restore else ():
                try:
                    self._restore(bucket)
                except Exception as one:
                    error = error or one
        finally:
            self._slice.close()
            self.buckets.clear()
            self._when_dropped.detach()
            for tier in self.tiers:
                tier.close()
        if error is not None:
            raise error

    @_makes_ordinary_tensors
    def _restore(self, bucket: Bucket) -> None:
        """Puts a bucket's tensors in their places, in memory, for good."""
        self._window.bring(bucket)
        self._places.attach(bucket, views := bucket.views)
        self._optimizer.state.update(self._places.states_with(bucket, views))
