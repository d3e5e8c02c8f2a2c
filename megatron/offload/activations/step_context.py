# SPDX-License-Identifier: Apache-2.0
"""Where the step under way stands: `StepContext`.

The engine, capture, `Writer` and `Reader` share one. The engine updates it; it decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.offload.activations.saved.observer import Observer
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.stats.memory_sampler import MemorySampler
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.stats.trace import Tracer


@dataclass
class StepContext:
    """The counters of a step, and the place in it that is computed now.

    Attributes:
        waits: times what compute waits for.
        statistics: of the step under way, or of the last one.
        scope: where in the step compute is.
        save_order: of the forward pass under way; None outside of one.
        observer: is called with what layers save; None: no observer.
        tracer: draws the timeline of the first steps; None: the settings ask for none.
        sampler: samples the memory of this step; None: this step is not sampled.
        num_entered: how often `within` was entered, which tells calls of one layer apart.
    """

    waits: ComputeWaits
    statistics: StepStatistics
    scope: Scope = field(default_factory=Scope)
    save_order: SaveOrder | None = None
    observer: Observer | None = None
    tracer: Tracer | None = None
    sampler: MemorySampler | None = None
    num_entered: int = 0

    @contextlib.contextmanager
    def forward(self, scope: Scope) -> Iterator[SaveOrder]:
        """Around one forward pass, which fills the save order that it yields."""
        outer = self.scope, self.save_order
        order = SaveOrder()
        self.scope, self.save_order = scope, order
        if self.sampler is not None:
            self.sampler.enter("forward")
        try:
            yield order
        finally:
            if self.save_order is order:  # else Python ends late what an interrupt left behind
                self.scope, self.save_order = outer
            if self.sampler is not None:
                self.sampler.enter("")

    @contextlib.contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """What is saved meanwhile belongs to this scope."""
        outer, self.scope = self.scope, scope
        self.num_entered += 1
        try:
            yield
        finally:
            if self.scope is scope:  # as in `forward`
                self.scope = outer
