# SPDX-License-Identifier: Apache-2.0
"""The mean of a chunked loss, its gradients made in the forward pass: `chunked_mean_loss`.

Where the losses are used for their mean alone, what comes back in backward is one number. So
forward computes each chunk's logits once, its loss and its gradients, and backward multiplies,
whatever came back: nothing has to be expected, as in `chunked_loss.py`. It keeps the gradients
instead of the logits' two numbers a token: [tokens, hidden] and [vocabulary, hidden]. For one rank
that has the whole vocabulary.

Note [Where the divisor is]
The sum is divided before the gradients are made, not in backward: a gradient in bf16 is then
rounded once, as usual, since what comes back is usually 1 or a power of two. In fp16 gradients
as small as 1 / tokens would vanish before a loss scale could reach them: `chunked_loss.py` serves.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.offload.ops.chunked_gradients import ChunkedGradients
from megatron.offload.ops.chunked_logits import ChunkedLogits, LossSettings
from megatron.offload.ops.chunked_loss import chunked_cross_entropy, token_losses


def chunked_mean_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    divisor: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    settings: LossSettings | None = None,
) -> torch.Tensor:
    """The sum of all tokens' losses over `divisor`: a scalar in fp32.

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden] of the output projection, of the same dtype.
        labels: [tokens].
        divisor: a scalar that no gradient goes to; usually the number of tokens that count.
        bias: [vocabulary].
        settings: of one rank; see `chunked_cross_entropy`.
    """
    settings = settings or LossSettings()
    wants_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wants_gradients or hidden.dtype is torch.float16 or settings.num_ranks > 1:
        losses = chunked_cross_entropy(hidden, weight, labels, bias=bias, settings=settings)
        return losses.sum() / divisor
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"{len(hidden)} tokens have labels of shape {tuple(labels.shape)}")
    loss: torch.Tensor = _ChunkedMean.apply(hidden, weight, bias, labels, divisor, settings)
    return loss


class _ChunkedMean(torch.autograd.Function):
    """Maps hidden states, weight, bias, labels, divisor and settings to the mean."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: torch.Tensor,
        settings: LossSettings,
    ) -> torch.Tensor:
        logits = ChunkedLogits(hidden.contiguous(), weight, bias, settings)
        gradients = ChunkedGradients(logits, ctx.needs_input_grad[:3])
        share = divisor.float().reciprocal().expand(len(hidden))
        losses = token_losses(logits, labels, gradients, share)[-1]
        # Not saved tensors: they are results, needed at once, and not to be moved anywhere.
        ctx.gradients = gradients.results()
        return losses.sum() / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of this chunked loss were made in its forward pass and are used up; "
                "compute the loss again for a second backward pass"
            )
        gradients, ctx.gradients = ctx.gradients, None
        results = [None if one is None else one.mul_(gradient) for one in gradients]
        return (*results, None, None, None)
