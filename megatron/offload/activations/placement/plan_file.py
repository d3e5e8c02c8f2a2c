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
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron.offload.activations.placement.atomic_file import write_atomically
from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.policy import SELECTIVE, Placement
from megatron.offload.documents import FAULTS, check_finite, from_json, in_file, reason_of
from megatron.offload.errors import ConfigurationError

FORMAT_VERSION = 1


def plans_to_json(plans: Iterable[Plan]) -> str:
    """Text that `plans_from_json` reads; one line for each part."""
    stages = []
    for plan in sorted(plans, key=lambda one: one.stage):
        values = dataclasses.asdict(plan)
        lines = [_part_to_json(one) for one in plan.parts]
        values["parts"] = _ALL_PARTS
        text = json.dumps(values, indent=1)
        stages.append(text.replace(f'"{_ALL_PARTS}"', "[\n  " + ",\n  ".join(lines) + "\n ]"))
    return f'{{"version": {FORMAT_VERSION}, "stages": [\n' + ",\n".join(stages) + "\n]}\n"


def _part_to_json(part: PlannedPart) -> str:
    """A line; of where an input waits, of replay and codec there is nothing if it is as usual."""
    values = msgspec.to_builtins(part)
    if part.input is Placement.KEEP:
        values.pop("input", None)  # msgspec leaves a default out of what it has read itself
    if part.replays:
        values.pop("replays", None)
    if part.encodes:
        values.pop("encodes", None)
    return json.dumps(values)


def plans_from_json(text: str) -> dict[int, Plan]:
    """The plans in a file's text, by stage; also in the words of earlier releases.

    Raises:
        ConfigurationError: it has none, or is of another format version.
    """
    values: Any = None
    try:
        values = from_json(text, object_hook=_in_todays_words)
        check_finite(values)
        if (version := values["version"]) != FORMAT_VERSION:
            raise ConfigurationError(
                f"the plan has format {version}, this release reads {FORMAT_VERSION}; plan again"
            )
        plans = msgspec.convert(values, _File).stages
        _check_once("stage", [plan.stage for plan in plans])
        for plan in plans:
            parts = [f"{one.part} of {one.layer} in chunk {one.chunk}" for one in plan.parts]
            _check_once("part", parts)
    except ConfigurationError:
        raise
    except FAULTS as error:
        reason = reason_of(error)
        raise ConfigurationError(
            f"this is no activation plan ({reason}{_line(values, reason)}); correct it, or give a "
            "file that --activation-offload-plan has written"
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else reason_of(error)
        raise ConfigurationError(f"the plan {path} cannot be read: {reason}") from None
    with in_file(f"the plan {path}"):
        return plans_from_json(text)


_ALL_PARTS = "%parts%"  # stands for them until each has its line


@dataclasses.dataclass(frozen=True)
class _File:
    """What stands in a file."""

    version: int
    stages: tuple[Plan, ...]


# People edit plans, and keep them: words of releases before this one, and today's for them.
_OLD_NAMES = {"group": "part", "groups": "parts"}
_OLD_ENDING = "-cheap"
_NAMES = {
    field.name
    for kind in (_File, Plan, PlannedPart, Prediction)
    for field in dataclasses.fields(kind)
}


def _in_todays_words(values: dict[str, Any]) -> dict[str, Any]:
    """An object of a file that a release before this one may have written."""
    values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
    for name in values.keys() - _NAMES:
        raise ValueError(f"nothing is called {name!r}")
    part = values.get("part")
    if isinstance(part, str) and part.endswith(_OLD_ENDING):
        values["part"] = part.removesuffix(_OLD_ENDING) + SELECTIVE
    return values


def _line(values: Any, reason: str) -> str:
    """The line of a plan that a decoder's error is about, and what may stand there."""
    at = re.search(r"`\$\.stages\[(\d+)\]\.parts\[(\d+)\]\.?(\w*)", reason)
    if at is None:
        return ""
    line = f" in {json.dumps(values['stages'][int(at[1])]['parts'][int(at[2])])}"
    return f"{line}, expected {_MAY_BE[at[3]]}" if at[3] in _MAY_BE else line


_MAY_BE = {
    "placement": "keep, recompute, host or ssd",
    "input": "keep, host or ssd",
    "replays": "true or false",
    "encodes": "true or false",
}


def _check_once(what: str, names: Sequence[Any]) -> None:
    for name, times in collections.Counter(names).items():
        if times > 1:
            raise ValueError(f"{what} {name} is there {times} times")
