# SPDX-License-Identifier: Apache-2.0
"""Core attention that saves no (sequence x sequence) tensor, as flash attention does on GPUs.

`SdpaAttention` stands in a layer spec where megatron-core's DotProductAttention would. It calls
torch's fused kernel. That kernel has no dropout on CPUs (torch then falls back to the unfused form,
which saves the probabilities), so training with dropout on a CPU takes `_DropoutAttention`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _DropoutMask:
    """A dropout mask that is drawn again, the same, from one seed instead of being stored.

    Each element takes 16 random bits, so the probability is met to 1/65536; the scale matches the
    probability that is really drawn.
    """

    _LEVELS = 1 << 16
    _WORD = torch.iinfo(torch.int16)

    def __init__(self, probability: float, seed: int) -> None:
        drop = round(probability * self._LEVELS)
        self._threshold = self._WORD.min + drop
        self.scale = self._LEVELS / (self._LEVELS - drop)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, shape: torch.Size) -> Tensor:
        """The next mask: bool, True where an element is kept."""
        lanes = torch.int64.itemsize // torch.int16.itemsize
        words = torch.empty(-(-shape.numel() // lanes), dtype=torch.int64)
        words.random_(torch.iinfo(torch.int64).min, None, generator=self._generator)
        return (words.view(torch.int16)[: shape.numel()] >= self._threshold).view(shape)


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax of masked scores in fp32 for one sample.

    Args:
        query: [groups, heads per group, sq, hn].
        key: [groups, 1, sk, hn].
        mask: Bool, True where attention is forbidden, broadcastable to [.., sq, sk].
        scale: Factor on the scores.
    """
    scores = torch.matmul(query.float() * scale, key.float().transpose(-1, -2))
    if mask is not None:
        scores.masked_fill_(mask, float("-inf"))
    return torch.softmax(scores, dim=-1)


class _DropoutAttention(torch.autograd.Function):
    """Attention with dropout on the probabilities; backward computes them again.

    Saved are query, key, value and a seed, as flash attention does (arXiv 2205.14135, section 3.1
    and appendix B: probabilities and dropout mask are recomputed, not stored). One sample at a
    time, so at most three [heads, sq, sk] fp32 tensors exist at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        probability: float,
        seed: int,
    ) -> Tensor:
        """[b, groups, heads per group, sq, hn] with key and value [b, groups, 1, sk, hn]."""
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale, ctx.probability, ctx.seed = mask, scale, probability, seed
        dropout = _DropoutMask(probability, seed)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for sample in range(query.shape[0]):
            sample_mask = mask if mask is None or mask.shape[0] == 1 else mask[sample : sample + 1]
            weights = _probabilities(query[sample], key[sample], sample_mask, scale)
            weights.mul_(dropout.draw(weights.shape)).mul_(dropout.scale)
            output[sample] = torch.matmul(weights, value[sample].float())
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for query, key and value."""
        query, key, value = ctx.saved_tensors
        (grad_output,) = grads
        mask, scale = ctx.mask, ctx.scale
        dropout = _DropoutMask(ctx.probability, ctx.seed)
        grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        grad_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
        grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        for sample in range(query.shape[0]):
            sample_mask = mask if mask is None or mask.shape[0] == 1 else mask[sample : sample + 1]
            weights = _probabilities(query[sample], key[sample], sample_mask, scale)
            keep = dropout.draw(weights.shape)
            upstream = grad_output[sample].float()
            dropped = (weights * keep).mul_(dropout.scale)
            grad_value[sample] = torch.matmul(dropped.transpose(-1, -2), upstream).sum(
                dim=1, keepdim=True
            )
            # d(scores) = P * (d(P) - rowsum(P * d(P))), with d(P) masked as the forward was.
            grad_weights = torch.matmul(
                upstream, value[sample].float().transpose(-1, -2), out=dropped
            )
            grad_weights.mul_(keep).mul_(dropout.scale)
            row = torch.einsum("...ij,...ij->...i", weights, grad_weights).unsqueeze(-1)
            grad_scores = grad_weights.sub_(row).mul_(weights).mul_(scale)
            grad_query[sample] = torch.matmul(grad_scores, key[sample].float())
            grad_key[sample] = torch.matmul(
                grad_scores.transpose(-1, -2), query[sample].float()
            ).sum(dim=1, keepdim=True)
        return grad_query, grad_key, grad_value, None, None, None, None


class SdpaAttention(MegatronModule):
    """Scaled dot product attention for a layer spec; no parameters.

    Causal, padding, arbitrary and no masks; grouped queries; dropout from the model-parallel
    generator, so that tensor-parallel ranks draw different masks for their heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("SdpaAttention: context parallelism is not supported; use size 1")
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= max(1, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            query: [sq, b, np, hn]; np heads on this rank.
            key: [sk, b, ng, hn]; ng query groups on this rank.
            value: As key.
            attention_mask: Bool, True where attention is forbidden, [b or 1, 1, sq or 1, sk];
                not read for a causal mask.
            attn_mask_type: Overrides the type given to the constructor.
            attention_bias: Not supported.
            packed_seq_params: Not supported.

        Returns:
            [sq, b, np * hn].
        """
        assert attention_bias is None and packed_seq_params is None
        mask_type = attn_mask_type or self.attn_mask_type
        causal = mask_type == AttnMaskType.causal
        mask = None if causal or mask_type == AttnMaskType.no_mask else attention_mask
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        probability = self.dropout if self.training else 0.0
        # Under sequence parallelism the whole layer already runs in the tracker's fork.
        fork: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if probability > 0.0 and not self.config.sequence_parallel:
            fork = tensor_parallel.get_cuda_rng_tracker().fork()
        with fork:
            if probability > 0.0 and query.device.type == "cpu":
                context = self._attend_with_dropout(query, key, value, mask, causal, probability)
            else:
                context = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=None if mask is None else ~mask,
                    dropout_p=probability,
                    is_causal=causal,
                    scale=self.softmax_scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
        context = context.permute(2, 0, 1, 3).contiguous()
        return context.view(*context.shape[:2], -1)

    def _attend_with_dropout(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        probability: float,
    ) -> Tensor:
        if causal:
            ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
            mask = ones.triu_(1).view(1, 1, *ones.shape)
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        groups = key.shape[1]
        context = _DropoutAttention.apply(
            query.unflatten(1, (groups, -1)),
            key.unsqueeze(2),
            value.unsqueeze(2),
            mask,
            self.softmax_scale,
            probability,
            seed,
        )
        return context.flatten(1, 2)
