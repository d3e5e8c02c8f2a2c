# SPDX-License-Identifier: Apache-2.0
"""Output projection and cross entropy over chunks of tokens: `chunked_cross_entropy`.

Integrations call it in place of a model's output layer and loss. Forward keeps two numbers a token,
backward computes each chunk's logits again; or forward makes the gradients too, if it can expect
what they weigh. Never reads a flag, and knows no framework but torch; the integrations know which
models it fits.

Note [What forward keeps]
With logits l = x W^T + b in the model's dtype, then in fp32, and their largest value m, forward
keeps m and S = sum(exp(l - m)). The loss of a token with label y is log(S) - (l[y] - m), and

    dl = g * (exp(l - m) / S - onehot(y)),    dx = dl W,    dW = sum over chunks of dl^T x

with g the gradient of its loss. Not log-sum-exp = m + log(S): one rounding of a number as large
as m would make the softmax of large logits less exact than the usual one. Logits that are scaled or
capped, and what dl is then: `chunked_logits.py`, Note [Scale and soft cap].

Note [Gradients in forward]
Where g is known in forward, a chunk's logits need not be computed again: three matrix products
instead of four. Usually g is the same for all tokens of all passes, the loss scale over the
number of tokens: `ExpectedGradient`. Forward makes the gradients for the g of the pass before,
backward takes them if g has come to be that, and computes them anew if not. Both ways are the same
operations on the same numbers, so both paths give identical bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.offload.ops.chunked_gradients import ChunkedGradients
from megatron.offload.ops.chunked_logits import ChunkedLogits, LossSettings


class ExpectedGradient:
    """What the loss of every token is expected to weigh: as much as in the pass before.

    For the passes of one output layer. It gives up where tokens weigh differently (loss masks), or
    where it was wrong more often than right: gradients that are made in vain are a third more work.

    Attributes:
        value: g of Note [Gradients in forward]; None: nothing is expected.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._trust = _TRUST

    def check(self, gradient: torch.Tensor) -> bool:
        """Whether the expectation was right; waits for the device. Expects the same from now on.

        Args:
            gradient: [tokens], of the losses.
        """
        if not self._trust:
            return False
        before, value = self.value, gradient[0].item() if len(gradient) else None
        if value is None or not bool((gradient == value).all()):
            self.value, self._trust = None, 0
            return False
        if before is not None:
            self._trust = min(_TRUST, self._trust + 1) if value == before else self._trust - 1
        self.value = value if self._trust else None
        return value == before


