# SPDX-License-Identifier: Apache-2.0
"""BERT: masked language modelling, and the order of two segments (the binary head)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.transformer_config import TransformerConfig

from .data import Batch, next_batch
from .layers import has_transformer_engine, with_torch_attention
from .loss import masked_mean, report
from .masked import MaskedTask
from .model import LossFunction, unwrap
from .tokenizer import BertTokenizer

_LONGEST_NGRAM = 3  # words that are hidden together at most, as in Megatron-LM's pretrain_bert.py


class _LocalBert(BertModel):
    """BERT with torch's attention.

    Core looks for the version of Transformer Engine when it meets an attention that is not its own.
    Torch's takes the mask that Transformer Engine takes, [b, 1, 1, s]: no position has nothing to
    attend to, as padding would have with [b, 1, s, s].
    """

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        return "b11s"


class BERT(MaskedTask):
    """The pretraining task of an encoder: say what is hidden, and which segment came first."""

    name = "BERT"
    fixed_flags = ("bert_binary_head",)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that only BERT has."""
        super().add_arguments(parser)
        parser.add_argument_group("BERT").add_argument(
            "--bert-no-binary-head",
            action="store_false",
            dest="bert_binary_head",
            help="no prediction of the segments' order",
        )

    def build_tokenizer(self, args: argparse.Namespace) -> BertTokenizer:
        """WordPiece.

        Raises:
            UserError: It cannot be read or lacks a special token.
        """
        return BertTokenizer(self.tokenizer_path(args))

    def least_sentences(self, args: argparse.Namespace) -> int:
        """Two segments need two sentences."""
        return 2 if args.bert_binary_head else 1

    def dataset_class(self, args: argparse.Namespace) -> type:
        """Core's dataset class."""
        return BERTMaskedWordPieceDataset

    def dataset_config(
        self, args: argparse.Namespace, **common: Any
    ) -> BERTMaskedWordPieceDatasetConfig:
        """As in Megatron-LM's pretrain_bert.py."""
        return BERTMaskedWordPieceDatasetConfig(
            **common,
            **self.masking(args),
            masking_max_ngram=_LONGEST_NGRAM,
            masking_use_geometric_distribution=False,
            classification_head=args.bert_binary_head,
        )

    def loss_names(self, args: argparse.Namespace) -> tuple[str, ...]:
        """Both tasks' losses, and their sum."""
        return ("loss", "lm_loss", "sop_loss") if args.bert_binary_head else ("loss",)

    def build_model(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        vp_stage: int | None,
        **common: Any,
    ) -> BertModel:
        """Builds one pipeline chunk."""
        if has_transformer_engine():
            model_class, spec = BertModel, get_bert_layer_with_transformer_engine_spec()
        else:
            model_class, spec = _LocalBert, with_torch_attention(bert_layer_local_spec)
        return model_class(
            config=config,
            num_tokentypes=2 if args.bert_binary_head else 0,
            transformer_layer_spec=spec,
            add_binary_head=args.bert_binary_head,
            vp_stage=vp_stage,
            **common,
        )

    def forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """One micro-batch, as megatron-core's schedules call it."""
        batch = next_batch(iterator)
        output = model(
            batch["text"],
            batch["padding_mask"],
            tokentype_ids=batch["types"] if unwrap(model).add_binary_head else None,
            lm_labels=batch["labels"],
        )
        return output, partial(_loss, batch["loss_mask"], batch["is_random"])


def _loss(
    loss_mask: torch.Tensor,
    is_swapped: torch.Tensor,
    output: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the mean over hidden tokens and the mean over samples.

    Args:
        loss_mask: [b, s], 1 where a token is hidden.
        is_swapped: [b], 1 where the second segment stands first.
        output: Per-token losses [b, s]; logits [b, 2], or None without the binary head.
    """
    token_losses, order_logits = output
    lm_loss = masked_mean(token_losses, loss_mask)
    if order_logits is None:
        return lm_loss, report(loss=lm_loss)
    sop_loss = F.cross_entropy(order_logits.float(), is_swapped)
    loss = lm_loss + sop_loss
    return loss, report(loss=loss, lm_loss=lm_loss, sop_loss=sop_loss)
