# SPDX-License-Identifier: Apache-2.0
"""Megatron's output layer and loss, computed over chunks of tokens: `ChunkedLoss`.

`install` makes one if --activation-chunked-loss asks for it. On each model with an output layer it
takes the place of that layer's `forward` and of the model's `compute_language_model_loss`. Both
stay as they are where no loss follows: without labels, and in inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.offload.integration.hook import Hook
from megatron.offload.integration.output_head import OutputHead
from megatron.offload.integration.pending_logits import PendingLogits
from megatron.offload.ops.chunked_logits import LossSettings
from megatron.offload.ops.chunked_loss import ExpectedGradient, chunked_cross_entropy

_FLAG = "--activation-chunked-loss"

_LABELS = ("labels", "lm_labels")  # as the models' forward calls them: GPT; BERT and T5


class ChunkedLoss:
    """The losses of a rank's model chunks.

    Args:
        model_chunks: wrapped for data parallelism or not. Those without an output layer, on earlier
            pipeline stages, are left alone.
        chunk_tokens: most tokens of a chunk; None: as many as suit the device.

    Raises:
        ConfigurationError: an output layer computes something else; nothing was touched then.
    """

    def __init__(
        self, model_chunks: Sequence[torch.nn.Module], chunk_tokens: int | None = None
    ) -> None:
        self._heads = [
            _Head(model, chunk_tokens) for chunk in model_chunks for model in _with_loss(chunk)
        ]

    def connect(self) -> None:
        """Takes the place of the models' methods."""
        for head in self._heads:
            head.connect()

    def close(self) -> None:
        """Puts the models' own methods back."""
        for head in self._heads:
            head.close()


class _Head(OutputHead):
    """Output layer and loss of one model."""

    def __init__(self, model: Any, chunk_tokens: int | None) -> None:
        super().__init__(model, model.output_layer, _LABELS, _FLAG)
        self._chunk_tokens = chunk_tokens
        self._expected = ExpectedGradient()
        self._check(model.output_layer)

    def connect(self) -> None:
        model: Any = self._model
        self._loss = model.compute_language_model_loss
        model.compute_language_model_loss = Hook(self.loss, self._loss)
        super().connect()

    def close(self) -> None:
        super().close()
        del self._model.compute_language_model_loss

    def follows(self, given: dict[str, Any]) -> bool:
        return super().follows(given) and not any(
            given.get(name) for name in ("output_processor", "runtime_gather_output")
        )

    def pending(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[PendingLogits, None]:
        """As the layer's forward, whose second answer is a bias that the models drop."""
        return super().pending(hidden, weight), None

    def loss(self, labels: torch.Tensor, logits: Any) -> torch.Tensor:
        """In place of `compute_language_model_loss`: [batch, sequence] in fp32."""
        if not isinstance(logits, PendingLogits):
            whole: torch.Tensor = self._loss(labels, logits)
            return whole
        layer: Any = self._layer
        batch_size, length = labels.shape
        losses = chunked_cross_entropy(
            logits.hidden.reshape(-1, logits.hidden.shape[-1]),  # sequence before batch
            logits.weight,
            labels.transpose(0, 1).reshape(-1),
            bias=None if layer.skip_bias_add else logits.bias,
            settings=LossSettings(
                self._chunk_tokens,
                group=layer.tp_group,
                sequence_parallel=layer.sequence_parallel,
                into_main_grad=layer.gradient_accumulation_fusion,
                logit_scale=logits.logit_scale,
                soft_cap=logits.soft_cap,
            ),
            expected=self._expected,
        )
        return losses.view(length, batch_size).transpose(0, 1).contiguous()

    def _check(self, layer: Any) -> None:
        """Refuses where the loss would not be that of what the layer computes."""
        from megatron.core.tensor_parallel import ColumnParallelLinear

        where = f"the output layer of {type(self._model).__name__}"
        if type(layer) is not ColumnParallelLinear:
            self.refuse(f"{where} is {type(layer).__name__}, not Megatron's ColumnParallelLinear")
        if layer.gather_output or layer.explicit_expert_comm or layer.disable_grad_reduce:
            self.refuse(f"{where} gathers its output, or reduces no gradients")
        if getattr(layer, "gtp_remat_size", 1) > 1:
            self.refuse(f"the weight of {where} is divided once more")


def _with_loss(chunk: torch.nn.Module) -> Iterator[Any]:
    """The models in a chunk that end in an output layer and a loss."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for module in chunk.modules():
        if isinstance(module, LanguageModule) and getattr(module, "post_process", False):
            yield module
