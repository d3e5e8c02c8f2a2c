# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer on tiers: `OptimizerStates`, whose `step` brings them by and by.

Read `step` top to bottom: a bucket is read, its parameters are updated by the optimizer's own
step, it goes back; the next one is read and the last one written meanwhile.

Note [The window]
At most `window_bytes` of states are in memory. The last buckets of a step stay there, and need
neither a write nor a read: a step moves what does not fit, once out and once in, and nothing else.
Steps go through the buckets in turn forwards and backwards, so that those that stayed come first:
they are updated at once, and then all of the window is there to read ahead and to write behind.

This is memory of the device that the step runs on. An accelerator's is what a run is short of:
there it is three buckets, of whatever size (one arrives, one is updated, one leaves), and none
between steps. `open.py` puts what --optimizer-state-window asks for into page-locked host memory
instead, as the first tier: what it holds it keeps, so that again a step moves to the drives and
back only what does not fit. Copies over the link overlap the update of the bucket before.

Note [The only copy]
Unlike an activation, a state that is lost cannot be made again. Memory is let go only once a write
has ended well; a bucket that no tier takes stays in memory; the tiers keep checksums; a read that
fails twice ends the training with `LostStateError`, and nothing goes on with other numbers.

Note [A step that ends in its middle]
An error or an interrupt between the first bucket's update and the last one's leaves some parameters
updated and others not. In memory torch goes on with them, and saves them, without a word. Here
whoever takes the next step, or looks at states, gets `InterruptedStepError` until states are loaded
again; `close` brings them back as they are.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.device.allocator import return_freed_memory
from megatron.offload.device.device import Device
from megatron.offload.errors import LostStateError
from megatron.offload.sizes import format_size
from megatron.offload.states.bucket import Bucket, Where
from megatron.offload.states.exposed import Exposed
from megatron.offload.states.faults import (
    interrupted_step,
    lost,
    warn_of_full_tiers,
    warn_of_retry,
)
from megatron.offload.states.layout import Layout, Name
from megatron.offload.states.loaded import Loaded
from megatron.offload.states.optimizer_slice import OptimizerSlice, State
from megatron.offload.states.sharded import as_part_of, local_of
from megatron.offload.states.stand_in import is_stand_in, stand_in
from megatron.offload.states.statistics import StatesMeter
from megatron.offload.tiers.tier import Tier

logger = logging.getLogger(__name__)


