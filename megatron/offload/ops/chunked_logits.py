# SPDX-License-Identifier: Apache-2.0
"""Logits a chunk of tokens at a time: `ChunkedLogits`.

`chunked_loss.py` and `chunked_mean.py` make their losses of them. Of the logits no more than a
chunk exists at any time, in memory that all chunks share.

Note [Scale and soft cap]
With products z = x W^T + b in the model's dtype, scale s and soft cap c the logits are, in fp32,

    l = s z,    or  l = c tanh(s z / c),    and  dl/dz = s,    or  s (1 - tanh(s z / c)^2)

With a cap the slope dl/dz is kept for a chunk beside its logits where gradients follow: by then
all that is left of the logits is their exponentials, which do not tell it where they vanish.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# By device: fewest tokens of a chunk, and fewest bytes of its logits in fp32. With fewer tokens the
# products run below the device's rate, as every chunk reads and writes all of dW. Figures:
# docs/chunked-loss.md.
_SMALLEST_CHUNK = {"cpu": (256, 8 << 20)}
_SMALLEST_ACCELERATOR_CHUNK = (1024, 256 << 20)


@dataclass(frozen=True)
class LossSettings:
    """How a chunked loss is computed.

    Attributes:
        chunk_tokens: most tokens of a chunk; None: `chunk_tokens_for` says.
        group: ranks that share the vocabulary, in its order; None: one rank has all of it.
        sequence_parallel: hidden states are divided over the group along the tokens.
        ignore_index: a label whose tokens have loss and gradients zero; None: there is none.
        into_main_grad: add the weight's gradient to its `main_grad`, and say so in its
            `grad_added_to_main_grad`, as Megatron's fused accumulation does.
        logit_scale: what the products are multiplied with: Note [Scale and soft cap].
        soft_cap: what no logit exceeds; None: they are not capped.
    """

    chunk_tokens: int | None = None
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    ignore_index: int | None = None
    into_main_grad: bool = False
    logit_scale: float = 1.0
    soft_cap: float | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)


def chunk_tokens_for(num_tokens: int, hidden_size: int, vocab_size: int, device: str) -> int:
    """How many tokens a chunk has if the settings do not say.

    Its logits in fp32 take about as much memory as the hidden states in fp32, as in Liger's fused
    linear cross entropy, but no less than the device needs to compute at its rate.

    Args:
        num_tokens: of a pass.
        hidden_size: of the model.
        vocab_size: of this rank.
        device: type of it, `cpu` or an accelerator's.
    """
    tokens, num_bytes = _SMALLEST_CHUNK.get(device, _SMALLEST_ACCELERATOR_CHUNK)
    return max(tokens, max(num_bytes, 4 * num_tokens * hidden_size) // (4 * vocab_size))


class ChunkedLogits:
    """Logits of a chunk at a time, in memory that all chunks share.

    Attributes:
        hidden: [tokens, hidden] of all tokens.
        weight: [vocabulary / ranks, hidden].
        bias: [vocabulary / ranks], or None.
        settings: how the loss is computed.
        first: number of this rank's first word in the vocabulary.
        vocab_size: of the whole vocabulary.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: LossSettings,
    ) -> None:
        self.hidden, self.weight, self.bias, self.settings = hidden, weight, bias, settings
        num_tokens, (size, hidden_size) = hidden.shape[0], weight.shape
        self.first, self.vocab_size = settings.rank * size, settings.num_ranks * size
        most = settings.chunk_tokens or chunk_tokens_for(
            num_tokens, hidden_size, size, weight.device.type
        )
        # Chunks of about the same size: a short last one would cost as much as a long one.
        num_chunks = max(1, -(-num_tokens // most))
        self._rows = max(1, -(-num_tokens // num_chunks))
        self._narrow = weight.new_empty((self._rows, size))
        self._wide = self._narrow
        if weight.dtype is not torch.float32:
            self._wide = torch.empty_like(self._narrow, dtype=torch.float32)
        self._slopes: torch.Tensor | None = None

    def chunks(self, *, with_gradients: bool) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows of each chunk and its logits in fp32, which the next chunk overwrites.

        Args:
            with_gradients: whether `into_gradients` follows for each.
        """
        if with_gradients and self.settings.soft_cap is not None:
            self._slopes = torch.empty_like(self._wide)
        for start in range(0, self.hidden.shape[0], self._rows):
            hidden = self.hidden[start : start + self._rows]
            narrow, wide = self._narrow[: len(hidden)], self._wide[: len(hidden)]
            if self.bias is None:
                torch.mm(hidden, self.weight.t(), out=narrow)
            else:  # rounded once, together
                torch.addmm(self.bias, hidden, self.weight.t(), out=narrow)
            if wide is not narrow:
                wide.copy_(narrow)
            self._scale_and_cap(wide)
            yield slice(start, start + len(hidden)), wide

    def into_gradients(
        self,
        exponentials: torch.Tensor,
        labels: torch.Tensor,
        gradient: torch.Tensor,
        exp_sum: torch.Tensor,
    ) -> torch.Tensor:
        """Turns a chunk's exp(logit - largest) into the products' gradients, in place.

        Args:
            exponentials: [tokens, vocabulary / ranks], fp32.
            labels: [tokens].
            gradient: [tokens], of the losses.
            exp_sum: [tokens], the exponentials' sum over the whole vocabulary.
        """
        gradient = gradient.float()
        if self.settings.ignore_index is not None:
            gradient = gradient.masked_fill(labels == self.settings.ignore_index, 0.0)
        exponentials.mul_((gradient / exp_sum)[:, None])
        places, is_here = self.places(labels)
        of_label, at = gradient * is_here, places[:, None]
        exponentials.scatter_(1, at, exponentials.gather(1, at) - of_label[:, None])
        if self._slopes is not None:
            exponentials.mul_(self._slopes[: len(exponentials)])
        elif self.settings.logit_scale != 1.0:
            exponentials.mul_(self.settings.logit_scale)
        return exponentials

    def _scale_and_cap(self, wide: torch.Tensor) -> None:
        """Turns a chunk's products into logits, in place, and keeps the slopes."""
        scale, cap = self.settings.logit_scale, self.settings.soft_cap
        if cap is None:
            if scale != 1.0:
                wide.mul_(scale)
            return
        wide.mul_(scale / cap).tanh_()
        if self._slopes is not None:
            slopes = self._slopes[: len(wide)]
            torch.mul(wide, wide, out=slopes).mul_(-scale).add_(scale)
        wide.mul_(cap)

    def narrow(self, wide: torch.Tensor) -> torch.Tensor:
        """A chunk in the weight's dtype; in the memory of the logits that it was made of."""
        if wide.dtype is self._narrow.dtype:
            return wide
        return self._narrow[: len(wide)].copy_(wide)

    def release(self) -> None:
        """Frees the memory that chunks share; there are no more."""
        del self._narrow, self._wide, self._slopes

    def places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels as columns of this rank's logits, 0 where they are not, and whether they are."""
        columns = labels - self.first
        is_here = (columns >= 0) & (columns < self.weight.shape[0])
        return columns.where(is_here, 0), is_here
