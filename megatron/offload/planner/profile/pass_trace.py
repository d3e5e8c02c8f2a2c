# SPDX-License-Identifier: Apache-2.0
"""What a profiler noted of a step, as spans of a timeline: `StepTrace`.

Integrations put it around the steps of a run that is traced. It shows passes, layers, their parts
and what was recomputed in backward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from megatron.offload.activations.placement.policy import WHOLE_LAYER
from megatron.offload.activations.saved.scope import Scope, span_name
from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.device.clock import Moment
from megatron.offload.device.device import Device
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings, PassTimings, Timestamp
from megatron.offload.stats.trace import COMPUTE, WAIT, Tracer

ATTENTION, MLP = "attention", "mlp"
_NOTICEABLE_S = 0.0001


class StepTrace:
    """Adds the layers of a step to its timeline.

    Args:
        tracer: of the engine.
        profiler: of the layers. It measures these steps, also without a planner.
        device: whose clock the profiler reads.
        waits: of the engine. On a CPU the thread that waits adds the span itself.
    """

    def __init__(
        self, tracer: Tracer, profiler: Profiler, device: Device, waits: ComputeWaits
    ) -> None:
        self._tracer = tracer
        self._profiler = profiler
        self._device = device
        self._waits = waits

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step, within `OffloadEngine.step`."""
        if not self._tracer.is_on:
            yield
            return
        is_ours = not self._profiler.measures
        if is_ours:
            self._profiler.begin_step()
        waits: list[tuple[Scope | str, Moment, Moment]] = []
        self._waits.traced = None if self._device.is_host else waits
        try:
            yield
            # Where both clocks meet: the device comes to it while the host waits for that.
            ended = self._device.timestamp()
            self._device.seconds_between(ended, ended)
            ended_s = time.perf_counter()

            def at_s(moment: Moment) -> float:
                return ended_s - self._device.seconds_between(moment, ended)

            _trace_passes(self._tracer, self._profiler.passes(), lambda one: at_s(one.timestamp))
            for what, began, stopped in waits:
                _trace_wait(self._tracer, what, at_s(began), at_s(stopped))
        finally:
            self._waits.traced = None
            if is_ours:
                self._profiler.end_step(well=False)


def _trace_wait(tracer: Tracer, what: Scope | str, began_s: float, ended_s: float) -> None:
    """Adds a wait, unless it was only a moment: the device stands still behind each event."""
    if ended_s - began_s >= _NOTICEABLE_S:
        name = what if isinstance(what, str) else f"read of {span_name(what)}"
        tracer.span(WAIT, name, began_s, ended_s)


def _trace_passes(
    tracer: Tracer, passes: Iterable[tuple[int, PassTimings]], at_s: Callable[[Timestamp], float]
) -> None:
    """Adds the spans of a step's passes.

    Args:
        tracer: gets them.
        passes: number of the micro-batch, and what was noted of its passes through a chunk.
        at_s: a moment in seconds of `time.perf_counter`.
    """

    def span(name: str, began: Timestamp | None, *ends: Timestamp | None) -> None:
        """Until the first of the ends that came."""
        if began is None or not any(ends):
            return
        began_s, ended_s = at_s(began), min(at_s(end) for end in ends if end is not None)
        if ended_s > began_s:
            tracer.span(COMPUTE, name, began_s, ended_s)

    for micro_batch, one in passes:
        where = f"micro-batch {micro_batch}" + (f" chunk {one.chunk}" if one.chunk else "")
        span(f"forward {where}", one.began, one.ended)
        span(f"backward {where}", one.backward_began, one.backward_ended)
        next_began = one.backward_ended  # of what backward comes to after a layer
        for layer in one.layers:
            _trace_layer(layer, next_began, span)
            next_began = layer.backward_began or next_began


def _trace_layer(
    layer: LayerTimings, next_began: Timestamp | None, span: Callable[..., None]
) -> None:
    span(layer.name, layer.began, layer.ended)
    span(ATTENTION, layer.began, layer.middle)
    span(MLP, layer.middle, layer.ended)
    # One tensor is this layer's input and the output of the one before: which of its hooks runs
    # first is chance, and spans must not overlap. The first layer has none that wants a gradient.
    ends = layer.backward_ended, next_began
    span(f"{layer.name} backward", layer.backward_began, *ends)
    span(f"{MLP} backward", layer.backward_began, layer.backward_middle)
    span(f"{ATTENTION} backward", layer.backward_middle, *ends)
    for name, again in layer.again.items():
        for began, end in again:
            span("recompute" if name == WHOLE_LAYER else f"recompute {name}", began, end)
