# SPDX-License-Identifier: Apache-2.0
"""A model's output layer and its loss, when the loss is computed over chunks: `OutputHead`.

`megatron/` and `torch/` each have one that knows their models. While a loss follows, the
output layer's `forward` hands on what the logits would be made of (`pending_logits.py`), and the
loss takes it. Only objects are touched, no classes. How it is computed: `ops/chunked_loss.py`.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, NoReturn

import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.pending_logits import PendingLogits
from megatron.offload.integration.replaced_forwards import InPlaceOf


class _PassUnderWay(threading.local):
    """A model's forward pass in the calling thread.

    Of each thread: between the layers of a layer-major step other micro-batches' passes begin and
    end, each in its own.

    Attributes:
        loss_follows: the output layer has not run yet, and a loss of its logits follows.
        given: the arguments.
    """

    def __init__(self) -> None:
        self.loss_follows = False
        self.given: dict[str, Any] = {}


class OutputHead:
    """Takes the place of an output layer's forward; a subclass does so of the loss.

    Args:
        model: the module whose forward gets the labels.
        layer: its output layer.
        labels: what the parameter may be called that has the labels.
        switch: what asks for this, as people write it.

    Raises:
        ConfigurationError: the model's forward has no labels, or the layer's is replaced already.
    """

    def __init__(
        self, model: torch.nn.Module, layer: torch.nn.Module, labels: tuple[str, ...], switch: str
    ) -> None:
        self.switch = switch
        self._model, self._layer = model, layer
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        found = [name for name in labels if name in self._parameters]
        if not found:
            self.refuse(f"{type(model).__name__}.forward has no parameter {' or '.join(labels)}")
        own: Any = vars(layer).get("forward")
        # A copy of a layer whose forward was replaced has the class's method.
        if own is not None and getattr(own, "__func__", None) is not type(layer).forward:
            self.refuse(
                f"the output layer of {type(model).__name__} has a forward already that is not its "
                "class's, as another chunked loss sets it, accelerate's device_map, or TRL's "
                "cast_lm_head_to_fp32"
            )
        self._labels = found[0]
        self._pass = _PassUnderWay()

    def connect(self) -> None:
        """Takes the place."""
        self._forward: Any = self._layer.forward
        self._put_back = put(self._layer, "forward", InPlaceOf(self._layer, self.project))
        begin, end = Hook(self._begin), Hook(self._end)
        self._hooks = [
            self._model.register_forward_pre_hook(begin, with_kwargs=True),
            self._model.register_forward_hook(end, always_call=True),
        ]

    def close(self) -> None:
        """Gives it back: the class's method is found again."""
        while self._hooks:
            self._hooks.pop().remove()
        self._put_back()

    def follows(self, given: dict[str, Any]) -> bool:
        """Whether a forward pass with these arguments ends in a loss, and nothing but that."""
        return given.get(self._labels) is not None

    def project(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the output layer's forward."""
        if not self._pass.loss_follows:
            return self._forward(hidden, *args, **kwargs)
        self._pass.loss_follows = False
        return self.pending(hidden, *args, **kwargs)

    def pending(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> Any:
        """What the output layer answers while a loss follows."""
        layer: Any = self._layer
        own: torch.Tensor = layer.weight if weight is None else weight
        return PendingLogits(hidden, own, self.switch, layer.bias)

    def refuse(self, reason: str) -> NoReturn:
        """Raises ConfigurationError for a model that this does not fit."""
        raise ConfigurationError(f"{self.switch} does not fit: {reason}. Drop {self.switch}")

    def _begin(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is not self._model:  # a copy of its attributes, whose output layer is its own
            return
        # Not bound to the signature: a trainer's own forward takes more than the model's.
        self._pass.given = dict(zip(self._parameters, args, strict=False)) | kwargs
        self._pass.loss_follows = self.follows(self._pass.given)

    def _end(self, *_: Any) -> None:
        self._pass.loss_follows = False  # the pass may have raised before its output layer
        self._pass.given = {}
