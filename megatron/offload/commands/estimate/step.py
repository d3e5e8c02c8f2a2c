# SPDX-License-Identifier: Apache-2.0
"""The bytes of a training step, phase by phase, without computing it: `StepBytes`, `step_bytes`.

A step runs on the meta device, forward and backward, and `LiveBytes` counts. Of a model with many
layers that are alike two short ones run.

Note [Phases]
The peak of a step may be in the last layers' backward, at the logits, or in the first layers'
backward, when all gradients are there. Which one it is depends on the number of layers, so a peak
cannot be extrapolated, but the peak of each phase can: a phase is the pass of one layer, counted
from the nearer end of the model, or what runs before, between and after layers. Everything that is
alive in a phase is either of that phase or of the layers before it, of which each has the same. So
each phase's peak is a straight line over the number of layers, and the step's peak is the largest
of them. Layers in the middle lie between those at the ends.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.offload.activations.saved.norms import Norms
from megatron.offload.commands.estimate.like_device import LikeDevice, no_autocast_on_meta
from megatron.offload.commands.estimate.live_bytes import Kind, LiveBytes
from megatron.offload.commands.estimate.model import Architecture
from megatron.offload.commands.estimate.saved import KEEP, SavedBytes
from megatron.offload.integration.tiled_mlps import TiledMlps
from megatron.offload.integration.torch.causal_lm_loss import chunked_losses
from megatron.offload.integration.torch.layers import called_parts, find_layers, params_outside
from megatron.offload.integration.torch.passes import tensors_in
from megatron.offload.ops.chunked_logits import chunk_tokens_for
from megatron.offload.sizes import MIB

_SHORT, _LONGER = 4, 5  # layers of the two models that stand for one with many
_ENDS = 2  # layers at each end whose passes are phases of their own
HEAD = "output layer and loss"
_BACKWARD = "backward of "
_BEFORE, _AFTER = "before the layers", "after the layers"
_FIRST, _MIDDLE, _LAST = "layer {}", "layers in the middle", "the last layer"


@dataclass(frozen=True)
class Pass:
    """How a step's activations are treated.

    Attributes:
        treatment: `KEEP`, `REPLAY` or `MOVE`, see `SavedBytes`.
        checkpoints: layers run again in backward, as with transformers' gradient checkpointing.
        chunks_loss: logits exist for a chunk of tokens at a time.
        tiles_mlps: MLPs run over tiles of tokens, as many as `tiled_mlp="auto"` takes.
    """

    treatment: str = KEEP
    checkpoints: bool = False
    chunks_loss: bool = False
    tiles_mlps: bool = False


PLAIN = Pass()


def is_past_half_of_backward(phase: str) -> bool:
    """Whether half of the gradients are there when the most of a phase is alive."""
    first = [_FIRST.format(number + 1) for number in range(_ENDS)]
    return phase in (_AFTER, *(_BACKWARD + place for place in (_MIDDLE, *first)))


@dataclass
class StepBytes:
    """What a step takes, in bytes.

    Attributes:
        parameters: all of them, `buffers` aside.
        buffers: of the model.
        trained: parameters that get a gradient, which takes as much.
        trained_sizes: of each of these, in the order of the model.
        of_layers: parameters of layers, `largest_layer` of one of them.
        trained_of_layers: likewise, with gradients; `largest_trained_of_layers` is a parameter.
        layers: how many there are.
        kept, replayed, moved: of what autograd saves, see `SavedBytes`.
        peaks: by phase: bytes by kind when most is alive, without optimizer states.
    """

    parameters: float = 0
    buffers: float = 0
    trained: float = 0
    trained_sizes: tuple[int, ...] = ()
    of_layers: float = 0
    largest_layer: float = 0
    trained_of_layers: float = 0
    trained_of_layer: float = 0
    largest_trained_of_layers: float = 0
    layers: float = 0
    kept: float = 0
    replayed: float = 0
    moved: float = 0
    peaks: dict[str, dict[Kind, float]] = field(default_factory=dict)

    @property
    def largest_trained(self) -> int:
        """Of the parameters that get a gradient."""
        return max(self.trained_sizes, default=0)

    def peak(self) -> tuple[str, dict[Kind, float]]:
        """The phase in which most is alive, and what it is."""
        name = max(self.peaks, key=lambda one: sum(self.peaks[one].values()))
        return name, self.peaks[name]


def step_bytes(
    architecture: Architecture,
    batch: int,
    sequence: int,
    how: Pass = PLAIN,
    *,
    min_bytes: int = MIB,
    on_cpu: bool = False,
    accumulates: bool = False,
    whole: bool = False,
) -> StepBytes:
    """What a step of the whole model takes.

    Args:
        architecture: of the model.
        batch: sequences of a micro-batch.
        sequence: tokens of each.
        how: its activations are treated.
        min_bytes: smaller storages stay.
        on_cpu: as a CPU computes it, else as a GPU.
        accumulates: gradients of a micro-batch before are there, and this one's are added.
        whole: all layers run, also where fewer could stand for them.
    """

    def run(num_layers: int | None) -> StepBytes:
        model = architecture.make(num_layers)
        inputs = architecture.inputs(batch, sequence)
        if accumulates:
            for one in model.parameters():
                one.grad = torch.empty_like(one) if one.requires_grad else None
        return _run(model, inputs, how, min_bytes=min_bytes, on_cpu=on_cpu)

    if whole or not architecture.layers_are_alike or architecture.num_layers <= _LONGER:
        found = run(None)
    else:
        found = _extended(run(_SHORT), run(_LONGER), architecture.num_layers)
    found.trained_sizes = architecture.trained_sizes
    return found


def _extended(short: StepBytes, longer: StepBytes, num_layers: int) -> StepBytes:
    """The line through two, at another number of layers."""

    def at(one: float, two: float) -> float:
        return one + (two - one) * (num_layers - _SHORT) / (_LONGER - _SHORT)

    sizes = {name: one for name, one in vars(short).items() if isinstance(one, int | float)}
    found = StepBytes()
    for name, value in sizes.items():
        setattr(found, name, at(value, getattr(longer, name)))
    for name in short.peaks.keys() & longer.peaks.keys():
        one, two = short.peaks[name], longer.peaks[name]
        found.peaks[name] = {kind: at(one.get(kind, 0), two.get(kind, 0)) for kind in Kind}
    return found


def _run(
    model: Any, inputs: dict[str, torch.Tensor], how: Pass, *, min_bytes: int, on_cpu: bool
) -> StepBytes:
    layers = list(find_layers([model]))
    found = _sizes(model, layers)
    live = LiveBytes()
    for one in model.parameters():
        live.add(one, Kind.PARAMETERS)
        if one.grad is not None:
            live.add(one.grad, Kind.GRADIENTS)
    for one in (*model.buffers(), *inputs.values()):
        live.add(one, Kind.WORKING)
    norms = Norms()
    norms.add([model])
    stationary = [*model.parameters(), *model.buffers(), *inputs.values()]
    saved = SavedBytes(live, how.treatment, stationary, norms, min_bytes=min_bytes, on_cpu=on_cpu)
    device = LikeDevice("cpu" if on_cpu else "gpu")
    phases = _Phases(model, layers, live, saved)
    if how.checkpoints:
        _checkpoint(model, device)
    tiles = _tiled_mlps(model) if how.tiles_mlps else contextlib.nullcontext()
    with no_autocast_on_meta(), live, device, phases, tiles:
        live.phase = _BEFORE
        with saved:
            loss = _loss(model, inputs, how, on_cpu)
        saved.end_forward()
        phases.in_backward = True
        loss.backward()
    found.kept, found.replayed = saved.kept_bytes, saved.replayed_bytes
    found.moved = saved.moved_bytes
    found.peaks = {name: dict(peak) for name, peak in live.peaks.items()}
    return found


def _loss(model: Any, inputs: dict[str, torch.Tensor], how: Pass, on_cpu: bool) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        if how.chunks_loss:
            size = model.get_output_embeddings().weight.shape
            tokens = inputs["labels"].numel()
            rows = chunk_tokens_for(tokens, size[1], size[0], "cpu" if on_cpu else "cuda")
            for head in chunked_losses([model], rows):
                head.connect()
                stack.callback(head.close)
        loss: torch.Tensor = model(**inputs).loss
        return loss


def _sizes(model: Any, layers: Sequence[torch.nn.Module]) -> StepBytes:
    trained = [one.nbytes for one in model.parameters() if one.requires_grad]
    outside = {id(one) for one in params_outside(model, layers)}
    of_layers = [
        {id(one): one for one in layer.parameters() if id(one) not in outside} for layer in layers
    ]
    sizes = [sum(one.nbytes for one in params.values()) for params in of_layers]
    trained_of = [[p.nbytes for p in own.values() if p.requires_grad] for own in of_layers]
    trained_sizes = [sum(own) for own in trained_of]
    return StepBytes(
        layers=len(layers),
        parameters=sum(one.nbytes for one in model.parameters()),
        buffers=sum(one.nbytes for one in model.buffers()),
        trained=sum(trained),
        of_layers=sum(sizes),
        largest_layer=max(sizes, default=0),
        trained_of_layers=sum(trained_sizes),
        trained_of_layer=max(trained_sizes, default=0),
        largest_trained_of_layers=max(itertools.chain(*trained_of), default=0),
    )


@contextlib.contextmanager
def _tiled_mlps(model: Any) -> Iterator[None]:
    """Has MLPs run over tiles, in forward and where they run again."""
    mlps = TiledMlps([model], None)
    mlps.connect()
    try:
        yield
    finally:
        mlps.close()


def _checkpoint(model: Any, device: LikeDevice) -> None:
    """Turns on transformers' gradient checkpointing, which takes the cache away from layers."""

    def contexts() -> tuple[Any, Any]:  # of forward and of backward, where autograd leaves modes
        return contextlib.nullcontext(), device

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


