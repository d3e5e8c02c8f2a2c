# SPDX-License-Identifier: Apache-2.0
"""The plans of all stages in one JSON file: `save_plans`, `load_plans`.

The planner writes it once it has decided and reads it where one is given; people may edit it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.plan import Plan, PlannedGroup, Prediction
from megatron.offload.placement.policy import Placement

FORMAT_VERSION = 1


def plans_to_json(plans: Iterable[Plan]) -> str:
    """Text that `plans_from_json` reads; one line for each group."""
    stages = []
    for plan in sorted(plans, key=lambda one: one.stage):
        values = dataclasses.asdict(plan)
        lines = [
            json.dumps({**dataclasses.asdict(one), "placement": one.placement.value})
            for one in plan.groups
        ]
        values["groups"] = _GROUPS
        text = json.dumps(values, indent=1)
        stages.append(text.replace(f'"{_GROUPS}"', "[\n  " + ",\n  ".join(lines) + "\n ]"))
    return f'{{"version": {FORMAT_VERSION}, "stages": [\n' + ",\n".join(stages) + "\n]}\n"


def plans_from_json(text: str) -> dict[int, Plan]:
    """The plans in a file's text, by stage.

    Raises:
        ConfigurationError: it has none, or is of another format version.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        if values["version"] != FORMAT_VERSION:
            raise ConfigurationError(
                f"the plan has format {values['version']}, this release reads {FORMAT_VERSION}; "
                "plan again"
            )
        plans = [_plan(one) for one in values["stages"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"this is no activation plan ({error!r}); give a file that "
            "--activation-offload-plan has written"
        ) from None
    return {plan.stage: plan for plan in plans}


def save_plans(path: Path, plans: Iterable[Plan]) -> None:
    """Writes the file; a reader finds all of it or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(plans_to_json(plans))
    unfinished.replace(path)


def load_plans(path: Path) -> dict[int, Plan]:
    """The plans in a file, by stage. Raises ConfigurationError."""
    try:
        return plans_from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the plan {path} cannot be read: {error}") from None


_GROUPS = "%groups%"  # stands for them until each has its line


def _plan(values: dict[str, Any]) -> Plan:
    groups = tuple(
        PlannedGroup(**{**one, "placement": Placement(one["placement"])})
        for one in values["groups"]
    )
    predictions = {
        name: Prediction(**values[name]) if values.get(name) is not None else None
        for name in ("predicted", "fastest")
    }
    notes = tuple(values.get("notes", ()))
    return Plan(**{**values, "groups": groups, "notes": notes, **predictions})
