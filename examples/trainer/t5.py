# SPDX-License-Identifier: Apache-2.0
"""T5: an encoder reads text with gaps, a decoder says what is missing (span corruption)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
    get_t5_decoder_with_transformer_engine_block_spec,
    get_t5_encoder_with_transformer_engine_block_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload.integration.megatron.arguments import (
    config_from_args,
    layer_major_config_from_args,
)
from megatron.offload.integration.megatron.estimate import encoder_decoder_bytes

from .arguments import positive
from .data import Batch, next_batch
from .errors import UserError
from .layers import has_transformer_engine, with_torch_attention
from .loss import language_model_loss
from .masked import MaskedTask
from .model import LossFunction, transformer_config
from .tokenizer import T5Tokenizer

_LONGEST_NGRAM = 10  # words in one gap at most, as in Megatron-LM's pretrain_t5.py


def _local_block(layer: ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    """A block with a norm at its end; core's own spec has one only with Transformer Engine."""
    layers = [with_torch_attention(layer)] * num_layers
    return TransformerBlockSubmodules(layers, layer_norm=layer.submodules.input_layernorm)


class _T5Model(T5Model):
    """T5 whose checkpoints move between layouts that pad the vocabulary differently.

    Core allows that for `output_layer`; the same parameters have a second name in T5's head.
    """

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for name, tensor in content.items():
            if name.startswith("lm_head.output_layer.") and isinstance(tensor, ShardedTensor):
                tensor.allow_shape_mismatch = True
        return content


