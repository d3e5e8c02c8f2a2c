# SPDX-License-Identifier: Apache-2.0
"""The plans of all stages in one JSON file: `save_plans`, `load_plans`.

The planner writes it once it has decided and reads it where one is given; people may edit it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.atomic_file import write_atomically
from megatron.offload.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.placement.policy import Placement

FORMAT_VERSION = 1


def plans_to_json(plans: Iterable[Plan]) -> str:
    """Text that `plans_from_json` reads; one line for each part."""
    stages = []
    for plan in sorted(plans, key=lambda one: one.stage):
        values = dataclasses.asdict(plan)
        lines = [
            json.dumps({**dataclasses.asdict(one), "placement": one.placement.value})
            for one in plan.parts
        ]
        values["parts"] = _ALL_PARTS
        text = json.dumps(values, indent=1)
        stages.append(text.replace(f'"{_ALL_PARTS}"', "[\n  " + ",\n  ".join(lines) + "\n ]"))
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
        _check_once("stage", [plan.stage for plan in plans])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(
            f"this is no activation plan ({reason}); correct it, or give a file that "
            "--activation-offload-plan has written"
        ) from None
    return {plan.stage: plan for plan in plans}


def save_plans(path: Path, plans: Iterable[Plan]) -> None:
    """Writes the file, see `write_atomically`. Raises OSError."""
    write_atomically(path, plans_to_json(plans))


def update_plan(path: Path, plan: Plan) -> None:
    """Puts the plan of one stage in the place of the one that is there.

    Other stages may do the same at the same moment. Raises ConfigurationError, OSError.
    """
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        save_plans(path, {**load_plans(path), plan.stage: plan}.values())
    finally:
        os.close(directory)


def load_plans(path: Path) -> dict[int, Plan]:
    """The plans in a file, by stage. Raises ConfigurationError."""
    try:
        return plans_from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the plan {path} cannot be read: {error}") from None


_ALL_PARTS = "%parts%"  # stands for them until each has its line


# What people may have edited, and what it has to be.
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("stage", "chunk", "movable_bytes"), int),
    **dict.fromkeys(("layer", "part", "reason", "goal"), str),
    **dict.fromkeys((field.name for field in dataclasses.fields(Prediction)), (int, float)),
}


def _plan(values: dict[str, Any]) -> Plan:
    _check_kinds(values)
    parts = tuple(_part(one) for one in values["parts"])
    _check_once("part", [f"{one.part} of {one.layer} in chunk {one.chunk}" for one in parts])
    predictions = {
        name: _prediction(values[name]) if values.get(name) is not None else None
        for name in ("predicted", "fastest")
    }
    notes = tuple(values.get("notes", ()))
    return Plan(**{**values, "parts": parts, "notes": notes, **predictions})


def _part(values: dict[str, Any]) -> PlannedPart:
    _check_kinds(values)
    placements = [one.value for one in _PLACEMENTS]
    if values["placement"] not in placements:
        raise ValueError(
            f"{values['part']} of {values['layer']} has placement {values['placement']!r}, "
            f"expected {', '.join(placements)}"
        )
    return PlannedPart(**{**values, "placement": Placement(values["placement"])})


_PLACEMENTS = (Placement.KEEP, Placement.RECOMPUTE, Placement.HOST, Placement.SSD)


def _prediction(values: dict[str, Any]) -> Prediction:
    _check_kinds(values)
    return Prediction(**values)


def _check_kinds(values: dict[str, Any]) -> None:
    for name, value in values.items():
        kind = _KINDS.get(name, object)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
            raise TypeError(f"{name} is {value!r}")


def _check_once(what: str, names: Sequence[Any]) -> None:
    for name, times in collections.Counter(names).items():
        if times > 1:
            raise ValueError(f"{what} {name} is there {times} times")
