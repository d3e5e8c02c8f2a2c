# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer on tiers: `OptimizerStates`, whose `step` brings them by and by.

Read `step` top to bottom: a bucket is read, its parameters are updated by the optimizer's own
step, it goes back; the next one is read and the last one written meanwhile (`window.py`). What is
done where a read or a write fails: `moving/only_copy.py`.

Note [A step that ends in its middle]
An error or an interrupt between the first bucket's update and the last one's leaves some parameters
updated and others not. In memory torch goes on with them, and saves them, without a word. Here
whoever takes the next step, or looks at states, gets `InterruptedStepError` until states are loaded
again; `close` brings them back as they are.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from megatron.offload.device.cuda import check_not_captured
from megatron.offload.device.device import Device
from megatron.offload.errors import STATES_PREFIX
from megatron.offload.machine.allocator import return_freed_memory
from megatron.offload.machine.own_process import OwnProcess
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Where
from megatron.offload.sizes import format_size
from megatron.offload.states.exposed import Exposed
from megatron.offload.states.faults import interrupted_step, names_of
from megatron.offload.states.loaded import Loaded
from megatron.offload.states.optimizer_slice import OptimizerSlice, State
from megatron.offload.states.places import Places
from megatron.offload.states.statistics import StatesMeter
from megatron.offload.states.window import Window
from megatron.offload.tiers.tier import Tier, close_when_dropped

logger = logging.getLogger(__name__)

_Context = contextlib.AbstractContextManager[None]
_nothing = contextlib.nullcontext
_Pieces = Sequence[Sequence[torch.Tensor]]
_F = TypeVar("_F", bound=Callable[..., Any])


def _makes_ordinary_tensors(function: _F) -> _F:
    """Has a function's tensors be of use in a step, though it is called in `inference_mode`."""
    # The first also turns the recording of graphs on, as outside of inference_mode.
    return torch.inference_mode(False)(torch.no_grad()(function))


