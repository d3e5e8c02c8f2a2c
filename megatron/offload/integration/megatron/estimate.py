# SPDX-License-Identifier: Apache-2.0
"""How many bytes of activations a rank will put on its SSD: `activation_bytes`, for T5
`encoder_decoder_bytes`.

Trainers pass the result to `install` as `reserve_bytes`, so that a disk that is too small shows
before training. What a layer saves is counted as `plan` does it, in `planner/projection/layer.py`,
without the s x s attention scores that fused attention does not save. A `TransformerConfig` does
not say whether positions are rotary: `MARGIN` holds rotated queries and keys. Of layers that
Megatron recomputes only inputs count.

Note [All micro-batches at a time]
In a layer-major step every unit but the last keeps what it saves of all micro-batches. What a model
then takes is far more than one pass saves, so layers that save nothing on a tier, because flags
recompute them or leave them out, do not count there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.offload.config import OffloadConfig
from megatron.offload.integration.megatron.recomputable import recomputes_fully
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.units import units_of
from megatron.offload.planner.profile.pipeline_schedule import (
    PipelinePosition,
    layer_major_position,
    pipeline_schedule,
)
from megatron.offload.planner.projection.layer import INSIDE_MLP, LOG_SUM_EXP, layer_work
from megatron.offload.planner.projection.model import Parallelism, Transformer

MARGIN = 1.15  # statistics of norms, log-sum-exp of attention, rounding to file-system blocks


def layer_bytes(settings: Any, tokens: int) -> int:
    """Bytes that one layer saves for one micro-batch on one tensor-parallel rank.

    Args:
        settings: a `TransformerConfig`.
        tokens: sequence length x micro-batch size.
    """
    tensor = settings.tensor_model_parallel_size
    experts = bool(getattr(settings, "num_moe_experts", None))
    model = Transformer(
        num_layers=1,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        seq_length=tokens,
        num_query_groups=settings.num_query_groups,
        kv_channels=settings.kv_channels,
        ffn_hidden_size=(experts and settings.moe_ffn_hidden_size) or settings.ffn_hidden_size,
        gated=settings.gated_linear_unit,
        hidden_dropout=settings.hidden_dropout,
        dtype="bf16" if settings.bf16 or settings.fp16 else "fp32",
        # Both halves of a gated unit are saved once more unless one kernel computes it.
        fused_kernels=not settings.gated_linear_unit or settings.bias_activation_fusion,
    )
    divided = Parallelism(tensor=tensor, sequence_parallel=settings.sequence_parallel)
    attention, mlp = layer_work(model, divided)
    saved = [one for one in (*attention.saved, *mlp.saved) if one.name != LOG_SUM_EXP]
    num_bytes = sum(one.num_bytes for one in saved)
    if experts:  # those that a token goes to, and its copies before and behind each of them
        inside = sum(one.num_bytes for one in mlp.saved if one.name in INSIDE_MLP)
        copies = 2 * tokens * settings.hidden_size * model.element_bytes // tensor
        num_bytes += settings.moe_router_topk * (inside + copies) - inside
    return num_bytes


def _num_recomputed(settings: Any, num_layers: int) -> int:
    """How many of a chunk's layers Megatron itself recomputes as a whole."""
    if not recomputes_fully(settings):
        return 0
    is_block = settings.recompute_method == "block"
    return min(settings.recompute_num_layers, num_layers) if is_block else num_layers


