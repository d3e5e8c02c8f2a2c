# SPDX-License-Identifier: Apache-2.0
"""The GPT trainer on ranks that do not measure the same; test_auto.py starts it.

Rank 1 finds its SSD all but standing still and its layers slow, most of all when they are
recomputed, and notices a change that rank 0 does not see. Each rank leaves what it had measured by
itself, and every plan that it then followed, next to the file with the metrics.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

from megatron.offload.activations.placement.plan import Plan  # noqa: E402
from megatron.offload.activations.placement.plan_file import plans_to_json  # noqa: E402
from megatron.offload.activations.placement.plan_policy import PlannedPolicy  # noqa: E402
from megatron.offload.planner.online.drift import Drift, Reason  # noqa: E402
from megatron.offload.planner.online.step_meter import StepMeter  # noqa: E402
from megatron.offload.planner.profile.stage_profile import StageProfile  # noqa: E402

RANK = int(os.environ["RANK"])
DIRECTORY = Path(sys.argv[sys.argv.index("--metrics-file") + 1]).parent


def slower(profile: StageProfile) -> StageProfile:
    """As another machine would have measured it."""
    tiers = [
        dataclasses.replace(one, write_bytes_per_s=9.0, read_bytes_per_s=9.0)
        for one in profile.tiers
    ]
    layers = [
        dataclasses.replace(one, forward_s=3 * one.forward_s, recompute_s=300 * one.forward_s)
        for one in profile.layers
    ]
    return dataclasses.replace(profile, tiers=tuple(tiers), layers=tuple(layers))


def connect() -> None:
    """Changes what this rank measures, and writes what becomes of it."""
    measured, follow = StepMeter.profile, PlannedPolicy.follow
    profiles: list[StageProfile] = []
    plans: list[Plan] = []
    num_noticed = 0

    def profile(self: StepMeter, *args: Any, **more: Any) -> StageProfile:
        found = measured(self, *args, **more)
        profiles.append(slower(found) if RANK else found)
        path = DIRECTORY / f"profile{len(profiles)}-rank{RANK}.json"
        path.write_text(profiles[-1].to_json())
        return profiles[-1]

    def notice_once(self: Drift) -> dict[Reason, str]:
        nonlocal num_noticed
        num_noticed += 1
        something = "something" if RANK and num_noticed == 1 else ""
        return {**dict.fromkeys(Reason, ""), Reason.SLOWER: something}

    def write(self: PlannedPolicy, plan: Plan) -> None:
        plans.append(plan)
        (DIRECTORY / f"plan{len(plans)}-rank{RANK}.json").write_text(plans_to_json([plan]))
        follow(self, plan)

    StepMeter.profile = profile  # type: ignore[method-assign]
    Drift.take = notice_once  # type: ignore[method-assign]
    PlannedPolicy.follow = write  # type: ignore[method-assign]


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.gpt import GPT

    return GPT()


if __name__ == "__main__":
    from trainer.start import start

    connect()
    sys.exit(start(make_task))
