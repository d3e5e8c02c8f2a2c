# SPDX-License-Identifier: Apache-2.0
"""What the steps of a training script took: `MeasuredSteps`, and the flags that ask for it.

`training_script.py` calls it around the steps. The launcher's `--metrics-file` gets the same keys
as the bundled trainer's, so `report`, `tune` and `rok` read both. No import is of Megatron-LM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.offload.activations.placement.atomic_file import check_place
from megatron.offload.device.clock import Clock
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.whole_training import OffloadedTraining
from megatron.offload.stats.memory import PeakMemory
from megatron.offload.stats.metrics_file import MetricsFile, StepRecord

_log = logging.getLogger(__name__)


def add_measuring_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the launcher's own flags, which have the names of the bundled trainer's; the parser."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--metrics-file",
        metavar="FILE",
        help="rank 0 writes one JSON object per step there: loss, seconds, peak memory, bytes "
        "moved. megatron-offload report reads it. Default: no file",
    )
    group.add_argument(
        "--wait-for-input",
        action="store_true",
        help="before each step wait for a line on standard input, and leave at its end: for "
        "trainings that take turns. One process only",
    )
    return parser


def check_measuring(flags: argparse.Namespace) -> None:
    """Raises ConfigurationError where these flags cannot work; called before a model is built."""
    if getattr(flags, "wait_for_input", False) and torch.distributed.get_world_size() > 1:
        raise ConfigurationError(
            "--wait-for-input works with one process, which reads its standard input; drop it, or "
            "start one process"
        )
    path = getattr(flags, "metrics_file", None)
    if path and torch.distributed.get_rank() == 0:
        try:
            check_place(Path(path))
        except OSError as error:
            raise _no_place(error) from None


class MeasuredSteps:
    """Measures the steps of one rank; on rank 0 it writes them.

    Args:
        device: of the model.
        path: of the file; None: none is written.
        first_step: after which the run begins.

    Raises:
        ConfigurationError: the file cannot be opened.
    """

    def __init__(self, device: torch.device, path: str | None, first_step: int = 0) -> None:
        self._device = device
        opened = open_device(device)
        self._memory, self._clock = PeakMemory(opened), Clock(opened)
        self._writes = path is not None
        self._file: MetricsFile | None = None
        if path is not None and torch.distributed.get_rank() == 0:
            try:
                self._file = MetricsFile(Path(path), first_step)
            except OSError as error:
                raise _no_place(error) from None
        self._activation_bytes = self._device_bytes = 0
        self._step_s = 0.0
        self._samples = 0

    @contextlib.contextmanager
    def passes(self, num_samples: int) -> Iterator[None]:
        """Around forward and backward of a step with so many samples on this rank."""
        self._samples = num_samples
        self._memory.begin_step()
        yield
        self._activation_bytes = self._memory.end_step()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step: passes and optimizer."""
        began = self._clock.now()
        yield
        self._clock.tell(began, self._clock.now(), self._took)
        self._device_bytes = self._memory.device_bytes()

    def _took(self, seconds: float) -> None:
        self._step_s = max(seconds, 1e-9)

    @property
    def peaks(self) -> dict[str, float]:
        """The last step's peaks on this rank, in bytes, by their names in the file."""
        return {
            "peak_activation_bytes": self._activation_bytes,
            "peak_device_bytes": self._device_bytes,
        }

    def write(
        self,
        logged: Mapping[str, Any],
        largest: Mapping[str, float],
        offload: OffloadedTraining,
        *,
        replicas: int,
        tokens_per_sample: int,
    ) -> None:
        """Adds a line for the last step, where a file is asked for. Called by all ranks.

        Args:
            logged: the arguments of Megatron-LM's `training_log`.
            largest: of all ranks: `peaks`.
            offload: of this rank.
            replicas: ranks that have samples of their own.
            tokens_per_sample: of the model's input.
        """
        if not self._writes:
            return
        losses = self._of_last_rank(logged["loss_dict"])
        self._clock.wait()
        if self._file is None:
            return
        gradients, rate = logged.get("grad_norm"), logged.get("learning_rate")
        tokens = self._samples * replicas * tokens_per_sample
        record = StepRecord(
            step=int(logged["iteration"]),
            loss=sum(losses.values()),
            grad_norm=None if gradients is None else float(gradients),
            step_time_s=self._step_s,
            tokens_per_s=tokens / self._step_s,
            peak_activation_bytes=int(largest["peak_activation_bytes"]),
            peak_activation_bytes_rank0=self._activation_bytes,
            peak_device_bytes=int(largest["peak_device_bytes"]),
            learning_rate=None if rate is None else float(rate),
            offload=dict(offload.passes.statistics),
            states=dict(offload.states.statistics),
            parameters=dict(offload.parameters.statistics),
            losses=losses if len(losses) > 1 else {},
        )
        try:
            self._file.write(record)
        except OSError as error:  # a disk that is full by now is no reason to end a training
            _log.warning("the metrics file cannot be written: %s; it ends here", error.strerror)
            self._end_file()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._end_file()

    def _end_file(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):  # it tries again to write what it could not
            self._file.close()
        self._file = None

    def _of_last_rank(self, losses: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The losses by their names, on every rank; the last one, on the last stage, has them."""
        found: list[Any] = [{name: float(value) for name, value in losses.items()}]
        last = torch.distributed.get_world_size() - 1
        if last:
            torch.distributed.broadcast_object_list(found, src=last, device=self._device)
        return dict(found[0])


def _no_place(error: OSError) -> ConfigurationError:
    return ConfigurationError(f"--metrics-file has no place: {error}; give another path")


def wait_for_turn(flags: argparse.Namespace) -> None:
    """With `--wait-for-input`, waits for a line on standard input; leaves at its end."""
    if getattr(flags, "wait_for_input", False) and not sys.stdin.readline():
        sys.exit(0)