class _Phases:
    """Tells what counts which phase of the step runs, while it is entered."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[torch.nn.Module],
        live: LiveBytes,
        saved: SavedBytes,
    ) -> None:
        self.in_backward = False
        self._live, self._saved = live, saved
        self._num_layers = len(layers)
        self._model = model
        self._layers = layers
        self._hooks: list[Any] = []

    def __enter__(self) -> _Phases:
        for number, layer in enumerate(self._layers):
            begin, end = self._hooks_of(number)
            self._hooks.append(layer.register_forward_pre_hook(begin))
            self._hooks.append(layer.register_forward_hook(end))
        for part in called_parts(self._model):
            self._hooks.append(part.register_forward_hook(self._returned))
        for one in self._model.parameters():
            if one.requires_grad:
                self._hooks.append(one.register_post_accumulate_grad_hook(self._has_gradient))
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._hooks:
            one.remove()

    def _hooks_of(self, number: int) -> tuple[Any, Any]:
        place = self._place(number)

        def begin(module: torch.nn.Module, args: Any) -> None:
            if not self.in_backward:  # else it runs again
                self._live.phase = f"forward of {place}"
                self._saved.enter(f"layer {number}")
                for one in args:
                    if number == 0 and isinstance(one, torch.Tensor) and one.requires_grad:
                        one.register_hook(self._left_layers)

        def end(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self.in_backward:
                return
            self._saved.enter(f"after layer {number}")
            if number == self._num_layers - 1:
                self._live.phase, self._live.kind = HEAD, Kind.LOSS
            for one in output if isinstance(output, tuple) else (output,):
                if isinstance(one, torch.Tensor) and one.requires_grad:
                    one.register_hook(lambda _: self._enter_backward(place))

        return begin, end

    def _returned(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self.in_backward and module is not self._model:
            self._saved.note_returned(tensors_in(output))

    def _place(self, number: int) -> str:
        """The name of a layer's passes: counted from the nearer end of the model."""
        from_end = self._num_layers - 1 - number
        if number < _ENDS:
            return _FIRST.format(number + 1)
        if from_end == 0:
            return _LAST
        return f"{_LAST} but {from_end}" if from_end < _ENDS else _MIDDLE

    def _enter_backward(self, place: str) -> None:
        self._live.kind = Kind.WORKING
        self._live.phase = _BACKWARD + place

    def _left_layers(self, _: torch.Tensor) -> None:
        self._live.phase = _AFTER

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._live.change_kind(parameter.grad, Kind.GRADIENTS)