def _inputs_bytes(settings: Any, num_layers: int, tokens: int) -> int:
    """Bytes that the checkpoints around so many layers keep: the inputs of each."""
    element = 2 if settings.bf16 or settings.fp16 else 4
    shared = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
    is_uniform = recomputes_fully(settings) and settings.recompute_method == "uniform"
    num_inputs = -(-num_layers // (settings.recompute_num_layers if is_uniform else 1))
    return int(num_inputs * tokens * settings.hidden_size * element // shared)


def _position(settings: Any, stage: int) -> PipelinePosition:
    """Of a pipeline rank; `settings` is a `TransformerConfig`."""
    stages = settings.pipeline_model_parallel_size
    chunks = settings.virtual_pipeline_model_parallel_size or 1
    group = settings.microbatch_group_size_per_vp_stage or stages
    return PipelinePosition(stages, stage, chunks, group)


def _most_in_flight(
    position: PipelinePosition, num_microbatches: int, of_chunks: Sequence[int]
) -> int:
    """The most of a step in flight, where a pass of each chunk (or unit) is worth so much."""
    in_flight = most = 0
    for one in pipeline_schedule(position, num_microbatches):
        in_flight += -of_chunks[one.chunk] if one.is_backward else of_chunks[one.chunk]
        most = max(most, in_flight)
    return most


def _layer_major_bytes(
    layers: Sequence[int], num_microbatches: int, layer_major: LayerMajorConfig
) -> int:
    """The most of a step whose layers save so many bytes of a micro-batch, run unit by unit.

    Raises:
        ConfigurationError: there are more units than layers.
    """
    units = units_of(range(len(layers)), layer_major.num_units)
    position = layer_major_position(units.values(), alternates=layer_major.alternates)
    of_units = [0] * position.num_chunks
    for index, unit in units.items():
        of_units[unit] += layers[index]
    return _most_in_flight(position, num_microbatches, of_units)


def _saved_by_layers(
    settings: Any, tokens: int, config: OffloadConfig | None, blocks: Sequence[str], more: int = 0
) -> list[int]:
    """Bytes that each layer saves of a micro-batch on a tier: see the second Note.

    Args:
        settings: a `TransformerConfig`.
        tokens: of a micro-batch.
        config: says which layers save nothing there; None: all save.
        blocks: names that their block may have.
        more: bytes that each of them saves beyond `layer_bytes`.
    """
    config = config or OffloadConfig()
    saved = []
    for number in range(1, settings.num_layers + 1):
        names = [f"{block}.{number}" for block in blocks]
        if config.recompute_layers and any(one in config.recompute_layers for one in names):
            moves = config.recompute_input not in (None, "keep")
            saved.append(_inputs_bytes(settings, 1, tokens) if moves else 0)
        elif config.offload_layers and not any(one in config.offload_layers for one in names):
            saved.append(0)
        else:
            saved.append(layer_bytes(settings, tokens) + more)
    return saved


def _layers_of_chunks(settings: Any, stage: int) -> list[int]:
    """How many layers each model chunk of a pipeline stage has, as Megatron divides them.

    Of what Megatron refuses to divide when it builds the model: as many in each, rounded up.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    chunks = range(settings.virtual_pipeline_model_parallel_size or 1)
    uneven = getattr(settings, "pipeline_model_parallel_layout", None)
    if uneven is not None:  # asked otherwise, it answers for this process's stage
        return [uneven.layout[stage][chunk].count(LayerType.decoder) for chunk in chunks]
    try:
        return [get_num_layers_to_build(settings, vp_stage=one, pp_rank=stage) for one in chunks]
    except AssertionError:
        all_chunks = settings.pipeline_model_parallel_size * len(chunks)
        return [-(-settings.num_layers // all_chunks) for _ in chunks]


def stage_of(rank: int, world_size: int, settings: Any) -> int:
    """The pipeline stage of a rank in Megatron's default order, where it changes last."""
    return rank * int(settings.pipeline_model_parallel_size) // world_size


def activation_bytes(
    settings: Any,
    seq_length: int,
    micro_batch_size: int,
    num_microbatches: int,
    stage: int = 0,
    *,
    config: OffloadConfig | None = None,
    layer_major: LayerMajorConfig | None = None,
) -> int:
    """Bytes that a rank keeps on its SSD at the worst moment of a step.

    Args:
        settings: a `TransformerConfig`.
        seq_length: tokens of one sample, on all context-parallel ranks together.
        micro_batch_size: samples of one micro-batch.
        num_microbatches: micro-batches of one step on each data-parallel rank.
        stage: pipeline rank; the first one needs most.
        config: what the flags ask for; heard in layer-major steps.
        layer_major: in which order steps run.

    Raises:
        ConfigurationError: there are more units than layers.
    """
    tokens = (
        seq_length * micro_batch_size // (getattr(settings, "context_parallel_size", None) or 1)
    )
    if layer_major is not None and layer_major.enabled:
        saved = _saved_by_layers(settings, tokens, config, ("decoder", "encoder"))
        return int(MARGIN * _layer_major_bytes(saved, num_microbatches, layer_major))
    of_chunks = []
    for layers in _layers_of_chunks(settings, stage):
        recomputed = _num_recomputed(settings, layers)
        per_pass = (layers - recomputed) * layer_bytes(settings, tokens)
        of_chunks.append(per_pass + _inputs_bytes(settings, recomputed, tokens))
    position = _position(settings, stage)
    return int(MARGIN * _most_in_flight(position, num_microbatches, of_chunks))


def encoder_decoder_bytes(
    encoder: Any,
    decoder: Any,
    seq_lengths: tuple[int, int],
    micro_batch_size: int,
    num_microbatches: int,
    *,
    config: OffloadConfig | None = None,
    layer_major: LayerMajorConfig | None = None,
) -> int:
    """Like `activation_bytes` for T5, whose decoder layers also attend to the encoder's output.

    Args:
        encoder: a `TransformerConfig`.
        decoder: another; megatron-core has no pipeline stages for T5.
        seq_lengths: tokens of one sample in the encoder and in the decoder.
        micro_batch_size: samples of one micro-batch.
        num_microbatches: micro-batches of one step on each data-parallel rank.
        config: what the flags ask for; heard in layer-major steps.
        layer_major: in which order steps run.

    Raises:
        ConfigurationError: there are more units than layers.
    """
    cross, once = _cross_attention_bytes(decoder, seq_lengths, micro_batch_size)
    if layer_major is not None and layer_major.enabled:
        of_encoder, of_decoder = (length * micro_batch_size for length in seq_lengths)
        layers = [
            *_saved_by_layers(encoder, of_encoder, config, ("encoder",)),
            *_saved_by_layers(decoder, of_decoder, config, ("decoder",), more=cross),
        ]
        most = _layer_major_bytes(layers, num_microbatches, layer_major)
        return int(MARGIN * (most + num_microbatches * once))
    own = sum(
        activation_bytes(settings, length, micro_batch_size, num_microbatches)
        for settings, length in zip((encoder, decoder), seq_lengths, strict=True)
    )
    num_layers = decoder.num_layers - _num_recomputed(decoder, decoder.num_layers)
    return own + int(MARGIN * (num_layers * cross + once))


def _cross_attention_bytes(
    settings: Any, seq_lengths: tuple[int, int], micro_batch_size: int
) -> tuple[int, int]:
    """Bytes that each cross attention of the decoder saves of a micro-batch, and all of them once.

    Of the decoder's tokens: both sides of the norm, its dropout mask, the query and the attention's
    output. Of the encoder's: keys and values, and once for all layers its output.
    """
    element = 2 if settings.bf16 or settings.fp16 else 4
    tp = settings.tensor_model_parallel_size
    shared = tp if settings.sequence_parallel else 1
    hidden = settings.hidden_size
    mask = hidden if settings.hidden_dropout > 0 else 0
    decoder_token = element * (2 * hidden / shared + 2 * hidden / tp) + mask / shared
    encoder_token = element * 2 * hidden / tp
    of_encoder, of_decoder = seq_lengths
    per_layer = of_decoder * decoder_token + of_encoder * encoder_token
    once = element * hidden * of_encoder / shared
    return int(micro_batch_size * per_layer), int(micro_batch_size * once)