_TRUST = 3  # so many times more wrong than right, and gradients are made in backward


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    settings: LossSettings | None = None,
    expected: ExpectedGradient | None = None,
) -> torch.Tensor:
    """The loss of each token, without its logits ever being in memory together.

    Args:
        hidden: [tokens, hidden]; with sequence parallelism [tokens / ranks, hidden].
        weight: [vocabulary / ranks, hidden] of the output projection, of the same dtype.
        labels: [tokens], numbers in the whole vocabulary. One outside of it that is not
            `ignore_index` has the loss log(S) of the Note above, as in Megatron: mask it.
        bias: [vocabulary / ranks].
        settings: default: one rank, no smoothing, chunks of a size that suits the device.
        expected: what is known from the passes before of the same output layer, for gradients in
            forward; None: they are made in backward. So they are with several ranks, in `main_grad`
            and in fp16, where without the loss scale small ones would vanish.

    Returns:
        [tokens], fp32.

    Raises:
        ValueError: there are not as many labels as tokens.
    """
    settings = settings or LossSettings()
    num_tokens = hidden.shape[0] * (settings.num_ranks if settings.sequence_parallel else 1)
    if labels.shape != (num_tokens,):
        raise ValueError(f"{num_tokens} tokens have labels of shape {tuple(labels.shape)}")
    if settings.num_ranks > 1 or settings.into_main_grad or hidden.dtype is torch.float16:
        expected = None
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(
        hidden, weight, bias, labels, settings, expected
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Maps hidden states, weight, bias, labels and settings to the loss of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: LossSettings,
        expected: ExpectedGradient | None,
    ) -> torch.Tensor:
        logits = ChunkedLogits(_gathered(hidden, settings), weight, bias, settings)
        gradients, each = None, None
        if expected is not None and expected.value is not None and any(ctx.needs_input_grad):
            gradients = ChunkedGradients(logits, ctx.needs_input_grad[:3])
            each = hidden.new_tensor(expected.value, dtype=torch.float32).expand(len(labels))
        largest, exp_sum, loss = token_losses(logits, labels, gradients, each)
        ctx.save_for_backward(hidden, weight, bias, labels, largest, exp_sum)
        ctx.settings, ctx.expected = settings, expected
        # Not saved tensors: they are results, needed at once, and not to be moved anywhere.
        ctx.gradients = None if gradients is None else gradients.results()
        # Saved-tensor hooks hand back a plain tensor, without a Parameter's attributes.
        ctx.parameter = weight if settings.into_main_grad else None
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        made, ctx.gradients = ctx.gradients, None
        if ctx.expected is not None and ctx.expected.check(gradient) and made is not None:
            return (*made, None, None, None)
        del made
        hidden, weight, bias, labels, largest, exp_sum = ctx.saved_tensors  # brings them back
        settings: LossSettings = ctx.settings
        logits = ChunkedLogits(_gathered(hidden, settings), weight, bias, settings)
        gradients = ChunkedGradients(logits, ctx.needs_input_grad[:3], ctx.parameter)
        for rows, wide in logits.chunks(with_gradients=True):
            wide.sub_(largest[rows, None]).exp_()
            logits.into_gradients(wide, labels[rows], gradient[rows], exp_sum[rows])
            gradients.add(rows, wide)
            del wide  # part of what `results` frees
        return (*gradients.results(), None, None, None)


def _gathered(hidden: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """The hidden states of all tokens: [tokens, hidden]."""
    hidden = hidden.contiguous()
    if not settings.sequence_parallel or settings.num_ranks == 1:
        return hidden
    whole = hidden.new_empty((settings.num_ranks * hidden.shape[0], hidden.shape[1]))
    dist.all_gather_into_tensor(whole, hidden, group=settings.group)
    return whole


def token_losses(
    logits: ChunkedLogits,
    labels: torch.Tensor,
    gradients: ChunkedGradients | None = None,
    gradient: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token the largest logit, the sum of exp(logit - largest), and the loss.

    Args:
        logits: of all tokens.
        labels: [tokens].
        gradients: what the logits' gradients go to besides; for one rank.
        gradient: [tokens], of the losses, if there are `gradients`.
    """
    settings, num_tokens = logits.settings, logits.hidden.shape[0]
    # Rows: sum of exp(logit - largest), the label's logit.
    sums = torch.zeros((2, num_tokens), dtype=torch.float32, device=logits.hidden.device)
    own = torch.empty_like(sums[0])
    places, is_here = logits.places(labels)
    for rows, wide in logits.chunks(with_gradients=gradients is not None):
        torch.amax(wide, dim=1, out=own[rows])
        sums[1, rows] = wide.gather(1, places[rows, None]).squeeze(1)
        sums[0, rows] = wide.sub_(own[rows, None]).exp_().sum(dim=1)
        if gradients is not None and gradient is not None:
            logits.into_gradients(wide, labels[rows], gradient[rows], sums[0, rows])
            gradients.add(rows, wide)
    sums[1] *= is_here
    largest = own
    if settings.num_ranks > 1:
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=settings.group)
        sums[0] *= (own - largest).exp_()
        dist.all_reduce(sums, group=settings.group)
    of_label = sums[1] - largest
    of_label.masked_fill_((labels < 0) | (labels >= logits.vocab_size), 0.0)
    loss = sums[0].log() - of_label
    if settings.ignore_index is not None:
        loss = loss.masked_fill(labels == settings.ignore_index, 0.0)
    return largest, sums[0].clone(), loss
