# SPDX-License-Identifier: Apache-2.0
"""How long the drives last at a run's pace: `Endurance`.

A drive is rated for so many bytes written (TBW, on its data sheet). With w bytes written in t
seconds, a drive rated for E bytes lasts E t / w; SSDTrain (arXiv 2408.10013) gives the formula per
step. Some drives are said to last longer when data need not be retained; that is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.offload.sizes import format_size

YEAR_S = 365.25 * 24 * 3600
WARNING_YEARS = 1.0
_SETTLED_S = 60.0  # a projection from less than a minute says little
_SETTLED_STEPS = 10


class Endurance:
    """Bytes written to each drive, and what that means for its life.

    Args:
        rated_bytes: of each drive; None: not known, bytes are still counted.
        num_local_ranks: processes on this machine; each writes as much as this one.
    """

    def __init__(self, rated_bytes: int | None, num_local_ranks: int = 1) -> None:
        self._rated_bytes = rated_bytes
        self._num_local_ranks = num_local_ranks
        self._written: dict[str, int] = {}  # by all local ranks, by directory
        self._seconds = 0.0
        self._num_steps = 0
        self._warned = False

    def add_step(self, written_bytes: Mapping[str, int], seconds: float) -> None:
        """Counts a finished step: bytes that this rank wrote to each directory, and its wall time.

        Time between steps counts too: the drive is not written to then.
        """
        for directory, num_bytes in written_bytes.items():
            self._written.setdefault(directory, 0)
            self._written[directory] += num_bytes * self._num_local_ranks
        self._seconds += seconds
        self._num_steps += 1

    def life_years(self, directory: str) -> float | None:
        """Years until the drive has taken its rated bytes; None if that cannot be said."""
        written = self._written.get(directory, 0)
        if self._rated_bytes is None or not written:
            return None
        return self._rated_bytes * self._seconds / written / YEAR_S

    def warning(self) -> str | None:
        """A sentence if a drive lasts less than a year at this pace, said once; None otherwise."""
        if self._warned or self._num_steps < _SETTLED_STEPS or self._seconds < _SETTLED_S:
            return None
        lives = {d: years for d in self._written if (years := self.life_years(d)) is not None}
        if not lives:
            return None
        directory = min(lives, key=lambda name: lives[name])
        if lives[directory] >= WARNING_YEARS:
            return None
        self._warned = True
        return (
            f"activation offload: at this pace the drive of {directory} reaches its rated "
            f"{format_size(self._rated_bytes or 0)} written after "
            f"{format_span(lives[directory])} of training; bound the rate with "
            "--activation-offload-write-limit, raise --activation-offload-min-bytes, "
            "or use drives rated for more"
        )

    def lines(self) -> list[str]:
        """Lines for the summary at the end, one for each drive."""
        shared = " (all ranks of the machine)" if self._num_local_ranks > 1 else ""
        lines = []
        for directory, written in self._written.items():
            years = self.life_years(directory)
            life = "" if years is None else f"; lasts {format_span(years)} of training at this pace"
            lines.append(
                f"{format_size(written)} in this run{shared} to the drive of {directory}, "
                f"{format_size(written / max(self._seconds, 1e-9))}/s on average{life}"
            )
        return lines


def format_span(years: float) -> str:
    """Writes a time for people: `3.2 years`, `14 days`, `5.0 hours`."""
    if years >= 1:
        return f"{years:.1f} years" if years < 100 else f"{years:.0f} years"
    days = years * 365.25
    return f"{days:.0f} days" if days >= 2 else f"{days * 24:.1f} hours"
