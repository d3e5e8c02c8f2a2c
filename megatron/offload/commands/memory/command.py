# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload report --memory`: `explain_memory` reads a report, explains it and draws it.

Where a step followed a plan, what the planner's simulation says of its peak stands beside it.
"""

from __future__ import annotations

from pathlib import Path

from megatron.offload.activations.placement.plan_file import plans_from_json
from megatron.offload.activations.stats.memory_parts import PredictedPeak, StepMemory, load_steps
from megatron.offload.commands.drawing import check_picture
from megatron.offload.commands.memory.picture import draw
from megatron.offload.commands.memory.text import as_text
from megatron.offload.documents import reading
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.planner.profile.stage_profile import StageProfile

_RUN_AGAIN = "let a training write another one with --activation-memory-report"


def explain_memory(path: Path, picture: Path | None) -> str:
    """What the largest peak in a file of `--activation-memory-report` is made of.

    Args:
        path: of the file.
        picture: gets the step of that peak, drawn over time; None: nothing is drawn.

    Raises:
        ConfigurationError: the file has no step, or is none of these.
        OSError: a file cannot be read or written.
    """
    if picture is not None:
        check_picture("--picture", picture)
    steps = load_steps(path)
    if not steps:
        raise ConfigurationError(
            f"the memory report {path} has no step yet; the first two steps are left out, and with "
            "auto all before the first plan: let the training run for longer"
        )
    shown = max(steps, key=lambda step: step.peak_bytes)
    if picture is not None:
        draw(shown, picture)
    return as_text(steps, shown, predicted_peak(shown))


def predicted_peak(step: StepMemory) -> PredictedPeak | None:
    """What was predicted of a step that followed a plan; None: it is not known.

    Raises:
        ConfigurationError: what simulates is not installed.
    """
    if not step.plan or not step.profile:
        return None
    check_libraries("what was predicted of a memory report")
    from megatron.offload.planner.simulator.timeline import Timeline  # brings numba

    with reading("the plan in the memory report is not that of its profile", _RUN_AGAIN):
        (plan,) = plans_from_json(step.plan).values()
        return Timeline(StageProfile.from_json(step.profile)).explain_peak(plan)
