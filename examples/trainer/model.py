# SPDX-License-Identifier: Apache-2.0
"""From flags to model chunks: TransformerConfig, precision and DistributedDataParallel.

What the model is comes from a `Task` (`gpt.py`, `bert.py`, `t5.py`); how it is wrapped for parallel
training is here.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload.integration.megatron.arguments import (
    config_from_args,
    layer_major_config_from_args,
)
from megatron.offload.integration.megatron.estimate import activation_bytes

from .data import Batch, DatasetSource
from .tokenizer import Tokenizer

LossFunction = Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Task(DatasetSource, Protocol):
    """A model and how it is trained; one per architecture.

    Attributes:
        name: What people call it.
        fixed_flags: Flags of this model alone that a checkpoint fixes.
    """

    name: str
    fixed_flags: tuple[str, ...] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that only this model has."""
        return None

    def check_arguments(self, args: argparse.Namespace) -> None:
        """Fills in defaults of these flags and checks what this model cannot do.

        Raises:
            UserError: It is asked for.
        """
        return None

    def build_tokenizer(self, args: argparse.Namespace) -> Tokenizer:
        """The tokenizer that the flags name.

        Raises:
            UserError: It cannot be read or lacks what this model needs.
        """

    def transformer_config(self, args: argparse.Namespace) -> TransformerConfig:
        """The configuration that the schedules and the last layers read."""
        return transformer_config(args)

    def activation_bytes(
        self, args: argparse.Namespace, config: TransformerConfig, stage: int
    ) -> int:
        """Most bytes of activations on a rank of a stage, for the reservation on the SSD."""
        return activation_bytes(
            config,
            args.seq_length,
            args.micro_batch_size,
            args.num_microbatches,
            stage,
            config=config_from_args(args),
            layer_major=layer_major_config_from_args(args),
        )

    def tokens_per_sample(self, args: argparse.Namespace) -> int:
        """Tokens that the layers see of one sample, padding included."""
        return int(args.seq_length)

    def loss_names(self, args: argparse.Namespace) -> tuple[str, ...]:
        """What the loss function reports: "loss" first, then its parts."""
        return ("loss",)

    def build_model(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        vp_stage: int | None,
        **common: Any,
    ) -> MegatronModule:
        """Builds one pipeline chunk; `common` are arguments that all of core's models take."""

    def forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """One micro-batch, as megatron-core's schedules call it."""


def transformer_config(
    args: argparse.Namespace, num_layers: int | None = None, **of_task: Any
) -> TransformerConfig:
    """The configuration that every layer reads; `num_layers` is --num-layers by default."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    cuda = torch.cuda.is_available()
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    # Left to TransformerConfig where the user says nothing.
    optional: dict[str, Any] = {}
    if args.recompute_modules is not None:
        optional["recompute_modules"] = args.recompute_modules
    if interleaved:
        optional["microbatch_group_size_per_vp_stage"] = args.pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=num_layers or args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=not args.disable_bias_linear,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        use_cpu_initialization=not cuda,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        gradient_accumulation_fusion=False,
        # The interleaved schedule computes wrong gradients with batched point-to-point calls.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # gloo's isend goes on reading a tensor that the interleaved schedule would have freed.
        deallocate_pipeline_outputs=cuda or not interleaved,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        **optional,
        **of_task,
    )


def build_model_chunks(
    args: argparse.Namespace, config: TransformerConfig, task: Task, vocab_size: int
) -> list[DistributedDataParallel]:
    """Builds this rank's pipeline chunks and wraps them for data-parallel training."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_size=args.ddp_bucket_size,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    chunks = []
    virtual_size = args.virtual_pipeline_model_parallel_size
    for index in range(virtual_size or 1):
        vp_stage = index if virtual_size else None
        where: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        model = task.build_model(
            args,
            config,
            vp_stage,
            vocab_size=vocab_size,  # the padded one
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
        )
        if torch.cuda.is_available():
            model.cuda(torch.cuda.current_device())
        wrapped = Float16Module(config, model) if args.bf16 else model
        chunks.append(
            DistributedDataParallel(config, ddp_config, wrapped, disable_bucketing=index > 0)
        )
    _connect(config, chunks)
    return chunks


def _connect(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """Tells the schedules how to put off and to finish the reduction of gradients."""
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.finalize_model_grads_func = finalize_model_grads


def unwrap(chunk: torch.nn.Module) -> MegatronModule:
    """The model inside DistributedDataParallel and Float16Module."""
    while isinstance(chunk, DistributedDataParallel | Float16Module):
        chunk = chunk.module
    return chunk


def num_parameters(chunks: list[DistributedDataParallel]) -> int:
    """Parameters on this rank."""
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def weights_digest(chunks: list[DistributedDataParallel]) -> str:
    """SHA-256 over all ranks' weights: equal exactly when every bit of every weight is."""
    own = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            data = parameter.detach().contiguous().cpu()
            own.update(data.view(torch.uint8).numpy().data)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, own.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
