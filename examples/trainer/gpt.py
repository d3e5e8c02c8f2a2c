# SPDX-License-Identifier: Apache-2.0
"""GPT: layer spec, model, dataset and loss. Another architecture is another file like
this one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from . import experts
from .corpus import Corpus, Supply
from .data import Batch, next_batch
from .errors import UserError
from .layers import has_transformer_engine, with_torch_attention
from .loss import language_model_loss
from .model import LossFunction, Task, transformer_config
from .tokenizer import Tokenizer, build_tokenizer


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layers if it and CUDA are there, else core's with torch's attention."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    return with_torch_attention(
        get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    )


class GPT(Task):
    """The pretraining task of a decoder: predict the next token."""

    name = "GPT"
    fixed_flags = ("num_experts", "moe_shared_expert_intermediate_size")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags of experts."""
        experts.add_arguments(parser)

    def check_arguments(self, args: argparse.Namespace) -> None:
        """Checks the flags of experts.

        Raises:
            UserError: They do not fit.
        """
        experts.check_arguments(args)

    def transformer_config(self, args: argparse.Namespace) -> TransformerConfig:
        """With experts, if they are asked for."""
        return transformer_config(args, **experts.settings(args))

    def build_tokenizer(self, args: argparse.Namespace) -> Tokenizer:
        """Any tokenizer with an end of document, or none."""
        return build_tokenizer(args)

    def supply(self, args: argparse.Namespace, corpus: Corpus) -> Supply:
        """Tokens: a sample is cut out of the documents wherever it begins.

        Raises:
            UserError: Fewer than one sample has.
        """
        num_tokens, needed = int(corpus.lengths.sum()), args.seq_length + 1
        if num_tokens < needed:
            raise UserError(
                f"corpus {corpus.prefix} has {num_tokens} tokens; one sample of --seq-length "
                f"{args.seq_length} needs {needed}"
            )
        return Supply(corpus.lengths, needed)

    def dataset_class(self, args: argparse.Namespace) -> type:
        """Core's dataset class."""
        return MockGPTDataset if args.mock_data else GPTDataset

    def dataset_config(self, args: argparse.Namespace, **common: Any) -> GPTDatasetConfig:
        """No attention mask: the attention kernel knows that it is causal."""
        return GPTDatasetConfig(
            **common,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def build_model(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        vp_stage: int | None,
        **common: Any,
    ) -> GPTModel:
        """Builds one pipeline chunk."""
        return GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(config),
            rotary_base=args.rotary_base,
            vp_stage=vp_stage,
            **common,
        )

    def forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """One micro-batch, as megatron-core's schedules call it."""
        batch = next_batch(iterator)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(language_model_loss, batch["loss_mask"])
