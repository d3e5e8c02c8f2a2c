# SPDX-License-Identifier: Apache-2.0
"""The order in which a layer-major step runs units and micro-batches: `LayerMajorSchedule`.

Read `run` top to bottom. U units, M micro-batches:

    forward   unit 0    micro-batches 0 ... M-1     and so on, up to unit U-2
    both      unit U-1  micro-batches 0 ... M-1     each forward, loss and backward at once
    backward  unit U-2  micro-batches 0 ... M-1     and so on, down to unit 0

Note [The same sums]
Every parameter's gradient is the sum of those of all micro-batches, added one after the other in
the order of their numbers, as in a step that runs one micro-batch after the other: the same bits.
So is what adds up within a micro-batch: of a tensor that layers of several units take, and of a
parameter that several units use (an output layer tied to the embedding), see Note [The sums of
autograd] in `graph_cuts.py`.
What a layer keeps from one micro-batch to the next, as BatchNorm its running means, meets them in
the same order too. If it runs again in backward it meets all of them before the first one again.
With `alternates` every second unit goes through the micro-batches backwards, so that what a unit
has just handed over is used next. Sums are added in that order, and what layers keep over
micro-batches, with all that depends on it, is of that order.

Note [Evaluation in units]
`evaluate` runs forward passes whose graphs are not needed, so nothing is cut, and a pass may run
layers in any order and as often as it likes: each pauses where it comes to another unit, and that
unit's turn is for all passes that wait for it. A turn takes them in ascending order, so what layers
keep from one batch to the next is as without units. Most evaluations draw no random numbers. Where
one does, each pass goes on alone from there to its end, in ascending order, which draws the same
ones; numbers that are drawn behind the last layers cost nothing more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.errors import STEPS_PREFIX
from megatron.offload.layer_major.boundary import AHEAD
from megatron.offload.layer_major.config import refusal
from megatron.offload.layer_major.micro_batch import MicroBatch
from megatron.offload.layer_major.order import micro_batch_order
from megatron.offload.layer_major.other_numbers import OtherNumbers
from megatron.offload.layer_major.pausable_call import running_call
from megatron.offload.layer_major.random_numbers import Generators, RandomNumbers
from megatron.offload.layer_major.unit_passes import UnitPasses

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LayerMajorSchedule:
    """Runs steps of a model unit by unit.

    Args:
        units: of the layers, counted from 0 in the order in which they run.
        device: of the model.
        generators: that the model draws random numbers from.
        others: random numbers of the model that nothing counts.
        varies: whether a micro-batch draws more or fewer random numbers in each step.
        alternates: every second unit takes the micro-batches backwards; other sums, see the Note.
        on_any_rank: whether something is so on one of the ranks that must run passes in the same
            order, because they meet in collectives within them.
    """

    def __init__(
        self,
        units: Mapping[Any, int],
        device: torch.device,
        generators: Generators,
        *,
        others: OtherNumbers | None = None,
        varies: Callable[[], bool] = lambda: False,
        alternates: bool = False,
        on_any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.num_units = max(units.values()) + 1
        self._units = units
        self._device = device
        self._random = RandomNumbers(generators, others, varies)
        self._alternates = alternates
        self._on_any_rank = on_any_rank
        self._has_warned = False
        self._under_way: dict[int, MicroBatch[Any]] = {}  # by the address of their calls

    def run(
        self,
        forwards: Sequence[Callable[[], T]],
        backward: Callable[[T], None],
        passes: UnitPasses,
    ) -> list[T]:
        """Runs all passes of a step; returns what the forward passes gave.

        Args:
            forwards: of each micro-batch: runs the model and gives a result with its loss.
            backward: of such a result, as if it were the only micro-batch. What it reaches of the
                graph is the last unit.
            passes: what is around each pass.

        Raises:
            ConfigurationError: the model does not run its layers in units.
        """
        counts = self._on_any_rank(not self._random.knows(len(forwards)))
        starts = None if counts else self._random.starts()
        self._random.begin()
        batches = [
            MicroBatch(n, f, passes, self._device, self.num_units) for n, f in enumerate(forwards)
        ]
        try:
            results = self._run_forwards(batches, starts, backward)
            for turn, unit in enumerate(reversed(range(self.num_units - 1)), self.num_units):
                ordered = [batches[n] for n in self._order(turn, len(batches))]
                self._run_backwards(ordered, unit, turn)
        finally:
            for one in batches:
                one.call.abandon()
            self._under_way.clear()
        return results

    def evaluate(self, forwards: Sequence[Callable[[], T]], passes: UnitPasses) -> list[T]:
        """Runs forward passes without gradients; returns what they gave.

        Args:
            forwards: of each batch: runs the model and gives a result.
            passes: what is around each pass.

        Raises:
            ConfigurationError: a pass has drawn random numbers before one that comes first.
        """
        with torch.no_grad():
            batches = [
                MicroBatch(n, f, passes, self._device, self.num_units, evaluates=True)
                for n, f in enumerate(forwards)
            ]
        try:
            self._evaluate(batches)
            return [one.call.take_result() for one in batches]
        finally:
            for one in batches:
                one.call.abandon()
            self._under_way.clear()

    def enter_layer(self, layer: Hashable, arguments: T) -> T:
        """Call before a layer runs: waits for its unit's turn; returns the arguments to run with.

        Args:
            layer: whose forward is about to run.
            arguments: of it, whatever holds tensors.
        """
        unit, call = self._units.get(layer), running_call()
        batch = self._under_way.get(id(call))
        if unit is None or batch is None:
            return arguments
        if batch.evaluates:
            batch.enter_unit(unit, arguments)
            return arguments
        if not torch.is_grad_enabled():
            batch.hides_layers = True
            return arguments
        batch.has_layers = True
        batch.cuts.leave()
        if unit != batch.unit:
            batch.pause_before(unit, arguments)
        batch.hidden.check(arguments)
        entered: T = batch.cuts.enter(arguments) if unit else arguments
        return entered

    # -- Forward --------------------------------------------------------------------------------

    def _run_forwards(
        self,
        batches: list[MicroBatch[T]],
        starts: Sequence[dict[str, torch.Tensor]] | None,
        backward: Callable[[T], None],
    ) -> list[T]:
        """All forward passes, and backward of the last unit."""
        last = self.num_units - 1
        results: dict[int, T] = {}

        def run_last(batch: MicroBatch[T], *, is_last: bool) -> None:
            self._forward(batch, last, is_last=is_last)
            result = results[batch.number] = batch.call.take_result()
            batch.cuts.check(last, _nodes_of(result))
            batch.cuts.find_shared(_nodes_of(result), autocasts=batch.autocasts)
            with _backward(batch, last, is_last=is_last):
                backward(result)
            batch.end_backward()

        if starts is None:  # see Note [Random numbers as before]
            begins = []
            for batch in batches:
                batch.random = self._random.generators.states()
                begins.append(batch.random)
                batch.is_next = True  # it goes on at once
                for unit in range(last):
                    self._forward(batch, unit, is_last=True)
                batch.is_next = False
                run_last(batch, is_last=batch is batches[-1])
            self._random.count(begins, [one.random for one in batches])
        else:
            for batch, start in zip(batches, starts, strict=True):
                batch.random = start
            for unit in range(last):
                order = self._order(unit, len(batches))
                for number in order:
                    self._look_ahead(batches, unit, number)
                    self._forward(batches[number], unit, is_last=number == order[-1])
            order = self._order(last, len(batches))
            for number in order:
                self._look_ahead(batches, last, number)
                run_last(batches[number], is_last=number == order[-1])
            self._check_random(batches, starts)
        self._random.generators.set_states(batches[-1].random)
        return [results[one.number] for one in batches]

    def _forward(self, batch: MicroBatch[Any], unit: int, *, is_last: bool) -> None:
        """Runs a micro-batch through a unit."""
        self._go_on(batch, unit, is_last=is_last)
        if batch.has_ended != (unit == self.num_units - 1):
            raise refusal(
                f"the forward pass of micro-batch {batch.number} ended in unit {batch.unit + 1} of "
                f"{self.num_units}: a layer-major step needs models that run their layers with "
                "gradients, and checkpoints with use_reentrant=False"
            )

    def _go_on(self, batch: MicroBatch[Any], unit: int, *, is_last: bool) -> None:
        """Runs a forward pass up to its next pause, or to its end."""
        generators = self._random.generators
        with batch.passes.forward(unit, batch.number, is_last=is_last):
            generators.set_states(batch.random)
            self._under_way[id(batch.call)] = batch
            batch.has_ended = batch.call.go_on()
            batch.random = generators.states()

    def _check_random(
        self, batches: Sequence[MicroBatch[Any]], starts: Sequence[dict[str, torch.Tensor]]
    ) -> None:
        """Whether each micro-batch has begun where the one before has ended."""
        self._random.check_others()
        for before, start in zip(batches, starts[1:], strict=False):
            if any(not torch.equal(before.random[name], one) for name, one in start.items()):
                self._random.forget()
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%sthe micro-batches of a step have drawn more or fewer random numbers "
                        "than in the step before; where the model uses dropout, this step has "
                        "dropped other values than it would have without --layer-major-units",
                        STEPS_PREFIX,
                    )
                return

    # -- Evaluation, see Note [Evaluation in units] ---------------------------------------------

    def _evaluate(self, batches: Sequence[MicroBatch[Any]]) -> None:
        """Takes turns until all passes have ended, or one has drawn a random number."""
        begin = self._random.generators.states()
        self._random.begin()
        for batch in batches:
            batch.random = begin
        left, unit = list(batches), 0
        while left:
            turn = [one for one in left if one.unit == unit]
            for batch in turn:
                coming = [*turn[turn.index(batch) + 1 :], *left]
                self._announce(left, [(unit, one) for one in coming if not one.has_ended])
                self._go_on(batch, unit, is_last=batch is turn[-1])
                if self._random.has_drawn(begin, batch.random):
                    self._evaluate_alone(left, batch, begin)
                    return
            left = [one for one in left if not one.has_ended]
            if left:  # the next unit that a pass waits for, after the last one the first
                unit += 1 + min((one.unit - unit - 1) % self.num_units for one in left)
                unit %= self.num_units

    def _evaluate_alone(
        self,
        left: Sequence[MicroBatch[Any]],
        drawing: MicroBatch[Any],
        begin: dict[str, torch.Tensor],
    ) -> None:
        """Runs each pass to its end before the next one goes on: one has drawn random numbers."""
        self._announce(left, [])
        generators, has_drawn = self._random.generators, False
        for batch in left:
            self._random.begin()
            if has_drawn:
                batch.random = generators.states()
            has_drawn |= batch is drawing
            while not batch.has_ended:
                self._go_on(batch, batch.unit, is_last=True)
            generators.set_states(batch.random)
            if not has_drawn and self._random.has_drawn(begin, batch.random):
                raise refusal(
                    f"evaluation: batch {drawing.number} has drawn random numbers in an earlier "
                    f"unit than batch {batch.number}, which comes first and would have drawn them; "
                    "run these batches one after the other, without LayerMajor"
                )

    # -- Backward -------------------------------------------------------------------------------

    def _run_backwards(self, batches: Sequence[MicroBatch[Any]], unit: int, turn: int) -> None:
        """Backward of a unit that is not the last one, for all micro-batches."""
        of_step = sorted(batches, key=lambda one: one.number)
        batches = [one for one in batches if one.cuts.has_gradients(unit)]
        for batch in batches:
            self._look_ahead(of_step, turn, batch.number)
            batch.passes.prepare_backward(unit, batch.number)
            roots, gradients = batch.cuts.roots(unit)
            is_last = batch is batches[-1]
            with _backward(batch, unit, is_last=is_last):
                torch.autograd.backward(roots, gradients)
            del roots, gradients
            batch.end_backward()

    def _look_ahead(self, batches: Sequence[MicroBatch[Any]], turn: int, micro_batch: int) -> None:
        """A micro-batch runs in a turn: reads what the next ones need."""
        orders = [(s, n) for s in (turn, turn + 1) for n in self._order(s, len(batches))]
        begin = orders.index((turn, micro_batch)) + 1
        self._announce(batches, [(then, batches[number]) for then, number in orders[begin:]])

    def _announce(
        self,
        batches: Iterable[MicroBatch[Any]],
        coming: Sequence[tuple[int, MicroBatch[Any]]],
    ) -> None:
        """Whose turns come next, and which turns: reads what the first of them need."""
        for batch in batches:
            batch.is_next = False
        for then, batch in coming[:AHEAD]:
            batch.is_next = True
            batch.read_ahead(then, self.num_units)

    def _order(self, turn: int, num_micro_batches: int) -> Sequence[int]:
        return micro_batch_order(turn, num_micro_batches, alternates=self._alternates)


@contextlib.contextmanager
def _backward(batch: MicroBatch[Any], unit: int, *, is_last: bool) -> Iterator[None]:
    """Around a backward pass of a micro-batch through a unit."""
    with (
        batch.passes.backward(unit, batch.number, is_last=is_last),
        _used_once(),
        batch.cuts.backward(unit, batch.passes.elsewhere),
    ):
        yield


@contextlib.contextmanager
def _used_once() -> Iterator[None]:
    """Around a backward pass, which may have come into the graph of another micro-batch."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise refusal(
            "a backward pass has come to a graph that is used up: a micro-batch has used what "
            "another one has computed (does a layer keep a state in an attribute?), which a "
            "layer-major step cannot follow; run this model micro-batch by micro-batch"
        ) from error


def _nodes_of(result: Any) -> list[Any]:
    """Where the graph of what a forward pass gave begins."""
    tensors: Iterable[Any] = tree_leaves(result)
    return [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
