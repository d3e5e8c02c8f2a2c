# SPDX-License-Identifier: Apache-2.0
"""A model's output layer and its loss, when the loss is computed over chunks: `OutputHead`.

`megatron/` and `torch/` each have one that knows their models. While a loss follows, the
output layer's `forward` hands on what the logits would be made of (`PendingLogits`), and the loss
takes it. Only objects are touched, no classes. How the loss is computed: `ops/chunked_loss.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.own_attributes import put


class PendingLogits:
    """What logits would be made of, on its way from the output layer to the loss.

    Attributes:
        hidden: [..., hidden], the output layer's input.
        weight: [vocabulary, hidden], or a rank's part of it.
        switch: what asked for this, as people write it.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, switch: str) -> None:
        self.hidden, self.weight, self.switch = hidden, weight, switch

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigurationError(
            f"the logits of this model are used ({name}) and not only for its loss; with "
            f"{self.switch} they are never in memory together. Drop it"
        )


class InPlaceOf:
    """A function in place of another one, which copies and pickles of the model have again.

    Args:
        function: what is called.
        original: what a copy calls.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._function, self._original = function, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:  # of pickle and of deepcopy
        return _as_it_is, (self._original,)


def _as_it_is(one: Any) -> Any:
    return one


def _do_nothing(*_: Any) -> None:
    """What a hook becomes in a copy of its model."""


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
        self._signature = inspect.signature(model.forward)
        found = [name for name in labels if name in self._signature.parameters]
        if not found:
            self.refuse(f"{type(model).__name__}.forward has no parameter {' or '.join(labels)}")
        own: Any = vars(layer).get("forward")
        # A copy of a layer whose forward was replaced has the class's method.
        if own is not None and getattr(own, "__func__", None) is not type(layer).forward:
            self.refuse(
                f"somebody has replaced the forward of the output layer of {type(model).__name__} "
                "already"
            )
        self._labels = found[0]
        self._loss_follows = False

    def connect(self) -> None:
        """Takes the place."""
        self._forward: Any = self._layer.forward
        self._put_back = put(self._layer, "forward", InPlaceOf(self.project, self._forward))
        begin, end = InPlaceOf(self._begin, _do_nothing), InPlaceOf(self._end, _do_nothing)
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
        if not self._loss_follows:
            return self._forward(hidden, *args, **kwargs)
        self._loss_follows = False
        return self.pending(hidden, *args, **kwargs)

    def pending(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> Any:
        """What the output layer answers while a loss follows."""
        own: Any = self._layer.weight
        return PendingLogits(hidden, own if weight is None else weight, self.switch)

    def refuse(self, reason: str) -> NoReturn:
        """Raises ConfigurationError for a model that this does not fit."""
        raise ConfigurationError(f"{self.switch} does not fit: {reason}. Drop {self.switch}")

    def _begin(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loss_follows = self.follows(self._signature.bind_partial(*args, **kwargs).arguments)

    def _end(self, *_: Any) -> None:
        self._loss_follows = False  # the pass may have raised before its output layer
