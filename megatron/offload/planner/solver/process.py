# SPDX-License-Identifier: Apache-2.0
"""Solves in a process of its own: `SolverProcess`. The planner starts one for each plan.

The solver and its libraries take some hundred MB, which on a CPU would count as memory of
activations, and minutes of a training's interpreter lock where models are large. The process has no
torch; it gets a profile and gives a plan, a line of JSON each, and ends with the pipe to it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Literal

import msgspec

from megatron.offload.activations.placement.plan import Plan, Prediction
from megatron.offload.errors import PREFIX, ConfigurationError, InfeasibleBudgetError, OffloadError
from megatron.offload.planner.profile.stage_profile import StageProfile


@dataclass(frozen=True)
class _Request:
    what: Literal["solve", "predict"]
    profile: StageProfile
    plan: Plan | None = None  # to predict; None: everything that can goes to a tier
    budget_bytes: int | None = None
    max_slowdown: float | None = None


@dataclass(frozen=True)
class _Answer:
    """A plan or a prediction, or an error; with a plan beside it an `InfeasibleBudgetError`."""

    plan: Plan | None = None
    predicted: Prediction | None = None
    error: str | None = None
    smallest_bytes: int = 0
    step_s: float = 0.0


class SolverProcess:
    """The planner's side, a context manager. It answers what `solve` would in this process."""

    def __enter__(self) -> SolverProcess:
        search = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def solve(
        self, profile: StageProfile, *, budget_bytes: int | None, max_slowdown: float | None
    ) -> Plan:
        """The plan that `solver.solve.solve` makes, which also says what it raises."""
        plan = self._ask(_Request("solve", profile, None, budget_bytes, max_slowdown)).plan
        assert plan is not None
        return plan

    def predict(self, profile: StageProfile, plan: Plan | None) -> Prediction:
        """What a step takes with a plan; with None, where everything that can goes to a tier."""
        predicted = self._ask(_Request("predict", profile, plan)).predicted
        assert predicted is not None
        return predicted

    def _ask(self, request: _Request) -> _Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise OffloadError(
                f"the process that plans ended with exit code {self._process.wait()} and without a "
                "plan; what it wrote to standard error says why"
            )
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error is None:
            return answer
        if answer.plan is not None:
            raise InfeasibleBudgetError(
                answer.error, answer.smallest_bytes, answer.step_s, answer.plan
            )
        raise ConfigurationError(answer.error)


# ------------------------------------------------------------------ the process's side


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    for line in requests:
        answer = _answer(msgspec.json.decode(line, type=_Request))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def _answer(request: _Request) -> _Answer:
    try:
        if request.what == "predict":
            return _Answer(predicted=_predicted(request.profile, request.plan))
        from megatron.offload.planner.solver.solve import solve

        budget_bytes, max_slowdown = request.budget_bytes, request.max_slowdown
        return _Answer(solve(request.profile, budget_bytes=budget_bytes, max_slowdown=max_slowdown))
    except InfeasibleBudgetError as error:
        sentence = str(error).removeprefix(PREFIX)
        return _Answer(error.plan, None, sentence, error.smallest_bytes, error.step_s)
    except ConfigurationError as error:
        return _Answer(error=str(error).removeprefix(PREFIX))


def _predicted(profile: StageProfile, plan: Plan | None) -> Prediction:
    from megatron.offload.planner.simulator.timeline import Timeline
    from megatron.offload.planner.solver.baselines import all_moved

    return Timeline(profile).predict(all_moved(profile) if plan is None else plan)


def _main() -> None:
    # Answers have a file of their own: what a library prints goes to standard error.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
