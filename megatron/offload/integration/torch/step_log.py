# SPDX-License-Identifier: Apache-2.0
"""A line for each training step in a file: `StepLog`. `megatron-offload report` reads it.

It detects steps itself, so that a run without offload is measured in the same way. The handle
opens it; nothing depends on it. A step takes as long as the device needs for it: where that runs
behind, its line comes when the device has passed it, and nothing waits for that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.clock import Clock, Moment
from megatron.offload.device.cuda import is_captured
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.integration.torch.passes import computed_in, tensors_in
from megatron.offload.integration.torch.surroundings import can_hook
from megatron.offload.stats.memory import PeakMemory

logger = logging.getLogger(__name__)


class StepLog:
    """Writes what each step took. A step is a forward pass and what follows until the next one.

    Args:
        path: of the file; its folder is made.
        statistics: of the step, from the engine; empty without offload.
        in_turns: each step waits for a line on the standard input.
    """

    def __init__(
        self,
        path: Path,
        statistics: Callable[[], Mapping[str, int | float]],
        *,
        in_turns: bool = False,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._statistics = statistics
        self._in_turns = in_turns
        self._device: Device | None = None  # of the model, like what follows
        self._clock: Clock | None = None
        self._memory: PeakMemory | None = None
        self._depth = 0  # of calls of hooked modules within each other
        self._number = 0  # of the step under way, from 1
        self._began: Moment = None
        self._ended: Moment = None  # its passes
        self._tokens = 0
        self._loss: torch.Tensor | None = None
        self._peak_bytes: int | None = None

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hooked module is called: if it is a training's forward pass, a step begins."""
        self._depth += 1
        if self._depth > 1 or not _is_training():
            return
        if self._clock is not None:
            self._end_step(self._clock, self._clock.now())
        if self._in_turns:
            if self._clock is not None:
                self._clock.wait()  # for its line, which gives this step its turn
            if not sys.stdin.readline():
                sys.exit(0)
        if self._memory is None or self._clock is None:
            first = next(module.parameters(), torch.empty(0))
            self._device = open_device(first.device)
            self._clock, self._memory = Clock(self._device), PeakMemory(self._device)
        self._number += 1
        self._tokens = _tokens_of((args, kwargs))
        self._memory.begin_step()
        self._peak_bytes = None
        self._began = self._ended = self._clock.now()

    def end(self, module: torch.nn.Module, result: Any) -> None:
        """The call of a hooked module has ended."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._number or not _is_training():
            return
        self._loss = _loss_of(result)
        for one in computed_in(result):
            one.register_hook(self._begin_backward)

    def close(self) -> None:
        """Writes the last step, as long as its passes took."""
        if self._clock is not None:
            self._end_step(self._clock, self._ended)
            self._clock.wait()
        self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # it tries again to write what it could not
            self._file.close()

    def _begin_backward(self, _: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._memory is not None:
            self._peak_bytes = max(self._memory.end_step(), self._peak_bytes or 0)
        if self._clock is not None:
            self._ended = self._clock.now()

    def _end_step(self, clock: Clock, ended: Moment) -> None:
        """The step is over for the host; its line is written when it is over for the device."""
        if not self._number or self._file.closed or self._memory is None:
            return
        peak_bytes = self._memory.end_step() if self._peak_bytes is None else self._peak_bytes
        line: dict[str, Any] = {
            "step": self._number,
            "loss": None,
            "grad_norm": None,
            "step_time_s": 0.0,
            "tokens_per_s": float(self._tokens),
            "peak_activation_bytes": peak_bytes,
            "peak_activation_bytes_rank0": peak_bytes,
            "peak_device_bytes": self._memory.device_bytes(),
        }
        statistics = self._statistics()
        if statistics:
            line["offload"] = dict(statistics)
        loss, self._loss = self._loss, None
        clock.tell(self._began, ended, functools.partial(self._write, line, loss))
        clock.read()

    def _write(self, line: dict[str, Any], loss: torch.Tensor | None, seconds: float) -> None:
        if self._file.closed:
            return
        if loss is not None:
            assert self._device is not None
            line["loss"] = self._device.number(loss)
        line["step_time_s"] = seconds = max(seconds, 1e-9)
        line["tokens_per_s"] /= seconds
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:  # a disk that is full by now is no reason to end a training
            logger.warning(
                "activation offload: the metrics file %s cannot be written: %s; it ends here",
                self._file.name,
                error.strerror,
            )
            self._close_file()


def _is_training() -> bool:
    """Whether this is the forward pass of a step; while a graph is captured none runs."""
    return torch.is_grad_enabled() and can_hook() and not is_captured()


def _tokens_of(inputs: Any) -> int:
    """Tokens of a batch of text, or samples of any other."""
    tensors = [one for one in tensors_in(inputs) if one.dim()]
    for one in tensors:
        if one.dim() == 2 and not one.is_floating_point():
            return one.numel()
    return tensors[0].shape[0] if tensors else 0


def _loss_of(result: Any) -> torch.Tensor | None:
    """The loss that a model returns, if it is one of those that do."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", result[0] if isinstance(result, tuple | list) else None)
    is_number = isinstance(result, torch.Tensor) and result.numel() == 1
    return result.detach() if is_number else None
