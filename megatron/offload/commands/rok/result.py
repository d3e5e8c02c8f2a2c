# SPDX-License-Identifier: Apache-2.0
"""Everything that was measured: `Result`, as rok.json and back. Written after every round."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron.offload.commands.rok.measurements import MeasuredPoint, Point
from megatron.offload.commands.rok.strategy import TITLES
from megatron.offload.commands.rok.verdict import Verdict
from megatron.offload.commands.training_runs.run import Run
from megatron.offload.commands.training_runs.trainer import CHECKOUT
from megatron.offload.documents import check_finite, from_json, reading

_OF_STEP = ("loss", "grad_norm", "step_time_s", "peak_activation_bytes_rank0")
_OF_OFFLOAD = ("plans", "written_bytes", "read_bytes", "stall_s")


@dataclass(frozen=True)
class Result:
    """What `megatron-offload rok` found, as it is written and read.

    Attributes:
        title: of the picture: the model.
        conditions: command, flags, machine and settings: what the figures depend on.
        rule: layers that SSDTrain's rule sends to SSDs, by micro-batch size.
        frontier: what the planner predicts.
        differences: of losses and gradient norms from the first run's; there should be none.
    """

    title: str
    conditions: dict[str, Any]
    measured: Sequence[MeasuredPoint]
    verdicts: Sequence[Verdict] = ()
    frontier: Sequence[Point] = ()
    rule: dict[int, int] = dataclasses.field(default_factory=dict)
    differences: Sequence[str] = ()
    runs: Sequence[Run] = ()

    @property
    def passes(self) -> bool:
        """Losses are the same, and `auto` lost nowhere."""
        return not self.differences and all(one.is_won for one in self.verdicts)

    def to_json(self) -> str:
        """Text that `load` reads; a line for each measurement, verdict, point and training."""
        skip = self.conditions.get("skip_steps", 0)
        values = {
            "title": self.title,
            "conditions": self.conditions,
            "passes": self.passes,
            "rule": self.rule,
            "differences": list(self.differences),
            "figures": [dataclasses.asdict(one) for one in self.measured],
            "verdicts": [
                {**dataclasses.asdict(one), "is_won": one.is_won} for one in self.verdicts
            ],
            "frontier": [dataclasses.asdict(one) for one in self.frontier],
            "runs": [_run(one, skip) for one in self.runs],
        }
        parts = [f' "{name}": {_text(value)}' for name, value in values.items()]
        # Paths relative to the checkout, so that a committed file names no machine's folders.
        return ("{\n" + ",\n".join(parts) + "\n}\n").replace(f"{CHECKOUT}/", "")

    @classmethod
    def load(cls, path: Path) -> Result:
        """A file's result, all but the runs. Raises ConfigurationError, OSError."""
        text = path.read_bytes()
        with reading(f"{path} is no rok.json", "give one that megatron-offload rok has written"):
            values = from_json(text)
            values["runs"] = ()
            check_finite(values)
            values["measured"] = values["figures"]
            result = msgspec.convert(values, cls, str_keys=True)
            unknown = {one.placement for one in result.measured} - {*TITLES}
            if unknown:
                raise ValueError(f"no strategy is called {min(unknown)!r}")
            return result


def _text(value: Any) -> str:
    """JSON; a list of objects with a line for each."""
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(one) for one in value) + "\n ]"
    return json.dumps(value)


def _run(run: Run, skip: int) -> dict[str, Any]:
    return {
        "strategy": dataclasses.asdict(run.variant),
        "round": run.round,
        "first_settled_step": run.settled_steps(skip)[0]["step"],
        "first_turn": run.first_turn,
        "steps": [
            {
                **{name: step.get(name) for name in _OF_STEP},
                **{name: step.get("offload", {}).get(name) for name in _OF_OFFLOAD},
            }
            for step in run.steps
        ],
    }
