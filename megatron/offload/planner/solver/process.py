# SPDX-License-Identifier: Apache-2.0
"""Solves in a process of its own: `SolverProcess`. The planner starts one for each plan.

The solver and its libraries take some hundred MB, which on a CPU would count as memory of
activations, and minutes of a training's interpreter lock where models are large. The process has no
torch; it gets a profile and gives a plan, a line of JSON each, and ends with the pipe to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, TextIO

from megatron.offload.errors import PREFIX, ConfigurationError, InfeasibleBudgetError, OffloadError
from megatron.offload.placement.plan import Plan, Prediction
from megatron.offload.placement.plan_file import plans_from_json, plans_to_json
from megatron.offload.planner.profile.stage_profile import StageProfile


class SolverProcess:
    """The planner's side. A context; what it answers is what `placement` would in this process."""

    def __enter__(self) -> SolverProcess:
        search = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
            text=True,
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
        """See `placement.solver.solve`."""
        answer = self._ask("solve", profile, budget_bytes=budget_bytes, max_slowdown=max_slowdown)
        (plan,) = plans_from_json(answer["plan"]).values()
        return plan

    def predict(self, profile: StageProfile, plan: Plan | None) -> Prediction:
        """Of a plan; with None, where everything that can goes to a tier."""
        text = plans_to_json([plan]) if plan is not None else None
        return Prediction(**self._ask("predict", profile, plan=text)["predicted"])

    def _ask(self, what: str, profile: StageProfile, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({"what": what, "profile": profile.to_json(), **asked}),
                file=self._process.stdin,
                flush=True,
            )
            line = self._process.stdout.readline()
        if not line:
            raise OffloadError(
                f"the process that plans ended with exit code {self._process.wait()} and without a "
                "plan; what it wrote to standard error says why"
            )
        answer: dict[str, Any] = json.loads(line)
        if "smallest_bytes" in answer:
            (plan,) = plans_from_json(answer["plan"]).values()
            raise InfeasibleBudgetError(
                answer["error"], answer["smallest_bytes"], answer["step_s"], plan
            )
        if "error" in answer:
            raise ConfigurationError(answer["error"])
        return answer


# ------------------------------------------------------------------ the process's side


def _serve(requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    profile = StageProfile.from_json(request["profile"])
    try:
        if request["what"] == "predict":
            return {"predicted": dataclasses.asdict(_predicted(profile, request["plan"]))}
        from megatron.offload.planner.solver.solve import solve

        plan = solve(
            profile, budget_bytes=request["budget_bytes"], max_slowdown=request["max_slowdown"]
        )
        return {"plan": plans_to_json([plan])}
    except ConfigurationError as error:
        answer: dict[str, Any] = {"error": str(error).removeprefix(PREFIX)}
        if isinstance(error, InfeasibleBudgetError):
            answer.update(smallest_bytes=error.smallest_bytes, step_s=error.step_s)
            answer["plan"] = plans_to_json([error.plan])
        return answer


def _predicted(profile: StageProfile, plan: str | None) -> Prediction:
    from megatron.offload.planner.simulator.timeline import Timeline
    from megatron.offload.planner.solver.baselines import all_moved

    followed = all_moved(profile)
    if plan is not None:
        (followed,) = plans_from_json(plan).values()
    return Timeline(profile).predict(followed)


def _main() -> None:
    # Answers have a file of their own: what a library prints goes to standard error.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(sys.stdin, answers)


if __name__ == "__main__":
    _main()
