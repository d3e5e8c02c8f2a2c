# SPDX-License-Identifier: Apache-2.0
"""What moves, stream by stream, and what then takes which memory: `WAYS`, `Need`, `need_of`.

The bytes of a step come from `step.py`. This file adds optimizer states, which no step on the meta
device makes, and says of all bytes on which tier they are.

Note [What a tier holds]
Activations: what moves in a step. Optimizer states: all but a window, which stays from one step to
the next, on a GPU in page-locked host memory and on a CPU in the process. Parameters: those of all
layers; device memory has `LIVE_UNITS` layers of them, in the optimizer's step one more that is
being written, and what is outside of layers.

Note [States in device memory]
They come and go in buckets, of which the largest may be one parameter's. A CPU keeps the window
less the largest bucket between two steps, a GPU keeps none. From the middle of backward on, and in
the optimizer's step, a CPU's window is full, and a GPU has three buckets in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.offload.commands.estimate.live_bytes import Kind
from megatron.offload.commands.estimate.saved import MOVE, REPLAY
from megatron.offload.commands.estimate.step import (
    PLAIN,
    Pass,
    StepBytes,
    is_past_half_of_backward,
)
from megatron.offload.moving.bucket import divided
from megatron.offload.moving.order import first_to_stay, most_together
from megatron.offload.sizes import MIB
from megatron.offload.states.config import DEFAULT_WINDOW_BYTES
from megatron.offload.states.window import ON_DEVICE

LIVE_UNITS = 2
OPTIMIZER_STEP = "optimizer's step"
_BUCKET_BYTES = 32 * MIB
_STATES = {"adamw": 2, "sgd": 0}  # of each parameter, in its type
_LAYERS_ON_THEIR_WAY = 2  # of a GPU that is ahead of its links, see the Note in `device/device.py`
_POOL_BYTES = 2 << 30  # page-locked, on the way from a GPU to SSDs
_AGAIN = '"recompute_layers": "all", "recompute_input": TIER, "chunked_loss": "auto"'


@dataclass(frozen=True)
class Way:
    """What moves in a training.

    Attributes:
        title: in tables.
        how: activations are treated.
        states_move, parameters_move: two of the other streams.
        python: the line that does it; `DIR` is a directory on an SSD. Empty: there is none.
        gradients_move: those of layers, in layer-major steps.
    """

    title: str
    how: Pass = PLAIN
    states_move: bool = False
    parameters_move: bool = False
    python: str = ""
    gradients_move: bool = False


_MOVES, _INPUTS = Pass(MOVE), Pass(MOVE, checkpoints=True, chunks_loss=True)
WAYS: dict[str, Way] = {
    "plain": Way("everything in memory, plain PyTorch"),
    "checkpointing": Way(
        "gradient checkpointing",
        Pass(checkpoints=True),
        python="model.gradient_checkpointing_enable()",
    ),
    "replay": Way(
        "activations kept, cheap ones again",
        Pass(REPLAY),
        python='offload_activations(model, mode="keep")',
    ),
    "activations": Way("activations move", _MOVES, python="offload_activations(model, DIR)"),
    "states": Way(
        "optimizer states move", states_move=True, python="offload_optimizer(optimizer, DIR)"
    ),
    "both": Way("activations and states", _MOVES, True, python="offload(model, optimizer, DIR)"),
    "chunked": Way(
        "+ loss over chunks of tokens",
        Pass(MOVE, chunks_loss=True),
        True,
        python='offload(model, optimizer, DIR, activations={"chunked_loss": "auto"})',
    ),
    "parameters": Way(
        "activations, states and parameters",
        _MOVES,
        True,
        True,
        "offload(model, optimizer, DIR, parameters=True)",
    ),
    "least": Way(
        "+ layers run again, chunked loss",
        _INPUTS,
        True,
        True,
        f"offload(model, optimizer, DIR, parameters=True,\n    activations={{{_AGAIN}}})",
    ),
    "tiled": Way(
        "+ MLPs and norms over tiles of tokens",
        replace(_INPUTS, tiles_mlps=True),
        True,
        True,
        f"offload(model, optimizer, DIR, parameters=True,\n    activations={{{_AGAIN},\n"
        '        "tiled_mlp": "auto"})',
    ),
    "gradients": Way(
        "gradients too, layer-major steps",
        _MOVES,
        True,
        True,
        "handle = offload(model, optimizer, DIR, parameters=True, gradients=True,\n"
        "    layer_major=True)  # and handle.step(micro_batches, loss_of) in place of both passes",
        gradients_move=True,
    ),
}


@dataclass(frozen=True)
class Training:
    """What of a training is no part of its model.

    Attributes:
        optimizer: `adamw` or `sgd`.
        on_cpu: a CPU computes.
        tier: that things move to: `ssd` or `host`.
        gpus: that share parameters, gradients and states (FSDP2, each layer a unit).
        micro_batches: of an optimizer step, whose gradients are added.
        window_bytes, bucket_bytes: settings of optimizer states.
    """

    optimizer: str = "adamw"
    on_cpu: bool = False
    tier: str = "ssd"
    gpus: int = 1
    micro_batches: int = 1
    window_bytes: int = DEFAULT_WINDOW_BYTES
    bucket_bytes: int = _BUCKET_BYTES


@dataclass(frozen=True)
class Need:
    """What a training takes in one way, in bytes, of each GPU.

    Attributes:
        phase: of the step, in which most device memory is taken.
        kinds: of the device memory in that phase.
        host: of host memory; on a CPU device memory is not counted again.
        ssd: on SSDs.
        written, read: to and from SSDs, or host memory where it is the tier, in a step.
    """

    phase: str
    kinds: Mapping[Kind, float]
    host: float
    ssd: float
    written: float
    read: float

    @property
    def device(self) -> float:
        """Device memory at the peak."""
        return sum(self.kinds.values())


def need_of(way: Way, step: StepBytes, training: Training) -> Need:
    """What a training takes.

    Args:
        way: what moves.
        step: a micro-batch, made with `way.how`; it accumulates where the training has several.
        training: all else.
    """
    shares = training.gpus
    states = _STATES[training.optimizer] * step.trained / shares
    moved_states = states if way.states_move else 0.0
    is_ssd = training.tier == "ssd"
    window = min(moved_states, training.window_bytes) if is_ssd else 0.0
    if moved_states and training.on_cpu:
        window = _states_that_stay(_buckets(step, training), training)
    of_layers = step.of_layers / shares if way.parameters_move else 0.0
    phases = {name: _kinds(name, way, step, training, states) for name in step.peaks}
    phases[OPTIMIZER_STEP] = _optimizer_step(way, step, training, states)
    phase = max(phases, key=lambda one: sum(phases[one].values()))
    trained_of_layers = step.trained_of_layers / shares if way.parameters_move else 0.0
    gradients = trained_of_layers if way.gradients_move else 0.0
    away = step.moved + moved_states - window + of_layers + gradients
    staged = 0.0
    if is_ssd and not training.on_cpu:
        staged = window + (min(_POOL_BYTES, step.moved) if step.moved else 0)
    activations = training.micro_batches * step.moved
    passes = 2 * (1 if way.gradients_move else training.micro_batches)  # that read parameters
    return Need(
        phase=phase,
        kinds=phases[phase],
        host=staged if is_ssd else away,
        ssd=away if is_ssd else 0.0,
        written=activations + moved_states - window + trained_of_layers + gradients,
        read=activations
        + moved_states
        - window
        + passes * of_layers
        + trained_of_layers
        + gradients,
    )


def _kinds(
    phase: str, way: Way, step: StepBytes, training: Training, states: float
) -> dict[Kind, float]:
    """What is alive in a phase of forward or backward."""
    kinds = {kind: float(step.peaks[phase].get(kind, 0.0)) for kind in Kind}
    kinds[Kind.PARAMETERS] = _parameters(way, step, training)
    if not training.on_cpu and step.layers:  # on their way to a tier, or read ahead
        kinds[Kind.SAVED] += min(_LAYERS_ON_THEIR_WAY / step.layers, 1.0) * step.moved
    if way.gradients_move:
        kinds[Kind.GRADIENTS] = min(kinds[Kind.GRADIENTS], _gradients_that_stay(step))
    if training.gpus > 1 and kinds[Kind.GRADIENTS]:
        whole = step.trained_of_layer  # of the layer that computes, before it is divided
        kinds[Kind.GRADIENTS] = kinds[Kind.GRADIENTS] / training.gpus + whole
    kinds[Kind.STATES] = states
    if way.states_move:
        is_near = training.micro_batches > 1 or is_past_half_of_backward(phase)
        kinds[Kind.STATES] = _states_in_passes(step, training, is_near=is_near)
    return kinds


def _gradients_that_stay(step: StepBytes) -> float:
    """Those of what is outside of layers, and of the layers that are in memory."""
    live = min(LIVE_UNITS * step.trained_of_layer, step.trained_of_layers)
    return step.trained - step.trained_of_layers + live


def _parameters(way: Way, step: StepBytes, training: Training) -> float:
    outside = step.parameters - step.of_layers
    if way.parameters_move:
        live = min(LIVE_UNITS * step.largest_layer, step.of_layers)
        return outside / training.gpus + live
    if training.gpus == 1:
        return step.parameters
    # A layer computes and the next one is gathered; or the embedding and the output layer.
    return step.parameters / training.gpus + max(2 * step.largest_layer, outside)


def _buckets(step: StepBytes, training: Training) -> list[int]:
    """The bytes of the buckets in which states move, in the optimizer's order."""
    each = _STATES[training.optimizer]
    sizes = [each * one // training.gpus for one in step.trained_sizes]
    return [sum(run) for run in divided(sizes, int, training.bucket_bytes)]


def _room(buckets: Sequence[int], training: Training) -> int:
    """The most bytes of them in device memory."""
    if training.on_cpu:
        return max(training.window_bytes, *buckets, 0)
    return most_together(buckets, ON_DEVICE)


def _states_that_stay(buckets: list[int], training: Training) -> int:
    """In a CPU's memory between two steps, which go through the buckets in turn up and down."""
    orders = buckets, buckets[::-1]
    return max(sum(one[first_to_stay(one, training.window_bytes) :]) for one in orders)


def _states_in_passes(step: StepBytes, training: Training, *, is_near: bool) -> int:
    """States in device memory while layers compute.

    Args:
        step: see `need_of`.
        training: likewise.
        is_near: the next step of the optimizer, so that what it needs first is read already.
    """
    buckets = _buckets(step, training)
    if not is_near:
        return _states_that_stay(buckets, training) if training.on_cpu else 0
    room, read = _room(buckets, training), 0
    for order in (buckets, buckets[::-1]):
        sums = itertools.accumulate(order)
        read = max(read, max(itertools.takewhile(lambda one: one <= room, sums), default=0))
    return read


def _optimizer_step(
    way: Way, step: StepBytes, training: Training, states: float
) -> dict[Kind, float]:
    """What is alive while the optimizer updates: on a GPU by its fused kernel, in place."""
    kinds = dict.fromkeys(Kind, 0.0)
    shares = training.gpus
    kinds[Kind.PARAMETERS] = step.parameters / shares
    # On a CPU the loop of AdamW makes two temporaries of a parameter at a time.
    temporaries = 2 if training.on_cpu and training.optimizer == "adamw" else 0
    kinds[Kind.WORKING] = temporaries * step.largest_trained / shares
    if way.parameters_move and way.states_move:
        live = min(LIVE_UNITS * step.largest_layer, step.of_layers)
        kinds[Kind.PARAMETERS] = (step.parameters - step.of_layers + live) / shares
        # While a layer is updated, the one before it is being written.
        written = min(step.trained_of_layer, step.of_layers - live) / shares
        of_layers = temporaries * step.largest_trained_of_layers / shares
        if written + of_layers > kinds[Kind.WORKING]:
            kinds[Kind.PARAMETERS] += written
            kinds[Kind.WORKING] = of_layers
    kinds[Kind.GRADIENTS] = step.trained / shares
    if way.gradients_move:
        kinds[Kind.GRADIENTS] = _gradients_that_stay(step) / shares
    kinds[Kind.STATES] = states
    if way.states_move:
        kinds[Kind.STATES] = min(states, _room(_buckets(step, training), training))
    return kinds
