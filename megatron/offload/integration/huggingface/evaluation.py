# SPDX-License-Identifier: Apache-2.0
"""transformers' evaluation loop with several batches at a time: `EvaluationInUnits`.

The Trainer asks for a batch and predicts, one after the other. Here the first prediction of a group
fetches the batches of the others too, `LayerMajor.evaluate` runs all of them unit by unit, and the
loop gets each result when it comes to its batch. The loop, its metrics and what a subclass predicts
stay the Trainer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.torch.layer_major import LayerMajor
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.layer_major.config import refusal

_LAST = "end_of_dataloader"  # of accelerate's loaders: says that a batch is the last one
_NONE = object()


class EvaluationInUnits:
    """Has `trainer.evaluate` and `trainer.predict` run each unit of layers for several batches.

    Args:
        trainer: transformers', or of a subclass.
        batches: so many at a time.
        units: see `LayerMajor`.
        offload: gives the handle of the model's activations, if there is one.

    Raises:
        ConfigurationError: there are no batches to run together.
    """

    def __init__(
        self,
        trainer: Any,
        batches: int,
        units: int | None,
        offload: Callable[[], ActivationOffload | None],
    ) -> None:
        if batches < 1:
            raise refusal(f"evaluation: {batches} batches at a time; give at least 1")
        self._trainer = trainer
        self._num_batches = batches
        self._units = units
        self._offload = offload
        self._ahead: _Ahead | None = None  # of the evaluation under way
        self._layer_major: LayerMajor | None = None
        self._results: deque[Any] = deque()
        self._loop, self._predict = trainer.evaluation_loop, trainer.prediction_step
        self._undo = [
            put(trainer, "evaluation_loop", self._evaluation_loop),
            put(trainer, "prediction_step", self._prediction_step),
        ]

    def close(self) -> None:
        """The trainer evaluates batch by batch again."""
        while self._undo:
            self._undo.pop()()

    def _evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._ahead = _Ahead(dataloader)
        try:
            return self._loop(self._ahead, *args, **kwargs)
        finally:
            self._ahead = None
            self._results.clear()
            if self._layer_major is not None:
                self._layer_major.close()
            self._layer_major = None

    def _prediction_step(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._ahead is None:  # called by itself
            return self._predict(model, inputs, *args, **kwargs)
        if not self._results:
            if self._layer_major is None:
                offload = self._offload()
                self._layer_major = LayerMajor(self._trainer.model, self._units, offload=offload)
            group = [inputs, *self._ahead.fetch(self._num_batches - 1)]
            self._results.extend(
                self._layer_major.evaluate(
                    group, lambda _, one: self._predict(model, one, *args, **kwargs)
                )
            )
        return self._results.popleft()


class _Ahead:
    """A loader some of whose batches are fetched before the loop asks for them."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._batches: Iterator[Any] = iter(())
        self._is_last = False  # the batch that the loop is at
        self._has_ended = False  # the last batch is fetched
        self._fetched: deque[tuple[Any, bool]] = deque()  # with whether each is the last one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._batches, self._has_ended = iter(self._dataloader), False
        while self.fetch(1):
            batch, self._is_last = self._fetched.popleft()
            self._say_where_the_loop_is()
            yield batch
        next(self._batches, None)  # with this request accelerate's loaders end

    def fetch(self, number: int) -> list[Any]:
        """So many batches that the loop has not asked for yet, or those that are left."""
        while len(self._fetched) < number and not self._has_ended:
            batch = next(self._batches, _NONE)
            self._has_ended = batch is _NONE or bool(getattr(self._dataloader, _LAST, False))
            if batch is not _NONE:
                self._fetched.append((batch, self._has_ended))
        self._say_where_the_loop_is()
        return [batch for batch, _ in self._fetched]

    def _say_where_the_loop_is(self) -> None:
        """By this accelerate drops from the last batch what fills it up, and from no other."""
        if hasattr(self._dataloader, _LAST):
            setattr(self._dataloader, _LAST, self._is_last)
