# SPDX-License-Identifier: Apache-2.0
"""What `doctor` found, and how it is shown: `Check`, `Section`, `Diagnosis`.

A check is one line for people, with what to do where something is not as it should be, and the
same as data. Nothing here looks at the machine.
"""

from __future__ import annotations

import datetime
import enum
import json
import socket
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.offload.errors import PREFIX, STATES_PREFIX, ConfigurationError
from megatron.offload.version import __version__

FORMAT = 1  # of the JSON: names go only with another number, new ones come without

_RESET = "\033[0m"
_MARGIN = 13  # before the values, besides the names: two spaces, status, two, name, two


class Status(enum.Enum):
    """How good or bad a check ended; only `PROBLEM` keeps the given flags from working."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


_COLOURS = {
    Status.OK: "\033[32m",
    Status.INFO: "",
    Status.WARNING: "\033[33m",
    Status.PROBLEM: "\033[31m",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, how good it is, and what to do about it.

    Args:
        value: what was found, in words; sizes are rounded.
        advice: what to do about it; every warning and problem has one.
        facts: the exact numbers; names end in their unit (`_bytes`, `_bytes_per_s`).
    """

    name: str
    status: Status
    value: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.advice or self.status in (Status.OK, Status.INFO), self


@dataclass(frozen=True)
class Section:
    """A heading and the checks below it."""

    title: str
    checks: Sequence[Check]


@dataclass(frozen=True)
class Diagnosis:
    """All that `doctor` found, in sections, and the verdict on it.

    Args:
        subject: what the verdict is about: `these flags` or `activation offload`.
        next_step: said after a good verdict.
    """

    sections: Sequence[Section]
    subject: str = "these flags"
    next_step: str = ""

    @property
    def works(self) -> bool:
        """Whether there is no problem. Warnings cost speed or memory, nothing else."""
        return not self._names(Status.PROBLEM)

    @property
    def verdict(self) -> str:
        """One line that says whether it should work on this machine, and what to fix."""
        subject = self.subject[0].upper() + self.subject[1:]
        problems, warnings = self._names(Status.PROBLEM), self._names(Status.WARNING)
        if problems:
            return f"{subject} cannot work on this machine; fix: {problems}"
        found = f"; warnings: {warnings}" if warnings else ""
        step = f"; {self.next_step}" if self.next_step else ""
        return f"{subject} should work on this machine{found}{step}"

    def _names(self, status: Status) -> str:
        """Of the checks that ended so, each once."""
        checks = (check for part in self.sections for check in part.checks)
        return ", ".join(dict.fromkeys(check.name for check in checks if check.status is status))

    def as_text(self, colour: bool = False, width: int = 100) -> str:
        """The sections and the verdict as lines for people.

        Args:
            colour: of the status words, for terminals.
            width: of the lines, in characters.
        """
        names = [check.name for part in self.sections for check in part.checks]
        indent = " " * (max(map(len, names), default=0) + _MARGIN)
        lines = []
        for part in self.sections:
            lines.append(part.title)
            for check in part.checks:
                status = check.status.value.ljust(7)
                if colour and _COLOURS[check.status]:
                    status = _COLOURS[check.status] + status + _RESET
                name = check.name.ljust(len(indent) - _MARGIN)
                body = _wrap(check.value, width, indent)
                lines.append(f"  {status}  {name}  {body.lstrip()}")
                if check.advice:
                    lines.append(_wrap(check.advice, width, indent, "-> "))
            lines.append("")
        mark = Status.WARNING if self._names(Status.WARNING) else Status.OK
        mark = mark if self.works else Status.PROBLEM
        lines.append(_COLOURS[mark] + self.verdict + _RESET if colour else self.verdict)
        return "\n".join(lines)

    def as_json(self) -> str:
        """The checks and the verdict as JSON; sizes in bytes, rates in bytes per second.

        With the number of this format, the version of the package, the host and the time in UTC.
        """
        checks = [
            {
                "section": part.title,
                "name": check.name,
                "status": check.status.value,
                "value": check.value,
                "advice": check.advice,
                "facts": dict(check.facts),
            }
            for part in self.sections
            for check in part.checks
        ]
        document = {
            "format": FORMAT,
            "version": __version__,
            "host": socket.gethostname(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "works": self.works,
            "verdict": self.verdict,
            "checks": checks,
        }
        return json.dumps(document, indent=2)


def in_words(error: ConfigurationError) -> tuple[str, str]:
    """Splits one of this package's messages into what happened and what to do."""
    sentence = str(error).removeprefix(PREFIX).removeprefix(STATES_PREFIX)
    value, mark, advice = sentence.rpartition("; ")
    return (value, advice) if mark else (advice, "see megatron-offload doctor --help")


def _wrap(text: str, width: int, indent: str, mark: str = "") -> str:
    """Never breaks a flag or a path, so that they can be copied."""
    return textwrap.fill(
        text,
        max(width, len(indent) + 30),
        initial_indent=indent + mark,
        subsequent_indent=indent + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
