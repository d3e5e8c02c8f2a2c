# SPDX-License-Identifier: Apache-2.0
"""Measures what a planner has to know: `Profiler`.

Integrations tell it where a pass and a layer begin and end, the engine what layers save; for
backward it puts tensor hooks on a layer's inputs and outputs. `build.py` makes a profile of what it
noted. Outside of the steps that it measures it is not called.

Note [What a timestamp costs]
A timestamp is a clock reading on a CPU and an event in the stream on a GPU: five to seven of them
for each layer and micro-batch, some microseconds. Nothing waits for the device until the step is
over. What compute waited for the engine is timed by the same clock (`ComputeWaits`); how often it
had waited is noted with each timestamp, and these waits are left out of the durations: a layer
takes as long as it would if nothing had to be waited for. So is what a codec computes in forward,
which a plan may leave out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.activations.placement.policy import WHOLE_LAYER
from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.device.device import Device
from megatron.offload.planner.profile.head_memory import HeadMemory
from megatron.offload.planner.profile.pipeline_schedule import Pass
from megatron.offload.planner.profile.stage_profile import tokens_of
from megatron.offload.planner.profile.timings import (
    LayerTimings,
    PartTimings,
    PassTimings,
    TimeSpan,
    Timestamp,
)


class Profiler:
    """Notes the passes of the steps that it measures.

    Attributes:
        steps: measured so far, complete passes only.
        encodings: when a codec encoded what these saved.
        sizes: of the largest micro-batch since they were cleared.
        order: of the passes since it was cleared, also of steps that are not measured; None: it
            is not recorded.

    Args:
        device: that computes; its clock is used.
        min_bytes: smaller storages never move.
        num_waits: how often compute has waited for the engine so far.
        head: measures what runs behind the last layer, once, in the first step whose number of
            layers is known; None: it is not measured.
    """

    def __init__(
        self,
        device: Device,
        min_bytes: int,
        num_waits: Callable[[], int],
        head: HeadMemory | None = None,
    ) -> None:
        self.steps: list[list[PassTimings]] = []
        self.encodings: list[TimeSpan] = []
        self.sizes: dict[str, int] = {}
        self.order: list[Pass] | None = None
        self._device = device
        self._min_bytes = min_bytes
        self._num_waits = num_waits
        self._head = head
        self._with_head: PassTimings | None = None  # the pass in which it is measured
        self._knows_head = False
        self._passes: dict[tuple[int, int], PassTimings] | None = None  # of a step that is measured
        self._forward: PassTimings | None = None
        self._layer: LayerTimings | None = None
        self._stayed: set[int] = set()  # storages of this pass that stay
        # Of the layer under way, what its selective operations would spare: storage and bytes.
        self._spared: dict[int, tuple[PartTimings, int]] = {}
        self._replayed: dict[Scope, PartTimings] = {}  # what saved storages that are replayed

    @property
    def measures(self) -> bool:
        """Whether the step under way is measured."""
        return self._passes is not None

    def begin_step(self) -> None:
        """Begins to measure a step."""
        self._passes = {}

    def end_step(self, *, well: bool) -> None:
        """Ends the measured step; one that did not end well does not count."""
        passes, self._passes = self._passes or {}, None
        self._spared.clear()
        self._replayed.clear()
        self._forward = self._layer = None
        if self._with_head is not None:  # given up in the middle
            self._leave_head()
        self._knows_head &= well
        complete = [one for one in passes.values() if one.is_complete]
        if well and complete and len(complete) == len(passes):
            self.steps.append(complete)

    def passes(self) -> list[tuple[int, PassTimings]]:
        """What this step's passes have shown so far: number of the micro-batch, timings."""
        return [(micro_batch, one) for (_, micro_batch), one in (self._passes or {}).items()]

    def clear(self) -> None:
        """Forgets the steps measured so far."""
        self.steps.clear()
        self.encodings.clear()

    def now(self) -> Timestamp:
        """Notes the device's present time, and how often others have had their turn so far."""
        return Timestamp(self._device.timestamp(), self._num_waits(), len(self.encodings))

    # -- Passes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """A context around a forward pass that is measured."""
        self._note_order(Pass(False, chunk, micro_batch))
        if self._passes is None:
            yield
            return
        timings = self._passes[chunk, micro_batch] = PassTimings(chunk, self.now())
        self._forward = timings
        self._stayed.clear()
        try:
            yield
            self._end_reached()
            timings.ended = self.now()
            if self._head is not None and self._with_head is timings:
                saved = timings.behind_layers
                self._head.end(saved.movable_bytes + saved.resident_bytes)
        finally:
            self._forward = self._layer = None

    @contextlib.contextmanager
    def backward(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """A context around a backward pass that is measured."""
        self._note_order(Pass(True, chunk, micro_batch))
        timings = self._passes.get((chunk, micro_batch)) if self._passes is not None else None
        if timings is None:
            yield
            return
        timings.backward_began = self.now()
        if self._head is not None and self._with_head is timings:
            self._head.begin()
        yield
        timings.end_backward(self.now())

    def _note_order(self, one: Pass) -> None:
        if self.order is not None:
            self.order.append(one)

    # -- Layers ---------------------------------------------------------------------------------

    def note_sizes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Notes the sizes of a micro-batch: the first two of what goes into a layer, or a model."""
        if inputs and inputs[0].dim() >= 2:
            sequence_length, micro_batch_size = inputs[0].shape[:2]
            if sequence_length * micro_batch_size > tokens_of(self.sizes):
                self.sizes["sequence_length"] = sequence_length
                self.sizes["micro_batch_size"] = micro_batch_size

    def begin_layer(
        self, scope: Scope, inputs: Sequence[torch.Tensor], *, recomputes: bool
    ) -> LayerTimings | None:
        """A layer's forward begins; None: this pass is not measured, its sizes are noted."""
        self.note_sizes(inputs)
        if self._forward is None:
            return None
        self._end_reached()
        wanting = [tensor for tensor in inputs if tensor.requires_grad]
        timings = LayerTimings(
            name=scope.layer,
            began=self.now(),
            input_bytes=sum(tensor.nbytes for tensor in wanting),
            movable_input_bytes=sum(t.nbytes for t in wanting if self._may_wait_on_a_tier(t)),
            can_be_recomputed=bool(wanting),
            recomputes=recomputes,
        )
        if wanting:
            note_end = _recorder(self, timings, "backward_ended")
            wanting[0].register_hook(note_end)
            if not self._forward.layers and node_of(wanting[0]) is None:
                self._forward.held_bytes = wanting[0].nbytes
        self._forward.layers.append(timings)
        self._layer = timings
        self._spared.clear()
        return timings

    def reach_layer(self, scope: Scope, *, is_layer: bool) -> None:
        """A compiled graph is about to save what belongs to a layer, or to none.

        Calls of layers are not seen there: a layer begins with the first tensor that it saves, and
        ends with the first one of what comes after it.
        """
        if self._forward is None:
            return
        layers = self._forward.layers
        own = next((one for one in layers if one.name == scope.layer), None)
        if own is None:
            self._end_reached()
        if own is None and is_layer:
            own = LayerTimings(
                scope.layer, self.now(), 0, 0, can_be_recomputed=False, in_graph=True
            )
            layers.append(own)
        elif own is not None and own is layers[-1]:
            own.ended = None  # something else was moved ahead of what it saves last
        self._layer = own

    def reach_backward(self, scope: Scope) -> None:
        """The backward of a compiled graph is about to use what was saved at a place."""
        timings = (self._passes or {}).get((scope.chunk, scope.micro_batch))
        if timings is None or timings.backward_began is None:
            return
        own = next((one for one in timings.layers if one.name == scope.layer), None)
        if own is not None and own.in_graph:
            own.backward_ended = self.now()
            own.backward_began = own.backward_began or own.backward_ended

    def _end_reached(self) -> None:
        """What follows does not belong to the layer that a compiled graph has saved for."""
        assert self._forward is not None
        last = self._forward.layers[-1] if self._forward.layers else None
        if last is not None and last.in_graph and last.ended is None:
            last.ended = self.now()

    def reach_middle(self, middle: torch.Tensor) -> None:
        """The layer's attention is done. Call it after its activations were captured."""
        if self._layer is not None:
            self._layer.middle = self.now()
            self._layer.middle_bytes = middle.nbytes
            if self._may_wait_on_a_tier(middle):
                self._layer.movable_middle_bytes = middle.nbytes
            if middle.requires_grad:
                middle.register_hook(_recorder(self, self._layer, "backward_middle"))

    def end_layer(self, outputs: Sequence[torch.Tensor]) -> None:
        """A layer's forward is over. Call it after its activations were captured."""
        timings, self._layer = self._layer, None
        if timings is None:
            return
        timings.ended = self.now()
        timings.is_frozen = not any(output.requires_grad for output in outputs)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(_recorder(self, timings, "backward_began"))
                if self._ends_before_head():
                    self._measure_head(output)
                break

    def _ends_before_head(self) -> bool:
        """Whether the layer that has ended is the last one, for the first time that this shows."""
        forward = self._forward
        if self._head is None or forward is None or not self.steps or self._knows_head:
            return False
        chunk = max(one.chunk for one in self.steps[0])
        numbers = {len(one.layers) for one in self.steps[0] if one.chunk == chunk}
        return forward.chunk == chunk and {len(forward.layers)} == numbers

    def _measure_head(self, output: torch.Tensor) -> None:
        """From here to the end of the pass, and from its backward to that of `output`."""
        head, forward = self._head, self._forward
        assert head is not None and forward is not None
        self._with_head, self._knows_head = forward, True
        head.begin()

        def end(_: Any) -> None:
            if self._with_head is forward:
                head.end(forward.behind_layers.movable_bytes)
                self._leave_head()

        output.register_hook(end)

    def _leave_head(self) -> None:
        self._with_head = None
        if self._head is not None:
            self._head.leave()

    @contextlib.contextmanager
    def recomputation(self, timings: LayerTimings, part: str = WHOLE_LAYER) -> Iterator[None]:
        """Around what runs again in backward: a layer, a part of it, its selective operations."""
        began = self.now()
        try:
            yield
        finally:  # torch's checkpoint ends it with an exception, once it has all that is needed
            timings.again.setdefault(part, []).append((began, self.now()))

    def selective(
        self,
        timings: LayerTimings,
        part: str,
        span: TimeSpan,
        spared: Mapping[int, int],
        more: Sequence[int] = (),
        extra_bytes: int = 0,
    ) -> None:
        """One of a part's selective operations ran.

        Args:
            spared: bytes of storages that need not be kept for backward if it runs again, by their
                address. What turns out to be replayed is not kept anyway.
            more: bytes of storages that then have to be kept.
            extra_bytes: that are there besides in backward when it has run again.
        """
        found = timings.part(part)
        found.selective.append(span)
        for storage, size in spared.items():
            if size >= self._min_bytes:
                found.selective_bytes += size
                found.exact_selective_bytes += size
                self._spared[storage] = found, size
        more_bytes = sum(size for size in more if size >= self._min_bytes)
        found.selective_bytes -= more_bytes
        found.exact_selective_bytes -= more_bytes
        found.selective_extra_bytes += extra_bytes

    # -- What the engine tells (`Observer`) -------------------------------------------------------

    def moves(self, scope: Scope, num_bytes: int) -> None:
        """Notes a storage that moves to a tier, as `Observer` asks."""
        part = self._part(scope)
        if part is not None:
            part.movable_bytes += num_bytes
            part.num_storages += 1

    def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
        """Notes a storage that stays; one that is large enough to move could have moved."""
        # Saved, so it lives until backward: no other can get its address in this pass.
        part, num_bytes = self._part(scope), storage.nbytes()
        if part is None or storage._cdata in self._stayed:
            return
        self._stayed.add(storage._cdata)
        if num_bytes < self._min_bytes:
            part.resident_bytes += num_bytes
        else:
            part.movable_bytes += num_bytes
            part.num_storages += 1

    def replays(
        self, scope: Scope, storage: torch.UntypedStorage, copied_bytes: int, codes_bytes: int
    ) -> None:
        """Notes a storage that backward computes again, as `Observer` asks."""
        part, num_bytes = self._part(scope), storage.nbytes()
        if part is None:
            return
        part.replayed_bytes += num_bytes
        part.replay_extra_bytes = max(part.replay_extra_bytes, num_bytes)
        part.resident_bytes += copied_bytes
        part.only_for_replay_bytes += copied_bytes
        self._replayed[scope] = part
        by_selective, spared_bytes = self._spared.pop(storage._cdata, (part, 0))
        by_selective.selective_bytes -= spared_bytes
        if codes_bytes:
            part.codec_spared_bytes += num_bytes - codes_bytes
        else:
            part.exact_extra_bytes = max(part.exact_extra_bytes, num_bytes)
            by_selective.exact_selective_bytes -= spared_bytes

    def saves_for_replay(self, scope: Scope, num_bytes: int) -> None:
        """Notes bytes that are not saved without replay, as `Observer` asks."""
        if (part := self._part(scope)) is not None:
            part.only_for_replay_bytes += num_bytes

    @contextlib.contextmanager
    def encoding(self, scope: Scope) -> Iterator[None]:
        """Times a codec in forward, as `Observer` asks."""
        part, began = self._part(scope), self.now()
        yield
        if part is not None:
            part.encodings.append((began, self.now()))
            self.encodings.append(part.encodings[-1])

    @contextlib.contextmanager
    def replaying(self, scope: Scope, *, decodes: bool) -> Iterator[None]:
        """Times a replay, as `Observer` asks."""
        began = self.now()
        yield
        part = self._replayed.get(scope)
        if part is not None:
            (part.decodings if decodes else part.replays).append((began, self.now()))

    def _may_wait_on_a_tier(self, tensor: torch.Tensor) -> bool:
        """Whether it can leave memory: others hold the leaves among what goes into a layer."""
        return node_of(tensor) is not None and tensor.nbytes >= self._min_bytes

    def _part(self, scope: Scope) -> PartTimings | None:
        """Where to note what is saved now; None: nowhere."""
        if self._layer is not None:
            return self._layer.part(scope.part)
        return None if self._forward is None else self._forward.between_layers


def _recorder(profiler: Profiler, timings: LayerTimings, name: str) -> Callable[[Any], None]:
    """A tensor hook that notes when the gradient came. It leaves the gradient as it is."""

    def note(_: Any) -> None:
        if getattr(timings, name) is None:
            setattr(timings, name, profiler.now())

    return note