class OptimizerStates:
    """Keeps an optimizer's states on tiers, and runs its steps.

    Between steps the optimizer's `state` has meta tensors in place of those that are away, and
    parameters that are away, such as main weights, are full of NaN. `expose` shows the real ones.

    Args:
        optimizer: updates each parameter by its gradient and state alone (Adam, SGD, and most).
        tiers: where buckets go; the first that takes one has it. Closed with this.
        device: where states are in memory, for the optimizer's step.
        bucket_bytes: of states that move together.
        window_bytes: of states that may be in its memory; one bucket always may, of an accelerator
            three.
        moves_param: whether a parameter itself moves with its states, as main weights do.
        updated: told of the parameters of each bucket once they are updated and still in memory.
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
        step_by: OptimizerSlice | None = None,
    ) -> None:
        self.tiers = list(tiers)
        self.window_bytes = window_bytes
        self.buckets: list[Bucket] = []
        self.checkpoint = ""  # to resume from should states be lost; empty: not known
        self._optimizer = optimizer
        self._slice = step_by or OptimizerSlice(optimizer)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._moves_param = moves_param
        self._updated = updated
        self._goes_up = False  # the order of the last step
        self._exposed: list[Exposed] = []
        self._num_loading = 0
        self._is_half_done = False  # see Note [A step that ends in its middle]
        self._refused_bytes = 0  # that no tier took in this step
        self._refusal = ""  # why, if a write failed
        self._has_warned = False
        # Told by I/O threads: a write or a read has ended. Held for a few instructions.
        self._changed = threading.Condition()
        self.meter = StatesMeter(device, self.tiers, lambda: self.memory_bytes)
        self._find_buckets()
        self.adopt()

    # -- A step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates all parameters that have a gradient, bucket by bucket.

        Raises:
            LostStateError: states could not be read back.
            InterruptedStepError: the step before, or any since the last load, ended in its middle.
        """
        self._check_whole()
        self.conceal()
        self._find_buckets()
        with self.meter.step():
            self._step()

    def _step(self) -> None:
        self._goes_up = not self._goes_up
        buckets = [one for one in self._in_order() if _wants_update(one)]
        stays = self._first_to_stay(buckets)
        ahead = collections.deque(buckets)
        self._slice.begin_step([bucket.params for bucket in buckets])
        self._refused_bytes = 0
        for index, bucket in enumerate(buckets):
            self._read_ahead(ahead)
            with self.meter.waiting():
                self._bring(bucket, ahead)
            while ahead and ahead[0].where is not Where.ON_TIER:
                ahead.popleft()
            self._is_half_done = True
            had_none = bucket.where is Where.NOWHERE
            with self.meter.updating():
                self._update(bucket)
            if had_none and bucket.where is not Where.NOWHERE and self._device.is_host:
                return_freed_memory()  # of what the optimizer made: else all of it stays
            self.meter.updated(bucket.num_bytes)
            if index < stays:
                self._put_away(bucket)
        self._slice.end_step()
        self._is_half_done = False
        self._warn_of_refusals()

    def _check_whole(self) -> None:
        """Raises InterruptedStepError after a step that ended in its middle."""
        if self._is_half_done:
            raise interrupted_step(self.checkpoint)

    def prefetch(self) -> None:
        """The next step is near: begins to read what it needs first, as far as there is room."""
        if self._exposed or self._is_half_done:
            return
        self.meter.prefetch()
        self._goes_up = not self._goes_up
        ahead = collections.deque(one for one in self._in_order() if one.where is Where.ON_TIER)
        self._goes_up = not self._goes_up
        self._read_ahead(ahead)

    def _in_order(self) -> Iterator[Bucket]:
        return iter(self.buckets) if self._goes_up else reversed(self.buckets)

    def _first_to_stay(self, buckets: Sequence[Bucket]) -> int:
        """From which one on buckets stay in memory: see Note [The window]. Others come beside."""
        sizes = [self._expected_bytes(one) for one in buckets]
        beside = 1 if self._device.is_host else ON_DEVICE
        room = self._room_bytes - beside * max(sizes, default=0)
        index = len(buckets)
        while index and room >= sizes[index - 1]:
            room -= sizes[index - 1]
            index -= 1
        return index

    def _read_ahead(self, ahead: collections.deque[Bucket]) -> None:
        """Begins to read the next buckets, as many as the window has room for."""
        while ahead:
            bucket = ahead[0]
            bucket.take_back()
            if bucket.where is Where.ON_TIER:
                if not self._has_room(bucket.num_bytes):
                    return
                try:
                    bucket.begin_read()
                except Exception:  # whoever needs it tries again, and says so
                    return
            ahead.popleft()

    def _has_room(self, num_bytes: int) -> bool:
        return self.memory_bytes + num_bytes <= self._room_bytes

    @property
    def _room_bytes(self) -> int:
        """Of the window; on an accelerator the three largest buckets fit, or nothing overlaps."""
        if self._device.is_host:
            return self.window_bytes
        return max(self.window_bytes, ON_DEVICE * max(map(self._expected_bytes, self.buckets)))

    def _bring(self, bucket: Bucket, ahead: collections.deque[Bucket] | None = None) -> None:
        """Has a bucket in memory, where the calling thread's next operations may use it."""
        bucket.take_back()
        if bucket.storage is None:
            self._wait_for_room(self._expected_bytes(bucket))
        if bucket.where in (Where.NOWHERE, Where.IN_MEMORY):
            return
        try:
            if bucket.where is Where.ON_TIER:
                bucket.begin_read()
            with self._changed:
                while bucket.is_coming:
                    if ahead:
                        self._read_ahead(ahead)  # writes that have ended have made room
                    self._changed.wait()
            events = bucket.end_read()
        except Exception as error:
            warn_of_retry(error)
            events = self._read_again(bucket)
        if events is not None:
            assert bucket.storage is not None
            self._device.use_after(bucket.storage, events)

    def _read_again(self, bucket: Bucket) -> Sequence[Any] | None:
        try:
            return bucket.read()
        except Exception as error:
            raise lost(bucket, self._optimizer, error, self.checkpoint) from error

    def _is_writing(self) -> bool:
        return any(one.where is Where.WRITING for one in self.buckets)

    def _update(self, bucket: Bucket) -> None:
        """Runs the optimizer's step for the parameters of a bucket that is in memory."""
        self._attach(bucket, views := self._views_of(bucket))
        after = self._slice.step(bucket.params, self._states_with(bucket, views))
        self._updated(bucket.params)
        self._take_over(bucket, after, views)

    def _put_away(self, bucket: Bucket) -> None:
        """Writes a bucket to the first tier that takes it; where none does, it stays."""
        if bucket.where is Where.NOWHERE:
            return  # the optimizer keeps nothing of these parameters
        event = None if self._device.is_host else self._device.record_event()
        if bucket.write_error is not None:
            self._refusal, bucket.write_error = str(bucket.write_error), None
        for tier in self.tiers:
            try:
                if bucket.begin_write(tier, event):
                    return
            except Exception as error:  # its threads are gone, say
                self._refusal = str(error)
        self._refused_bytes += bucket.num_bytes

    def _warn_of_refusals(self) -> None:
        """Once, after a step; what failed on a drive, that drive has said already."""
        if self._refused_bytes and not self._has_warned:
            self._has_warned = True
            warn_of_full_tiers(self._refused_bytes, self.num_bytes, self._room_bytes, self._refusal)

    # -- Where states are -------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Bytes of states that are in memory now, of all buckets."""
        return sum(one.memory_bytes for one in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states that move."""
        return sum(one.num_bytes for one in self.buckets)

    @property
    def expected_bytes(self) -> int:
        """Bytes of all states, before the first step as well."""
        return sum(map(self._expected_bytes, self.buckets))

    @property
    def staying_bytes(self) -> int:
        """Bytes of states in memory between two steps, once writes have ended."""
        stays = self.buckets[self._first_to_stay(self.buckets) :]
        return sum(map(self._expected_bytes, stays))

    def _find_buckets(self) -> None:
        """Puts parameters that are new into buckets of their own."""
        known = {id(param) for bucket in self.buckets for param in bucket.params}
        groups = self._optimizer.param_groups
        params = [p for group in groups for p in group["params"] if id(p) not in known]
        own: list[torch.Tensor] = []
        own_bytes = 0
        for param in params:
            num_bytes = self._usual_bytes(param)
            if own and own_bytes + num_bytes > self._bucket_bytes:
                self.buckets.append(Bucket(own, self._tell_changed))
                own, own_bytes = [], 0
            own.append(param)
            own_bytes += num_bytes
        if own:
            self.buckets.append(Bucket(own, self._tell_changed))

    def _usual_bytes(self, param: torch.Tensor) -> int:
        """Of states of a parameter: Adam's two, and itself where it moves."""
        return local_of(param).nbytes * (3 if self._moves_param(param) else 2)

    def _expected_bytes(self, bucket: Bucket) -> int:
        usual_bytes = sum(map(self._usual_bytes, bucket.params))
        if not self.meter.num_steps:  # it may have nothing yet but parameters that move
            return max(bucket.num_bytes, usual_bytes)
        return bucket.num_bytes or usual_bytes

    def _tell_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _attach(self, bucket: Bucket, views: dict[Name, torch.Tensor]) -> None:
        """Parameters of a bucket that move are its memory from now on."""
        for index, param in enumerate(bucket.params):
            view = views.get((index, PARAM))
            if view is not None:
                param.data = view

    def _movable(self, param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """What moves of a parameter, by key: itself if it does, what has its shape of its state."""
        found = {PARAM: local_of(param)} if self._moves_param(param) else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                found[key] = local_of(value)
        return found

    def _take_over(
        self,
        bucket: Bucket,
        states: dict[torch.Tensor, State],
        views: dict[Name, torch.Tensor],
    ) -> None:
        """Takes a bucket's states into its own memory, and leaves what stands for them.

        Args:
            bucket: in memory, or nowhere yet.
            states: of its parameters, by the optimizer's keys.
            views: the tensors of them that are in its memory already.
        """
        tensors: dict[Name, torch.Tensor] = {}
        for index, param in enumerate(bucket.params):
            for key, value in self._movable(param, states.get(param, {})).items():
                tensors[index, key] = value
        if bucket.layout is None or not bucket.layout.fits(tensors):
            if tensors:
                layout = Layout(tensors)
                storage = layout.new_storage(self._device.device)
                layout.store(tensors.items(), storage)
                bucket.fill(layout, storage)
        else:
            assert bucket.storage is not None
            moved = [
                (name, one)
                for name, one in tensors.items()
                if name not in views or one.data_ptr() != views[name].data_ptr()
            ]
            bucket.layout.store(moved, bucket.storage)
        self._leave(bucket, states)

    def _leave(self, bucket: Bucket, states: dict[torch.Tensor, State]) -> None:
        """Puts what stands for a bucket's tensors in their places."""
        slots = {} if bucket.layout is None else bucket.layout.slots
        for index, param in enumerate(bucket.params):
            if param in states:
                self._optimizer.state[param] = {
                    key: stand_in(slots[index, key]) if (index, key) in slots else value
                    for key, value in states[param].items()
                }
            if (index, PARAM) in slots:
                at = bucket.devices[index]
                param.data = torch.full((), float("nan"), dtype=param.dtype, device=at)
                param.data = param.data.expand(slots[index, PARAM].shape)

    # -- Everybody else ---------------------------------------------------------------------------

    def expose(self) -> None:
        """Shows all states in their places, where they are: for checkpoints and whoever looks.

        What is on a drive is compared with its checksums and mapped, so that reading it takes no
        memory that is not the system's to take back. What is changed in place is changed for good.
        Lasts until the next step.

        Raises:
            LostStateError: states could not be read, or are not those that were written.
            InterruptedStepError: the last step ended in its middle.
        """
        if not self._num_loading:
            self._check_whole()
        if self._exposed:
            return
        try:
            for bucket in self.buckets:
                if bucket.where is Where.READING:
                    self._bring(bucket)
                if bucket.where is Where.IN_MEMORY and not self._device.is_host:
                    self._put_away(bucket)  # a checkpoint has all of them on the host
            self.wait_for_writes()
            for bucket in self.buckets:
                if bucket.layout is not None:
                    self._exposed.append(self._expose(bucket))
        except BaseException:
            self.conceal()
            raise

    def _expose(self, bucket: Bucket) -> Exposed:
        try:
            return Exposed(bucket, self._optimizer, self._attach)
        except OSError as error:
            self._bring(bucket)  # says what is lost, if it is
            logger.warning(
                "optimizer states: %s cannot be shown on their drive (%s); they are in memory "
                "until the next step",
                format_size(bucket.num_bytes),
                error,
            )
            return Exposed(bucket, self._optimizer, self._attach)

    def conceal(self) -> None:
        """Ends `expose`: what was changed or replaced meanwhile is taken over."""
        self._conceal(is_loaded=False)

    def _conceal(self, *, is_loaded: bool) -> None:
        """As `conceal`; after loading all counts as changed, however it was done."""
        while self._exposed:
            one = self._exposed[-1]
            is_replaced = one.is_replaced(self._optimizer) or self._has_more(one.bucket)
            is_changed = is_loaded or one.is_changed()
            if is_replaced or (is_changed and not one.bucket.renew()):
                self._adopt(one.bucket)
            else:
                self._leave(one.bucket, self._states_of(one.bucket))
            self._exposed.pop()  # and with it the place that the bucket had, if it has another

    def _has_more(self, bucket: Bucket) -> bool:
        """Whether states were added to a bucket's: its parameters may have been all of it."""
        assert bucket.layout is not None
        for index, param in enumerate(bucket.params):
            state = self._optimizer.state.get(param, {})
            loaded = {key for key, value in state.items() if isinstance(value, Loaded)}
            for key in loaded | self._movable(param, state).keys():
                if (index, key) not in bucket.layout.slots:
                    return True
        return False

    @contextlib.contextmanager
    def loading(self, *, at_once: bool = False) -> Iterator[None]:
        """Around whatever loads states: all are in their places, and what came is taken over.

        All of it: what is written through `.data` shows nowhere that it was.

        Args:
            at_once: what came is taken over at the end of this, though it is within another one.
        """
        self._num_loading += 1
        try:
            self.expose()
            yield
            self._is_half_done = False
        finally:
            self._num_loading -= 1
            if at_once or not self._num_loading:
                self._conceal(is_loaded=True)
                self.adopt()
            if self._num_loading:
                self.expose()

    def adopt(self) -> None:
        """Takes all tensors that are in the optimizer's state now, and puts them on tiers.

        After states were loaded, and where they were made before they were offloaded.
        """
        self.conceal()
        self._find_buckets()
        for bucket in self.buckets:
            if bucket.layout is None:
                self._adopt(bucket)

    def _adopt(self, bucket: Bucket) -> None:
        """Takes what is in the places of a bucket's tensors now, whatever it had before."""
        states = self._states_of(bucket)
        for param, state in states.items():
            state.update(
                {k: v.tensor_for(param) for k, v in state.items() if isinstance(v, Loaded)}
            )
        self._wait_for_room(self._expected_bytes(bucket))
        bucket.take_back()
        bucket.layout = None
        self._take_over(bucket, states, {})
        self._keep_to_window(bucket)

    def make_states(self, make: Callable[[torch.optim.Optimizer], None]) -> None:
        """Makes states before the first step, for whoever loads into them; bucket by bucket.

        Args:
            make: fills the state of an optimizer that it is given; each time it is one with some
                of the parameters, those that have no state yet.
        """
        self.conceal()
        self._find_buckets()
        for bucket in self.buckets:
            if self._states_of(bucket):
                continue
            self._bring(bucket)
            self._attach(bucket, views := self._views_of(bucket))
            self._take_over(bucket, self._slice.fill(bucket.params, make), views)
            self._keep_to_window(bucket)

    def _views_of(self, bucket: Bucket) -> dict[Name, torch.Tensor]:
        """The tensors of a bucket that is in memory, or has none."""
        if bucket.layout is None:
            return {}
        assert bucket.storage is not None
        return bucket.layout.views(bucket.storage)

    def _keep_to_window(self, bucket: Bucket) -> None:
        """Puts a bucket away that has come to memory, unless there is room for it."""
        if bucket.layout is None:
            bucket.forget()
        elif not self._has_room(0):
            self._put_away(bucket)
            self._wait_for_room(0)

    def _states_with(
        self, bucket: Bucket, views: dict[Name, torch.Tensor]
    ) -> dict[torch.Tensor, State]:
        """A bucket's states, with its tensors where others only stand for them."""
        return {
            param: {
                key: as_part_of(param, views[index, key]) if is_stand_in(value) else value
                for key, value in self._optimizer.state[param].items()
            }
            for index, param in enumerate(bucket.params)
            if self._optimizer.state.get(param)
        }

    def _states_of(self, bucket: Bucket) -> dict[torch.Tensor, State]:
        state = self._optimizer.state
        return {param: state[param] for param in bucket.params if state.get(param)}

    def _wait_for_room(self, num_bytes: int) -> None:
        """Writes that end make room. Where none is under way, the window is exceeded."""
        with self._changed:
            while not self._has_room(num_bytes) and self._is_writing():
                self._changed.wait()

    def wait_for_writes(self) -> None:
        """Blocks until no write is under way."""
        for bucket in self.buckets:
            bucket.wait_for_write()
        for tier in self.tiers:
            tier.wait_for_writes()

    def close(self, *, restore: bool = True) -> None:
        """Ends the tiers.

        Args:
            restore: brings all states back to memory before. Else those that are away are gone,
                which is right where training has ended and all of them would not fit.

        Raises:
            LostStateError: states could not be read back; all others are in memory.
        """
        error: LostStateError | None = None
        try:
            self.conceal()
            for bucket in self.buckets if restore else ():
                try:
                    self._restore(bucket)
                except LostStateError as one:
                    error = error or one
        finally:
            self.buckets = []
            self._slice.close()
            for tier in self.tiers:
                tier.close()
        if error is not None:
            raise error

    def _restore(self, bucket: Bucket) -> None:
        """Puts a bucket's tensors in their places, in memory, for good."""
        self._bring(bucket)
        self._attach(bucket, views := self._views_of(bucket))
        self._optimizer.state.update(self._states_with(bucket, views))


PARAM = "param"  # the key of a parameter that moves itself
ON_DEVICE = 3  # buckets in an accelerator's memory at a time, see Note [The window]


def _wants_update(bucket: Bucket) -> bool:
    return any(
        param.grad is not None or getattr(param, "decoupled_grad", None) is not None
        for param in bucket.params
    )


def state_bytes(optimizers: Iterable[Any]) -> int:
    """Bytes of the tensors in optimizers' states that are in memory."""
    return sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
    )
