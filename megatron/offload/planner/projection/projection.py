# SPDX-License-Identifier: Apache-2.0
"""From descriptions of a model, of its division and of hardware to a `StageProfile`: `project`.

A roofline: each kind of work takes its amount divided by the rate that `hardware.py` assumes.
The planner cannot tell the result from a measured profile. What is left out makes real steps
slower: gradient reduction (taken to overlap), launch gaps, stragglers, sends between stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron.offload.activations.saved.encoded import CODECS
from megatron.offload.activations.saved.quantization import Quantization
from megatron.offload.config import DEFAULT_INFLIGHT_BYTES
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import LayerProfile, PartProfile, StageProfile
from megatron.offload.planner.projection.hardware import Hardware
from megatron.offload.planner.projection.layer import (
    MATMUL_BACKWARD,
    Saved,
    Work,
    embedding_work,
    head_work,
    inside_mlp_bytes,
    layer_input_bytes,
    layer_work,
    logits_bytes,
)
from megatron.offload.planner.projection.model import Experts, Parallelism, Transformer
from megatron.offload.planner.projection.states import ProjectedStates
from megatron.offload.states.config import DEFAULT_WINDOW_BYTES

MIB = 1 << 20
# Adam in mixed precision: gradient, fp32 weights and both moments read, the last three and the
# bf16 weight written, in bytes a parameter.
_OPTIMIZER_TRAFFIC_BYTES = 30
# Of a memory's rate by data sheet, what kernels of codecs reach, in and out, by the bits that they
# keep: those of bf16 on an H100 (docs/results/gpu/README.md). The noise of 4 bits takes computing.
_CODEC_FRACTIONS = {8: 0.58, 4: 0.41}
# Weight and gradient in fp32; both moments, and in mixed precision an fp32 weight.
GRADIENT_BYTES, _MOMENT_BYTES, _MAIN_WEIGHT_BYTES = 4, 8, 4


@dataclass(frozen=True)
class Projection:
    """Everything that a profile is made from.

    Attributes:
        stage: which pipeline stage; the first holds the most micro-batches.
        distributed_optimizer: its states are divided among data-parallel ranks.
        min_bytes: smaller storages stay in device memory.
        inflight_bytes: see `StageProfile`; None: the default of a run.
        replay: what is a cheap function of other saved bytes is computed again in backward.
        codec: that keeps and moves what layers save in few bits: a name of `CODECS`, or `off`.
        states_on: `off`, or the tier that optimizer states and main weights are on.
        states_window_bytes: of them that are in host memory nevertheless, and do not move.
    """

    model: Transformer
    parallel: Parallelism
    hardware: Hardware
    stage: int = 0
    distributed_optimizer: bool = False
    min_bytes: int = MIB
    inflight_bytes: int | None = None
    replay: bool = False
    codec: str = "off"
    states_on: str = "off"
    states_window_bytes: int = DEFAULT_WINDOW_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.parallel.pipeline:
            raise ConfigurationError(
                f"there is no pipeline stage {self.stage}; choose 0 to {self.parallel.pipeline - 1}"
            )

    @property
    def parameters(self) -> float:
        """Number of parameters that this rank holds."""
        return self._parameters_outside_experts + self._expert_parameters

    @property
    def updated_parameters(self) -> float:
        """Of them, those whose optimizer states this rank has."""
        shares, of_experts = 1, 1
        if self.distributed_optimizer:
            shares, of_experts = self.parallel.data, self.parallel.data // self.parallel.expert
        return self._parameters_outside_experts / shares + self._expert_parameters / of_experts

    @property
    def _layers(self) -> list[int]:
        """The numbers of this stage's layers in the whole model, from 1."""
        chunks = range(self.parallel.virtual)
        found = [self.parallel.layers_of_chunk(self.model, self.stage, one) for one in chunks]
        return [number for layers in found for number in layers]

    @property
    def _expert_parameters(self) -> float:
        if self.model.experts is None:
            return 0.0
        number = sum(map(self.model.expert_parameters, self._layers))
        return number / self.parallel.expert / self.parallel.tensor

    @property
    def _parameters_outside_experts(self) -> float:
        model, last = self.model, self.parallel.pipeline - 1
        number = model.num_layers / self.parallel.pipeline * model.layer_parameters
        if model.experts is not None:
            number = sum(map(model.parameters_outside_experts, self._layers))
        tables = (self.stage == 0) + (self.stage == last)
        if last == 0 and model.tied_embeddings:
            tables = 1
        return (number + tables * model.vocab_size * model.hidden_size) / self.parallel.tensor

    @property
    def weights_bytes(self) -> float:
        """Device memory that weights, gradients and the optimizer take."""
        own = self.parameters * (self.model.element_bytes + GRADIENT_BYTES)
        return own + (self.state_bytes if self.states_on == "off" else 0)

    @property
    def state_bytes(self) -> float:
        """Bytes of this rank's optimizer states and main weights, wherever they are."""
        main = _MAIN_WEIGHT_BYTES if self.model.dtype != "fp32" else 0
        return self.updated_parameters * (_MOMENT_BYTES + main)

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks together."""
        return self.parallel.global_batch_size * self.model.seq_length

    @property
    def activation_room_bytes(self) -> int:
        """Device memory that is left for activations."""
        return int(self.hardware.gpu.memory_bytes - self.weights_bytes)

    def forward_s(self, work: Work) -> float:
        """Seconds of a forward pass through it."""
        return self._seconds(work.matmul_flops, work.attention_flops, work)

    def backward_s(self, work: Work) -> float:
        """Seconds of its backward pass: twice the matrix products and bytes, the same sends."""
        attention = work.attention_flops * work.attention_backward + work.repeated_flops
        again = self.forward_s(work) if work.runs_again else 0.0
        return again + self._seconds(MATMUL_BACKWARD * work.matmul_flops, attention, work, passes=2)

    def selective_s(self, work: Work) -> float:
        """Seconds that a part's selective operations take in forward."""
        return self._memory_s(work.selective_memory_bytes)

    def saved(self, work: Work) -> tuple[Saved, ...]:
        """Storages that forward keeps of it for backward."""
        return work.saved_with_replay(self.min_bytes) if self.replay else work.saved

    def replayed(self, work: Work) -> tuple[Saved, ...]:
        """Storages that backward computes again of these."""
        return work.replayed(self.min_bytes) if self.replay else ()

    def stored_bytes(self, one: Saved) -> int:
        """Bytes that a storage is kept or moved in: fewer where a codec encodes it."""
        found = self._quantization(one)
        if found is None:
            return one.num_bytes
        width = 4 if one.is_fp32 else self.model.element_bytes
        return min(one.num_bytes, found.encoded_bytes(one.num_bytes // width))

    def _quantization(self, one: Saved) -> Quantization | None:
        """How a storage is encoded; None: it is not."""
        codec = CODECS.get(self.codec)
        if codec is None or one.num_bytes < self.min_bytes or one.is_exact:
            return None
        return codec.sums if one.is_sum else codec.others

    def replay_s(self, work: Work) -> float:
        """Seconds of backward for that: what is read and written, at memory's rate."""
        return self._memory_s(sum(one.replay_bytes for one in self.replayed(work)))

    def codec_s(self, work: Work) -> float:
        """Seconds to encode in forward and to decode in backward: each reads and writes once."""
        seconds = 0.0
        for one in self.saved(work):
            found, stored = self._quantization(one), self.stored_bytes(one)
            if found is not None and stored < one.num_bytes:
                rate = self.hardware.gpu.memory_bytes_per_s * _CODEC_FRACTIONS[found.bits]
                seconds += 2 * (one.num_bytes + stored) / rate
        return seconds

    def _memory_s(self, num_bytes: float) -> float:
        gpu = self.hardware.gpu
        return num_bytes / (gpu.memory_bytes_per_s * gpu.assumed.memory)

    def _seconds(self, matmul: float, attention: float, work: Work, passes: int = 1) -> float:
        gpu = self.hardware.gpu
        peak = gpu.peak_flops(self.model.dtype)
        return (
            matmul / (peak * gpu.assumed.matmul)
            + attention / (peak * gpu.assumed.attention)
            + passes * work.memory_bytes / (gpu.memory_bytes_per_s * gpu.assumed.memory)
            + work.sent_bytes / (gpu.nvlink_bytes_per_s * gpu.assumed.nvlink)
        )


def project(of: Projection) -> StageProfile:
    """The profile that the first steps of such a run should measure."""
    model, parallel = of.model, of.parallel
    layers: list[LayerProfile] = []
    dense = with_experts = _layer(of, None)
    if model.experts is not None:
        with_experts = _layer(of, model.experts)
    for chunk in range(parallel.virtual):
        for place, number in enumerate(parallel.layers_of_chunk(model, of.stage, chunk)):
            is_sent = place == 0 and (of.stage, chunk) != (0, 0)
            layer = with_experts if model.has_experts(number) else dense
            layers.append(_named(_held(layer) if is_sent else layer, chunk, number))
    head, embedding = head_work(model, parallel), embedding_work(model, parallel)
    chunks = range(parallel.virtual)
    first = [of.stage == 0 and chunk == 0 for chunk in chunks]
    last = [of.stage == parallel.pipeline - 1 and chunk == parallel.virtual - 1 for chunk in chunks]
    profile = StageProfile(
        position=PipelinePosition(
            parallel.pipeline, of.stage, parallel.virtual, parallel.group_size or parallel.pipeline
        ),
        num_micro_batches=parallel.num_micro_batches,
        layers=tuple(layers),
        tiers=of.hardware.tiers(),
        before_s=_where(first, of.forward_s(embedding)),
        after_s=_where(last, of.forward_s(head)),
        backward_before_s=_where(last, of.backward_s(head) + of.replay_s(head)),
        backward_after_s=_where(first, of.backward_s(embedding)),
        step_fixed_s=_optimizer_s(of),
        pass_fixed_bytes=tuple(
            int(is_first) * _bytes(of, embedding) + int(is_last) * _bytes(of, head)
            for is_first, is_last in zip(first, last, strict=True)
        ),
        transient_bytes=_transient_bytes(of, any(last)),
        inflight_bytes=of.inflight_bytes
        or max(DEFAULT_INFLIGHT_BYTES, 2 * max(one.movable_bytes for one in layers)),
        sizes={
            "micro_batch_size": parallel.micro_batch_size,
            "seq_length": model.seq_length,
        },
        source=f"projected for {of.hardware.gpu.title}",
    )
    states = states_of(of, profile)
    return profile if states is None else states.beside(profile)


def states_of(of: Projection, profile: StageProfile) -> ProjectedStates | None:
    """What a step does with the states; None: they stay.

    Args:
        of: what is projected.
        profile: its profile without them.
    """
    if of.states_on == "off":
        return None
    return ProjectedStates(
        num_bytes=int(of.state_bytes),
        window_bytes=of.states_window_bytes,
        tier=of.hardware.tier(of.states_on),
        update_s=_optimizer_s(of),
        between_s=keep_step_s(profile) - profile.step_fixed_s,
        tokens=of.tokens,
    )


def keep_step_s(profile: StageProfile) -> float:
    """Seconds of a step that keeps everything, in closed form: passes, waits of the pipeline, rest.

    A stage waits (p - 1) / v passes of itself, forward and backward (Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv 2104.04473,
    section 2.2). Quick, and what the planner's simulation is compared with.
    """
    position = profile.position
    layers = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    ends = sum(map(sum, (profile.before_s, profile.after_s)))
    ends += sum(map(sum, (profile.backward_before_s, profile.backward_after_s)))
    waits = (position.num_stages - 1) / position.num_chunks * layers
    return profile.num_micro_batches * (layers + ends) + waits + profile.step_fixed_s


def saved_bytes(profile: StageProfile) -> int:
    """Bytes of layers' activations that a rank saves in a step, all of which could be written."""
    return profile.num_micro_batches * sum(layer.movable_bytes for layer in profile.layers)


def _layer(of: Projection, experts: Experts | None) -> LayerProfile:
    attention, mlp = works = layer_work(of.model, of.parallel, experts=experts)
    forward = {work.name: of.forward_s(work) for work in works}
    total = sum(forward.values())
    input_bytes = layer_input_bytes(of.model, of.parallel)  # the MLP's is as large
    return LayerProfile(
        chunk=0,
        name="",
        forward_s=total,
        backward_s=sum(of.backward_s(work) for work in works),
        recompute_s=total,
        input_bytes=input_bytes,
        movable_input_bytes=_movable(of, input_bytes),
        parts=(
            _part(of, attention, forward["attention"], of.backward_s(mlp), input_bytes),
            _part(of, mlp, total, 0.0, input_bytes),
        ),
    )


def _part(
    of: Projection, work: Work, produced_s: float, first_use_s: float, input_bytes: int
) -> PartProfile:
    large = [one for one in of.saved(work) if one.num_bytes >= of.min_bytes]
    moved = [of.stored_bytes(one) for one in large]
    encoded = [one for one in large if of.stored_bytes(one) < one.num_bytes]
    replayed = [one.num_bytes for one in of.replayed(work)]
    again = [*replayed, *(one.num_bytes for one in encoded)]
    only_then = [one for one in of.saved(work) if one.only_for_replay or one in encoded]
    again_large = [one for one in large if one.name in work.selective]
    selective = [one.num_bytes for one in again_large]
    return PartProfile(
        name=work.name,
        movable_bytes=sum(moved),
        resident_bytes=_bytes(of, work) - sum(one.num_bytes for one in large),
        num_storages=len(moved),
        produced_s=produced_s,
        first_use_s=first_use_s,
        recompute_s=of.forward_s(work),
        input_bytes=input_bytes,
        selective_bytes=sum(map(of.stored_bytes, again_large)),
        selective_s=of.selective_s(work) if selective else None,
        selective_extra_bytes=max(selective, default=0),  # the result, once more
        movable_input_bytes=_movable(of, input_bytes),
        replayed_bytes=sum(again),
        replay_s=of.replay_s(work) + of.codec_s(work),
        # A norm's come one after the other, of which the last is made of the one before it; so do
        # the activation function's result and the product with it.
        replay_extra_bytes=sum(sorted(again)[-2:]),
        only_for_replay_bytes=sum(map(of.stored_bytes, only_then)),
        codec_spared_bytes=sum(one.num_bytes - of.stored_bytes(one) for one in encoded),
        codec_s=of.codec_s(work),
        exact_extra_bytes=sum(sorted(replayed)[-2:]),
        exact_selective_bytes=sum(selective),
    )


def _movable(of: Projection, num_bytes: int) -> int:
    """Of a storage of this size: all of it, if it is large enough."""
    return num_bytes if num_bytes >= of.min_bytes else 0


def _named(layer: LayerProfile, chunk: int, number: int) -> LayerProfile:
    return replace(layer, chunk=chunk, name=f"decoder.{number}")


def _held(layer: LayerProfile) -> LayerProfile:
    """A chunk's first layer, whose input another stage has sent: the schedule holds that itself."""
    attention, *rest = layer.parts
    attention = replace(attention, movable_input_bytes=0)
    return replace(layer, movable_input_bytes=0, parts=(attention, *rest))


def _optimizer_s(of: Projection) -> float:
    """Adam's update, which does nothing but read and write."""
    gpu = of.hardware.gpu
    traffic = of.updated_parameters * _OPTIMIZER_TRAFFIC_BYTES
    return traffic / (gpu.memory_bytes_per_s * gpu.assumed.memory)


def _bytes(of: Projection, work: Work) -> int:
    return sum(one.num_bytes for one in of.saved(work))


def _where(there: Iterable[bool], seconds: float) -> tuple[float, ...]:
    return tuple(seconds if one else 0.0 for one in there)


def _transient_bytes(of: Projection, has_head: bool) -> int:
    """The largest gradients that exist at once: around the activation function, or the logits'."""
    states = 2 * layer_input_bytes(of.model, of.parallel)
    largest = inside_mlp_bytes(of.model, of.parallel)
    if has_head:  # of chunked logits, the chunk and its gradient
        chunks = 2 if of.model.chunked_loss else 1
        largest = max(largest, chunks * logits_bytes(of.model, of.parallel))
    return largest + states