class OptimizerStates:
    """Keeps an optimizer's states on tiers, and runs its steps.

    Between steps the optimizer's `state` has tensors without bytes in place of those that are
    away, and parameters that are away, such as main weights, are full of NaN. `expose` shows the
    real ones.

    Args:
        optimizer: updates each parameter by its gradient and state alone (Adam, SGD, and most).
        tiers: where buckets go; the first that takes one has it. Closed with this.
        device: where states are in memory, for the optimizer's step.
        bucket_bytes: of states that move together.
        window_bytes: of states that may be in its memory; one bucket always may, of an accelerator
            three.
        moves_param: whether a parameter itself moves with its states, as main weights do.
        updated: told of the parameters of each bucket once they are updated and still in memory.
        changing: gives a context around the update of parameters, `updated` included.
        pieces: divides a bucket's parameters into those that are updated at a time.
        order: of parameters in buckets; those of equal places stay in the optimizer's order.
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
        pieces: Callable[[Sequence[torch.Tensor]], _Pieces] = lambda params: [params],
        order: Callable[[torch.Tensor], int] = lambda param: 0,
        step_by: OptimizerSlice | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._slice = step_by or OptimizerSlice(optimizer)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._updated = updated
        self._changing = changing
        self._pieces = pieces
        self._order = order
        self._places = Places(optimizer, device.device, moves_param)
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
            self.close()  # what has left already comes back
            raise

    # -- A step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates all parameters that have a gradient, bucket by bucket.

        Raises:
            LostStateError: states could not be read back.
            InterruptedStepError: the step before, or any since the last load, ended in its middle.
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
        buckets = [one for one in window.begin_step() if _wants_update(one)]
        stays = window.first_to_stay(buckets)
        ahead = collections.deque(buckets)
        num_known = len(self._optimizer.state)
        pieces = [self._pieces(bucket.params) for bucket in buckets]
        self._slice.begin_step([params for one in pieces for params in one])
        for index, bucket in enumerate(buckets):
            window.read_ahead(ahead)
            with self.meter.waiting():
                window.bring(bucket, ahead)
            while ahead and ahead[0].where is not Where.ON_TIER:
                ahead.popleft()
            self._is_half_done = True
            had_none = bucket.where is Where.NOWHERE
            with self.meter.updating():
                self._update(bucket, pieces[index])
            if had_none and bucket.where is not Where.NOWHERE and self._device.is_host:
                return_freed_memory()  # of what the optimizer made: else all of it stays
            self.meter.updated(bucket.num_bytes)
            if index < stays:
                window.put_away(bucket)
        self._slice.end_step()
        self._sort_states(num_known)
        self._is_half_done = False
        window.end_step()

    def _update(self, bucket: Bucket, pieces: _Pieces) -> None:
        """Runs the optimizer's step for the parameters of a bucket that is in memory."""
        self._places.attach(bucket, views := bucket.views)
        states = self._places.states_with(bucket, views)
        after: dict[torch.Tensor, State] = {}
        for params in pieces:
            with self._changing(params):
                own = {param: states[param] for param in params if param in states}
                after |= self._slice.step(params, own)
                self._updated(params)
        self._places.take_over(bucket, after, views)

    def _sort_states(self, num_known: int) -> None:
        """Has states that are new in the order of the optimizer's parameters, not of buckets.

        Checkpoints list them as the optimizer has made them: those of earlier steps first.

        Args:
            num_known: states that were there before.
        """
        state = self._optimizer.state
        new = set(itertools.islice(state, num_known, None))
        for group in self._optimizer.param_groups if new else ():
            for param in [param for param in group["params"] if param in new]:
                state[param] = state.pop(param)

    def _check_whole(self) -> None:
        """Raises InterruptedStepError after a step that ended in its middle."""
        if self._is_half_done:
            raise interrupted_step(self._copies.checkpoint)

    def prefetch(self) -> None:
        """The next step is near: begins to read what it needs first, as far as there is room."""
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
        """To resume from should states be lost; empty: it is not known."""
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
        """Puts parameters that are new into buckets of their own."""
        known = {id(param) for bucket in self.buckets for param in bucket.params}
        groups = self._optimizer.param_groups
        params = [p for group in groups for p in group["params"] if id(p) not in known]
        params.sort(key=self._order)
        own: list[torch.Tensor] = []
        own_bytes = 0
        for param in params:
            num_bytes = self._places.usual_bytes(param)
            if own and own_bytes + num_bytes > self._bucket_bytes:
                self._add_bucket(own)
                own, own_bytes = [], 0
            own.append(param)
            own_bytes += num_bytes
        if own:
            self._add_bucket(own)

    def _add_bucket(self, params: Sequence[torch.Tensor]) -> None:
        self.buckets.append(Bucket(params, self._device, self._copies.ended))

    def _expected_bytes(self, bucket: Bucket) -> int:
        usual_bytes = sum(map(self._places.usual_bytes, bucket.params))
        if not self.meter.num_steps:  # it may have nothing yet but parameters that move
            return max(bucket.num_bytes, usual_bytes)
        return bucket.num_bytes or usual_bytes

    def _names(self, bucket: Bucket) -> str:
        return names_of(bucket.params, self._optimizer)

    # -- Everybody else ---------------------------------------------------------------------------

    @_makes_ordinary_tensors
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
        self._process.check()
        try:
            for bucket in self.buckets:
                if bucket.where is Where.READING:
                    self._window.bring(bucket)
                if bucket.where is Where.IN_MEMORY and not self._device.is_host:
                    self._window.put_away(bucket)  # a checkpoint has all of them on the host
            self.wait_for_writes()
            for bucket in self.buckets:
                if bucket.layout is not None:
                    self._exposed.append(self._expose(bucket))
        except BaseException:
            self.conceal()
            raise

    def _expose(self, bucket: Bucket) -> Exposed:
        try:
            return Exposed(bucket, self._optimizer, self._places.attach)
        except OSError as error:
            self._window.bring(bucket)  # says what is lost, if it is
            logger.warning(
                "optimizer states: %s cannot be shown on their drive (%s); they are in memory "
                "until the next step",
                format_size(bucket.num_bytes),
                str(error),
            )
            return Exposed(bucket, self._optimizer, self._places.attach)

    @_makes_ordinary_tensors
    def conceal(self, *, keeps: bool = True) -> None:
        """Ends `expose`: what was changed or replaced meanwhile is taken over.

        However it was changed: what is written through `.data` or numpy shows nowhere that it was.
        So what is on a drive is read once more, for its checksums.

        Args:
            keeps: states are needed afterwards.
        """
        while self._exposed:
            one = self._exposed[-1]
            if keeps and (self._is_replaced(one) or not self._is_renewed(one.bucket)):
                self._adopt(one.bucket)
            else:
                self._places.leave(one.bucket, self._places.states_of(one.bucket))
            self._exposed.pop()  # and with it the place that the bucket had, if it has another

    def _is_renewed(self, bucket: Bucket) -> bool:
        try:
            bucket.renew()
        except OSError:
            return False  # only in memory
        return True

    def _is_replaced(self, one: Exposed) -> bool:
        return one.is_replaced(self._optimizer) or self._places.have_more(one.bucket)

    @contextlib.contextmanager
    def loading(self, *, at_once: bool = False, is_whole: bool = True) -> Iterator[None]:
        """Around whatever loads states: all are in their places, and what came is taken over.

        Args:
            at_once: what came is taken over at the end of this, though it is within another one.
            is_whole: states come too, and not main weights alone. Only then may a run go on whose
                last step ended in its middle.
        """
        self._num_loading += 1
        try:
            self.expose()
            yield
            self._is_half_done = self._is_half_done and not is_whole
        finally:
            self._num_loading -= 1
            if at_once or not self._num_loading:
                self.conceal()
                self.adopt()
            if self._num_loading:
                self.expose()

    @_makes_ordinary_tensors
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
        states = self._places.states_of(bucket)
        for param, state in states.items():
            state.update(
                {k: v.tensor_for(param) for k, v in state.items() if isinstance(v, Loaded)}
            )
        self._window.wait_for_room(self._expected_bytes(bucket))
        bucket.take_back()
        bucket.layout = None
        self._places.take_over(bucket, states, {})
        self._window.keep(bucket)

    @_makes_ordinary_tensors
    def make_states(self, make: Callable[[torch.optim.Optimizer], None]) -> None:
        """Makes states before the first step, for whoever loads into them; bucket by bucket.

        Args:
            make: fills the state of an optimizer that it is given; each time it is one with some
                of the parameters, those that have no state yet.
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
        """Ends the tiers.

        Args:
            restore: brings all states back to memory before. Else those that are away are gone,
                which is right where training has ended and all of them would not fit.

        Raises:
            LostStateError: states could not be read back; all others are in memory.
            OffloadError: somebody has changed what was in the place of some; as before.
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
