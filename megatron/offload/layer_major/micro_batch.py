# SPDX-License-Identifier: Apache-2.0
"""A micro-batch on its way through the units: `MicroBatch`, whose forward pass pauses between them.

The schedule says when it goes on, and hooks of layers where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_major.boundary import HiddenStates
from megatron.offload.layer_major.config import refusal
from megatron.offload.layer_major.graph_cuts import GraphCuts
from megatron.offload.layer_major.pausable_call import PausableCall
from megatron.offload.layer_major.unit_passes import UnitPasses

T = TypeVar("T")


class MicroBatch(Generic[T]):
    """A micro-batch on its way through the units."""

    def __init__(
        self,
        number: int,
        forward: Callable[[], T],
        passes: UnitPasses,
        device: torch.device,
        num_units: int,
        *,
        evaluates: bool = False,
    ) -> None:
        self.number = number
        self.unit = 0
        self.evaluates = evaluates  # no backward pass follows
        self.has_ended = False  # its forward pass
        self.has_layers = False  # one has run, with gradients
        self.hides_layers = False  # one has run without
        self.autocasts = False  # where it has paused autocast keeps what it casts
        self._last = num_units - 1
        self.cuts = GraphCuts(number, passes.boundary)
        self.hidden = HiddenStates(passes.boundary, has_graphs=not evaluates)
        self.is_next = False  # its turn comes so soon that what waits for it stays in memory
        self.random: dict[str, torch.Tensor] = {}  # states of the generators where it stands
        self._device = device
        self._forward = forward
        self.passes = passes
        self._before_pause: Callable[[], None] = lambda: None
        self.call: PausableCall[T] = PausableCall(self._run, f"micro-batch {number}", device)

    def _run(self) -> T:
        with self.passes.whole_forward() as self._before_pause:
            self.cuts.begin()
            result = self._forward()
            self.cuts.leave()
            if self.unit < self._last and self.has_layers and not self.hides_layers:
                # The layers of the last units were skipped.
                self.pause_before(self._last, result)
                result = self.cuts.enter(result)
            self.cuts.end()
            return result

    def pause_before(self, unit: int, arguments: Any) -> None:
        """A layer of another unit comes next: waits for its turn. Units between may have none."""
        if unit < self.unit:
            raise refusal(
                f"a layer of unit {unit + 1} was called in unit {self.unit + 1}; a layer-major "
                "step needs models that run their layers in one order, each once; run this model "
                "micro-batch by micro-batch"
            )
        while self.unit < unit:
            self._pause(self.unit + 1, arguments)

    def enter_unit(self, unit: int, arguments: Any) -> None:
        """A layer comes next in an evaluation: waits if it is one of another unit."""
        if unit != self.unit:
            self._pause(unit, arguments)
        self.hidden.check(arguments)
        self.hidden.note_taken(arguments)

    def _pause(self, unit: int, arguments: Any) -> None:
        self._before_pause()
        self.cuts.end()
        self.autocasts |= _autocast_keeps_casts(self._device)
        if not self.is_next:
            self.hidden.leave(arguments, Scope(self.unit, self.number))
        self.unit = unit
        self.call.pause()
        self.hidden.come_back()
        self.cuts.begin()

    def read_ahead(self, turn: int, num_units: int) -> None:
        """What it needs in a turn of the step is to be in memory soon."""
        if turn < num_units:
            self.hidden.read_ahead()
        elif turn < 2 * num_units - 1:
            self.cuts.read_ahead(2 * num_units - 2 - turn)

    def end_backward(self) -> None:
        """A backward pass has ended."""
        if not self.is_next:
            self.cuts.put_gradients()


def _autocast_keeps_casts(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()
