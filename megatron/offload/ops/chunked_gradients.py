# SPDX-License-Identifier: Apache-2.0
"""What the gradients of a chunked loss's logits go into, chunk by chunk: `ChunkedGradients`.

Note [Sums of chunks]
The weight's gradient is a sum over all tokens. Each chunk's part is added in fp32, to a buffer or
to `main_grad`: in bf16 a long sum stops growing once a part is below 2^-8 of it. On the CPU the
logits' gradients are not rounded to bf16 for it either. The order of the sum differs from that of
one large product, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.offload.ops.chunked_logits import ChunkedLogits

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class ChunkedGradients:
    """Gradients of hidden states, weight and bias.

    Args:
        logits: whose gradients come.
        needed: of hidden states, weight and bias, whether the gradient is.
        parameter: the weight, with a `main_grad` to add to; None: its gradient is returned.
    """

    def __init__(
        self, logits: ChunkedLogits, needed: Sequence[bool], parameter: torch.Tensor | None = None
    ) -> None:
        hidden, weight, bias = needed
        self._logits = logits
        self._hidden = _HiddenGradient(logits) if hidden else None
        self._weight = _WeightGradient(logits.weight, parameter) if weight else None
        self._bias = None
        if bias and logits.bias is not None:
            self._bias = torch.zeros_like(logits.bias, dtype=torch.float32)

    def add(self, rows: slice, wide: torch.Tensor) -> None:
        """Takes a chunk: which tokens, and the gradients of their logits in fp32."""
        narrow = self._logits.narrow(wide)
        if self._hidden is not None:
            self._hidden.set(rows, narrow)
        if self._weight is not None:
            self._weight.add(wide, narrow, self._logits.hidden[rows])
        if self._bias is not None:
            self._bias += wide.sum(dim=0)

    def results(self) -> Gradients:
        """What autograd gets, once. Frees the chunks' memory first: rounding takes as much."""
        self._logits.release()
        return (
            None if self._hidden is None else self._hidden.result(),
            None if self._weight is None else self._weight.result(),
            None if self._bias is None else self._bias.to(self._logits.weight.dtype),
        )


class _WeightGradient:
    """The weight's gradient, summed over chunks in fp32: Note [Sums of chunks].

    Args:
        weight: [vocabulary / ranks, hidden].
        parameter: the same, with a `main_grad` to add to; None: the gradient is returned.

    Attributes:
        total: the sum so far, fp32; `main_grad` itself where that is fp32.
    """

    def __init__(self, weight: torch.Tensor, parameter: torch.Tensor | None) -> None:
        self._weight, self._parameter = weight, parameter
        self._main_grad = getattr(parameter, "main_grad", None)
        if self._main_grad is not None and self._main_grad.dtype is torch.float32:
            self.total = self._main_grad
        else:
            self.total = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, wide: torch.Tensor, narrow: torch.Tensor, hidden: torch.Tensor) -> None:
        """Takes a chunk: its logits' gradients in fp32 and in the weight's dtype, its hidden."""
        if narrow.is_cuda and narrow.dtype is not torch.float32:
            _add_product(self.total, narrow.t(), hidden)
        else:
            self.total.addmm_(wide.t(), hidden.float())

    def result(self) -> torch.Tensor | None:
        """What autograd gets: the gradient, or where it is in `main_grad` already a stand-in."""
        parameter: Any = self._parameter
        if self._main_grad is None:
            return self.total.to(self._weight.dtype)
        if self.total is not self._main_grad:
            self._main_grad.add_(self.total)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        # The hooks that reduce gradients run only if there is one. Tied to the embedding, autograd
        # adds it to the embedding's.
        if getattr(parameter, "zero_out_wgrad", False):
            return torch.zeros_like(self._weight)
        return torch.empty_like(self._weight)


class _HiddenGradient:
    """The hidden states' gradient: of all tokens, then this rank's part.

    Attributes:
        whole: [tokens, hidden].
    """

    def __init__(self, logits: ChunkedLogits) -> None:
        self._weight, self._settings = logits.weight, logits.settings
        self.whole = torch.empty_like(logits.hidden)
        self._sums: list[Any] = []

    def set(self, rows: slice, logits: torch.Tensor) -> None:
        """Takes the gradient of a chunk's logits. The ranks' sum runs beside the next products."""
        part = self.whole[rows]
        torch.mm(logits, self._weight, out=part)
        if self._settings.num_ranks > 1 and not self._settings.sequence_parallel:
            work = dist.all_reduce(part, group=self._settings.group, async_op=True)
            self._sums.append(work)

    def result(self) -> torch.Tensor:
        """The sum over the ranks; with sequence parallelism this rank's tokens of it."""
        while self._sums:
            self._sums.pop().wait()
        settings = self._settings
        if settings.num_ranks == 1 or not settings.sequence_parallel:
            return self.whole
        own = self.whole.new_empty((len(self.whole) // settings.num_ranks, self.whole.shape[1]))
        dist.reduce_scatter_tensor(own, self.whole, group=settings.group)
        return own


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds a product of bf16 or fp16 matrices, computed in fp32, to `total` (CUDA).

    By blocks of rows, since torch does not add into `total` itself: a product of a whole vocabulary
    in fp32 would be as large as the sum.
    """
    num_rows = max(1, _PRODUCT_BYTES // (4 * total.shape[1]))
    blocks = (one.split(num_rows) for one in (total, left))
    for part, factor in zip(*blocks, strict=True):
        part += torch.mm(factor, right, out_dtype=torch.float32)


_PRODUCT_BYTES = 256 << 20  # of a block, in fp32; large enough for a GPU to compute at its rate
