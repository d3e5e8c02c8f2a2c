# SPDX-License-Identifier: Apache-2.0
"""All results of a day, as a file: `Day`. Written anew after each job, read by `--earlier`.

gpu_day.py fills it; `tables.py` and `pictures.py` read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from check.gpu_day.job import NOT_BEGUN, OK, Result
from megatron.offload.activations.placement.atomic_file import write_atomically


@dataclass
class Day:
    """Results by the name of the job, in the order in which they came.

    Attributes:
        command: as it was given.
        is_dry: sizes prove nothing.
        device: its name. Figures of different ones are never side by side.
        machine: what all of it is, in a line.
        note: of how jobs were started.
        results: of each job.
    """

    command: str
    is_dry: bool
    device: str = ""
    machine: str = ""
    note: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    def of(self, part: str) -> dict[str, Result]:
        """The results of a part that went well, by what stands behind the part's name."""
        return {
            name.partition("/")[2]: result
            for name, result in self.results.items()
            if name.partition("/")[0] == part and result.status == OK
        }

    @property
    def is_good(self) -> bool:
        """Whether all that ran went well; what has not begun does not count."""
        return not any(result.is_bad for result in self.results.values())

    def take_in(self, earlier: Day) -> None:
        """Takes what another call has found and this one has not.

        Raises:
            ValueError: it is of another device or of other sizes.
        """
        if (earlier.device, earlier.is_dry) != (self.device, self.is_dry):
            theirs, ours = (f"{d.device}{' (dry)' if d.is_dry else ''}" for d in (earlier, self))
            raise ValueError(f"its results are of {theirs} and these of {ours}; leave it out")
        for name, result in earlier.results.items():
            if name not in self.results or self.results[name].status == NOT_BEGUN:
                self.results[name] = result

    def save(self, path: Path, root: Path) -> None:
        """Writes everything, without the name of this checkout's folder."""
        values = {**asdict(self), "passed": self.is_good}
        write_atomically(path, json.dumps(values, indent=1, default=str).replace(f"{root}/", ""))

    @classmethod
    def load(cls, path: Path) -> Day:
        """What `save` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is something else.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            results = {name: Result(**result) for name, result in values.pop("results").items()}
            values.pop("passed")
            return cls(**values, results=results)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no results.json of gpu_day.py: {error}") from None
