# SPDX-License-Identifier: Apache-2.0
"""GPT: layer spec, model, dataset and loss. Another architecture is another file like this one."""

from __future__ import annotations

import argparse
import importlib.util
import logging
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

from .attention import SdpaAttention
from .data import Batch
from .model import LossFunction

_log = logging.getLogger(__name__)


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layers where it and CUDA are there, else core's with SDPA attention."""
    if torch.cuda.is_available():
        if importlib.util.find_spec("transformer_engine") is not None:
            return get_gpt_layer_with_transformer_engine_spec()
        _log.info("no Transformer Engine here: core's own layers with torch's attention")
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def _mean_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean of the per-token losses [b, s] where the mask is 1."""
    mask = loss_mask.reshape(-1)
    loss = (output.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
    # The schedules divide the loss in place: what is reported is a copy.
    return loss, {"loss": loss.detach().clone()}


class GPT:
    """The pretraining task of a decoder: predict the next token."""

    name = "GPT"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """GPT has only the flags that all models share."""

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
        vocab_size: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> GPTModel:
        """Builds one pipeline chunk."""
        return GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(config),
            vocab_size=vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            vp_stage=vp_stage,
        )

    def forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """One micro-batch, as megatron-core's schedules call it."""
        batch = next(iterator)
        if torch.cuda.is_available():
            batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(_mean_loss, batch["loss_mask"])
