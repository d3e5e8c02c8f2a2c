# SPDX-License-Identifier: Apache-2.0
"""A line for each training step in a file: `StepLog`. `megatron-offload report` reads it.

`ForwardSteps` tells it where a loop's steps begin and end, `TrainerOffload` where a trainer's do. A
step takes as long as the device needs for it: where that runs behind, its line comes when the
device has passed it, and nothing waits for that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.clock import Clock, Moment
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.integration.torch.passes import tensors_in
from megatron.offload.stats.metrics_file import MetricsFile, StepRecord
from megatron.offload.stats.statistics import add_up

logger = logging.getLogger(__name__)


class StepLog:
    """Writes what each step took. A step has one micro-batch or more.

    Args:
        path: of the file; its folder is made.
        in_turns: each step waits for a line on the standard input.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, *, in_turns: bool = False) -> None:
        self._path = path
        self._file: MetricsFile | None = MetricsFile(path, first_step=0)
        self._in_turns = in_turns
        self._device: Device | None = None
        self._clock: Clock | None = None
        self._began: Moment = None
        self._is_under_way = False
        self._num_tokens = 0  # of the step under way, as what follows
        self._statistics: list[Mapping[str, int | float]] = []
        self._peaks: dict[str, int] = {}
        self._losses: list[torch.Tensor] = []
        self._last: _Line | None = None  # of the step before, until a trainer has logged its loss

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._is_under_way

    def begin(self, of_compute: torch.device) -> Device:
        """A step begins.

        Args:
            of_compute: the device that the model is on.

        Returns:
            That device.
        """
        if self._device is None or self._clock is None:
            self._device = open_device(of_compute)
            self._clock = Clock(self._device)
        self._write_last()
        if self._in_turns:
            self._clock.wait()  # for the line of the step before, which gives this one its turn
            if not sys.stdin.readline():
                sys.exit(0)
        self._num_tokens, self._statistics, self._peaks, self._losses = 0, [], {}, []
        self._is_under_way = True
        self._began = self._clock.now()
        return self._device

    def now(self) -> Moment:
        """This moment of the device; None before the first step."""
        return None if self._clock is None else self._clock.now()

    def add_tokens(self, inputs: Any) -> None:
        """Counts the tokens of a batch of text, or the samples of any other."""
        self._num_tokens += _tokens_of(inputs)

    def add_loss(self, loss: Any) -> None:
        """Adds a micro-batch's part of the loss of the step; what is no number is left out."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def add(self, statistics: Mapping[str, int | float]) -> None:
        """Adds the counters of a micro-batch; empty: nothing is offloaded."""
        if statistics:
            self._statistics.append(dict(statistics))

    def add_peaks(self, peaks: Mapping[str, int]) -> None:
        """Adds the peaks of a micro-batch, or of all: the largest of a step count.

        Args:
            peaks: `peak_activation_bytes` and `peak_device_bytes`.
        """
        for name, num_bytes in peaks.items():
            self._peaks[name] = max(self._peaks.get(name, 0), num_bytes)

    def end(self, number: int, ended: Moment = None) -> None:
        """A step is over for the host; its line is written when it is over for the device.

        Args:
            number: of the step.
            ended: when it ended for the device; None: now.
        """
        if not self._is_under_way or self._clock is None:
            return
        self._is_under_way = False
        activation_bytes = self._peaks.get("peak_activation_bytes", 0)
        record = StepRecord(
            step=number,
            loss=None,
            grad_norm=None,
            step_time_s=0.0,
            tokens_per_s=float(self._num_tokens),
            peak_activation_bytes=activation_bytes,
            peak_activation_bytes_rank0=activation_bytes,
            peak_device_bytes=self._peaks.get("peak_device_bytes", 0),
            learning_rate=None,
            offload=add_up(self._statistics),
        )
        ended = self._clock.now() if ended is None else ended
        self._last = _Line(record, self._began, ended, self._losses)

    def note(self, number: int, logged: Mapping[str, Any]) -> None:
        """What a trainer logs of a step that has ended and of no later one.

        Args:
            number: of the step.
            logged: by name: `loss`, `grad_norm`, `learning_rate`, others; those are left out.
        """
        if self._last is None or self._last.record.step != number:
            return
        for name in ("loss", "grad_norm", "learning_rate"):
            if isinstance(logged.get(name), int | float):
                setattr(self._last.record, name, float(logged[name]))

    def close(self) -> None:
        """Writes the last step. One that has not ended gets no line."""
        self._write_last()
        if self._clock is not None:
            self._clock.wait()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries again to write what it could not
                file.close()

    def _write_last(self) -> None:
        line, self._last = self._last, None
        if line is not None and self._clock is not None:
            self._clock.tell(line.began, line.ended, functools.partial(self._write, line))
            self._clock.read()

    def _write(self, line: _Line, seconds: float) -> None:
        if self._file is None:
            return
        record = line.record
        if line.losses:
            assert self._device is not None, "a line is of a step that has begun"
            record.loss = sum(self._device.number(one) for one in line.losses)
        record.step_time_s = max(seconds, 1e-9)
        record.tokens_per_s /= record.step_time_s
        try:
            self._file.write(record)
        except OSError as error:  # a disk that is full by now is no reason to end a training
            logger.warning(
                "activation offload: the metrics file %s cannot be written: %s; it ends here",
                self._path,
                error.strerror,
            )
            self._close_file()


class _Line:
    """A line that is not written yet."""

    def __init__(
        self, record: StepRecord, began: Moment, ended: Moment, losses: Sequence[torch.Tensor]
    ) -> None:
        self.record = record
        self.began = began
        self.ended = ended
        self.losses = losses


def _tokens_of(inputs: Any) -> int:
    tensors = [one for one in tensors_in(inputs) if one.dim()]
    for one in tensors:
        if one.dim() == 2 and not one.is_floating_point():
            return one.numel()
    return tensors[0].shape[0] if tensors else 0
