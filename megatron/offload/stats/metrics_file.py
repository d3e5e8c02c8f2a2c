# SPDX-License-Identifier: Apache-2.0
"""A line for each step of a training: `StepRecord`, and `MetricsFile` that has them.

The launcher, the bundled trainer and the handle of a model's activations write one; `report`,
`tune` and `rok` read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megatron.offload.documents import FAULTS, from_json


@dataclass
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    loss: float | None  # mean over the global batch; None: it is not known
    grad_norm: float | None  # before clipping
    step_time_s: float  # forward, backward, optimizer and schedule
    tokens_per_s: float
    peak_activation_bytes: int  # the largest of all ranks
    peak_activation_bytes_rank0: int  # of the first rank, on the first pipeline stage
    peak_device_bytes: int  # of the whole step, with weights and states; the largest of all ranks
    learning_rate: float | None
    offload: dict[str, Any] = field(default_factory=dict)  # of rank 0
    states: dict[str, int] = field(default_factory=dict)  # of rank 0, since training began
    parameters: dict[str, int | float] = field(default_factory=dict)  # the same
    losses: dict[str, float] = field(default_factory=dict)  # the loss's parts, where it has some
    model: str | None = None  # digest of all weights; in the last step of the trainer's runs only

    def to_json(self) -> str:
        """One line; floats keep every bit."""
        values = asdict(self)
        for name in ("losses", "states", "parameters"):
            if not values[name]:
                del values[name]
        if self.model is None:
            del values["model"]
        return json.dumps(values)


class MetricsFile:
    """metrics.jsonl. A resumed run keeps the lines up to where it goes on, and appends.

    Args:
        path: The file; its directory is made if need be.
        first_step: Lines of steps after this one are dropped.

    Raises:
        OSError: There is no place for it.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if first_step > 0 and path.is_file():
            lines = path.read_text(errors="replace").split("\n")  # a cut one may be anything
            kept = [line for line in lines if _step_of(line) <= first_step]
        self._file: TextIO = path.open("w", encoding="utf-8")
        for line in kept:
            print(line, file=self._file)
        self._file.flush()

    def write(self, record: StepRecord) -> None:
        """Adds one line."""
        print(record.to_json(), file=self._file, flush=True)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step_of(line: str) -> float:
    """The step of a line; beyond all steps for a line that was cut short."""
    try:
        return float(from_json(line)["step"])
    except FAULTS:
        return float("inf")