class T5(MaskedTask):
    """The pretraining task of an encoder with a decoder: fill the gaps."""

    name = "T5"
    fixed_flags = ("decoder_num_layers",)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that only T5 has."""
        super().add_arguments(parser)
        group = parser.add_argument_group("T5")
        for name, dest in (("num-layers", "num_layers"), ("seq-length", "seq_length")):
            group.add_argument(
                f"--encoder-{name}",
                type=positive,
                dest=dest,
                default=argparse.SUPPRESS,
                help=f"the same as --{name}",
            )
        group.add_argument("--decoder-num-layers", type=positive, help="default: as the encoder")
        group.add_argument("--decoder-seq-length", type=positive, default=128)

    def check_arguments(self, args: argparse.Namespace) -> None:
        """Fills in the decoder's layers and checks what T5 cannot do.

        Raises:
            UserError: It is asked for.
        """
        super().check_arguments(args)
        args.decoder_num_layers = args.decoder_num_layers or args.num_layers
        if args.pipeline_model_parallel_size > 1:
            raise UserError(
                "megatron-core has no pipeline parallelism for T5; "
                "use --tensor-model-parallel-size, or leave the rest to data parallelism"
            )
        if args.group_query_attention:
            raise UserError("T5's cross attention has no query groups; leave them out")
        if args.decoder_seq_length > args.max_position_embeddings:
            raise UserError(
                f"--decoder-seq-length ({args.decoder_seq_length}) must not exceed "
                f"--max-position-embeddings ({args.max_position_embeddings})"
            )
        if args.sequence_parallel and args.decoder_seq_length % args.tensor_model_parallel_size:
            raise UserError(
                f"--decoder-seq-length ({args.decoder_seq_length}) must be divisible by "
                f"--tensor-model-parallel-size ({args.tensor_model_parallel_size}); "
                "change one of them"
            )
        num_hidden, num_gaps = _most_hidden(args)
        needed = 1 + num_hidden + num_gaps
        if args.decoder_seq_length < needed:
            raise UserError(
                f"--decoder-seq-length ({args.decoder_seq_length}) is too short for what is hidden "
                f"of --seq-length {args.seq_length}: give it {needed}, or lower --mask-prob"
            )

    def build_tokenizer(self, args: argparse.Namespace) -> T5Tokenizer:
        """One with as many sentinels as a sample has gaps.

        Raises:
            UserError: It cannot be read or lacks a special token.
        """
        tokenizer = T5Tokenizer(self.tokenizer_path(args))
        num_sentinels = len(tokenizer.additional_special_tokens_ids)
        _, num_gaps = _most_hidden(args)
        if num_sentinels < num_gaps:
            raise UserError(
                f"--tokenizer-model {args.tokenizer_model} has {num_sentinels} sentinels; "
                f"--seq-length {args.seq_length} needs {num_gaps}, make it with "
                f"--vocab-extra-ids {num_gaps}"
            )
        return tokenizer

    def dataset_class(self, args: argparse.Namespace) -> type:
        """Core's dataset class."""
        return T5MaskedWordPieceDataset

    def dataset_config(
        self, args: argparse.Namespace, **common: Any
    ) -> T5MaskedWordPieceDatasetConfig:
        """As in Megatron-LM's pretrain_t5.py."""
        return T5MaskedWordPieceDatasetConfig(
            **common,
            **self.masking(args),
            masking_max_ngram=_LONGEST_NGRAM,
            masking_use_geometric_distribution=True,
            sequence_length_decoder=args.decoder_seq_length,
        )

    def transformer_config(self, args: argparse.Namespace) -> TransformerConfig:
        """The decoder's, which has the loss."""
        return transformer_config(args, args.decoder_num_layers)

    def activation_bytes(
        self, args: argparse.Namespace, config: TransformerConfig, stage: int
    ) -> int:
        """The encoder's, the decoder's without and those of its cross attention."""
        return encoder_decoder_bytes(
            transformer_config(args),
            config,
            (args.seq_length, args.decoder_seq_length),
            args.micro_batch_size,
            args.num_microbatches,
            config=config_from_args(args),
            layer_major=layer_major_config_from_args(args),
        )

    def tokens_per_sample(self, args: argparse.Namespace) -> int:
        """The encoder's and the decoder's."""
        return int(args.seq_length + args.decoder_seq_length)

    def build_model(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        vp_stage: int | None,
        **common: Any,
    ) -> T5Model:
        """Builds the model; there is one chunk."""
        counts = args.num_layers, args.decoder_num_layers
        if has_transformer_engine():
            encoder = get_t5_encoder_with_transformer_engine_block_spec(counts[0])
            decoder = get_t5_decoder_with_transformer_engine_block_spec(counts[1])
        else:
            encoder = _local_block(encoder_model_with_local_spec(), counts[0])
            decoder = _local_block(decoder_model_with_local_spec(), counts[1])
        return _T5Model(
            config=config,
            encoder_config=transformer_config(args),
            transformer_encoder_layer_spec=encoder,
            transformer_decoder_layer_spec=decoder,
            **common,
        )

    def forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """One micro-batch, as megatron-core's schedules call it."""
        batch = next_batch(iterator)
        masks = _attention_masks(batch)
        output = model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"])
        return output, partial(language_model_loss, batch["loss_mask"])


def _attention_masks(batch: Batch) -> tuple[Any, Any, Any]:
    """What the encoder, the decoder and its cross attention must not attend to: True there.

    Padding is at the end of a text. Without Transformer Engine the masks are [b, 1, 1, s]: no
    position has nothing to attend to, and the decoder, which looks back only, needs none.
    """
    is_padding = batch["enc_mask"] < 0.5
    if has_transformer_engine():
        return T5MaskedWordPieceDataset.config_attention_mask(
            batch["text_enc"], batch["text_dec"], is_padding, batch["dec_mask"] < 0.5
        )
    mask = is_padding[:, None, None, :]
    return mask, None, mask


def _most_hidden(args: argparse.Namespace) -> tuple[int, int]:
    """Most tokens that core's dataset hides in a sample, and most gaps that they make.

    The first is a bound. A gap has a geometrically distributed number of words, ten at most. Of
    some 7000 samples of the quickstart's corpus the worst had 7 gaps for 9 hidden tokens, 20 for 38
    and 50 for 153: half as many gaps as tokens and eight more are beyond all of these.
    """
    num_hidden = max(1, int(args.mask_prob * args.seq_length))
    return num_hidden, min(num_hidden, num_hidden // 2 + 8)
