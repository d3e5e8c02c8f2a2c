# SPDX-License-Identifier: Apache-2.0
"""The loss of transformers' causal language models, over chunks of tokens: `chunked_losses`.

The door calls it if `chunked_loss` is set. Each head takes the place of the `forward` of a model's
output embeddings, and of its `loss_function`, which transformers lets users set. Passes without
labels or without gradients stay as they are: an evaluation wants the logits. Where a trainer
computes the loss itself and does not use a head, the head logs that once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.output_head import OutputHead
from megatron.offload.integration.pending_logits import PendingLogits
from megatron.offload.machine.autocast import autocast_dtype, without_autocast
from megatron.offload.ops.chunked_logits import LossSettings
from megatron.offload.ops.chunked_mean import chunked_mean_loss

logger = logging.getLogger(__name__)

_SETTING = "chunked_loss"
_IGNORED = -100  # the label of tokens without a loss, in all of transformers


def chunked_losses(models: Sequence[torch.nn.Module], chunk_tokens: int | None) -> list[OutputHead]:
    """The heads of the models' causal language models, to be connected.

    Args:
        models: transformers' own, or wrapped.
        chunk_tokens: most tokens of a chunk; None: as many as suit the device.

    Raises:
        ConfigurationError: there is none, or its output layer computes something else.
    """
    heads: list[OutputHead] = [
        _Head(model, layer, chunk_tokens) for model, layer in _with_loss(models)
    ]
    if not heads:
        raise ConfigurationError(
            f"{_SETTING} is for causal language models of transformers, and "
            f"{' and '.join(type(model).__name__ for model in models)} has none; drop {_SETTING}"
        )
    return heads


class _Head(OutputHead):
    """Output layer and loss of one model."""

    def __init__(self, model: Any, layer: Any, chunk_tokens: int | None) -> None:
        super().__init__(model, layer, ("labels",), _SETTING)
        self._chunk_tokens = chunk_tokens
        self._has_told = False
        if type(layer) is not torch.nn.Linear:
            self.refuse(
                f"the output layer of {type(model).__name__} is {type(layer).__name__}, not "
                "torch.nn.Linear"
            )

    def connect(self) -> None:
        model: Any = self._model
        self._loss = model.loss_function
        model.loss_function = Hook(self.loss, self._loss)
        super().connect()

    def close(self) -> None:
        super().close()
        self._model.loss_function = self._loss

    def follows(self, given: dict[str, Any]) -> bool:
        return super().follows(given) and torch.is_grad_enabled()

    def loss(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """In place of `loss_function`: the mean of the next tokens' losses.

        Args:
            logits: pending, or of a pass that is not ours.
            labels: [batch, sequence], usually the model's input.
            vocab_size: of the model.
            num_items_in_batch: what the sum is divided by; None: the tokens that have a label.
            ignore_index: the label of tokens that do not count.
            shift_labels: [batch, sequence], where the caller has shifted them already.
            more: of transformers' function.
        """
        if not isinstance(logits, PendingLogits):
            whole: torch.Tensor = self._loss(
                logits,
                labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **more,
            )
            return whole
        hidden, weight, bias = self._operands(logits, vocab_size)
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        wanted = shift_labels.reshape(-1).to(hidden.device)
        counts = wanted != ignore_index
        torch._assert_async(  # as transformers' loss does, and without waiting for a GPU
            (~counts | ((wanted >= 0) & (wanted < vocab_size))).all(), "a label is no token"
        )
        divisor = counts.sum() if num_items_in_batch is None else num_items_in_batch
        with without_autocast(hidden.device.type):
            return chunked_mean_loss(
                hidden,
                weight,
                wanted,
                torch.as_tensor(divisor, device=hidden.device),
                bias=bias,
                settings=LossSettings(
                    self._chunk_tokens,
                    ignore_index=ignore_index,
                    logit_scale=logits.logit_scale,
                    soft_cap=logits.soft_cap,
                ),
            )

    def _operands(
        self, logits: PendingLogits, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states [tokens, hidden], weight and bias, in the dtype of the product."""
        hidden, weight, bias = logits.hidden, logits.weight, logits.bias
        if hasattr(weight, "full_tensor") or not weight.untyped_storage().nbytes():
            self.refuse(
                "the output layer's weight is divided over ranks, and gathered only while it runs"
            )
        if weight.shape[0] != vocab_size:
            self.refuse(f"the loss is of {vocab_size} words, the output layer of {weight.shape[0]}")
        hidden = hidden.reshape(-1, hidden.shape[-1])
        dtype = autocast_dtype(hidden.device.type)
        if dtype is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return hidden, weight, bias

    def _end(self, model: Any, args: Any, output: Any) -> None:
        is_ours = model is self._model  # else a copy of its attributes
        if is_ours and output is not None and not self._has_told:  # None: the pass raised
            self._tell_if_idle()
        super()._end()

    def _tell_if_idle(self) -> None:
        """Logs once that a training pass did not use this head, and what computed its loss
        instead."""
        model: Any = self._model
        if self._pass.loss_follows and model.get_output_embeddings() is not self._layer:
            reason = (
                "it has another output layer since (resize_token_embeddings, an adapter that saves "
                "the layer as a whole)"
            )
            advice = "begin to offload after that"
        elif self._pass.loss_follows:  # and the output layer was not called
            reason = (
                "TRL's trainer computes the loss with a fused head of its own, in chunks too"
                if self._pass.given.get("fused_lm_head")
                else "its forward computes the loss without calling its output layer, as a kernel "
                "does (use_liger_kernel)"
            )
            advice = f"drop {_SETTING}, or leave the loss to the model"
        elif (
            self._model.training
            and torch.is_grad_enabled()
            and self._pass.given.get(self._labels) is None
        ):
            reason = (
                "a training pass came without labels, so all its logits are in memory, and the "
                "trainer computes the loss of them (label_smoothing_factor, compute_loss_func, a "
                "trainer with a loss of its own)"
            )
            advice = f"give the labels to the model and take its loss, or drop {_SETTING}"
        else:
            return
        self._has_told = True
        logger.warning(
            "activation offload: %s does nothing for %s: %s; %s",
            _SETTING,
            type(self._model).__name__,
            reason,
            advice,
        )


def _with_loss(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Models whose loss is that of causal language models, each with its output layer."""
    for module in dict.fromkeys(one for model in models for one in model.modules()):
        if not any(one.__name__ == "PreTrainedModel" for one in type(module).__mro__):
            continue
        model: Any = module
        layer = model.get_output_embeddings()
        loss = getattr(model, "loss_function", None)
        is_ours = isinstance(loss, Hook)  # to be refused
        if layer is not None and (is_ours or getattr(loss, "__name__", "") == "ForCausalLMLoss"):
            yield model, layer
