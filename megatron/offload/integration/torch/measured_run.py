# SPDX-License-Identifier: Apache-2.0
"""What a command asks of a script that uses the door: `MeasuredRun`.

The commands `rok`, `longest`, `report` and `doctor` start scripts with `--script`; an environment
variable tells the door in the script's process which of its settings to replace.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

import msgspec

from megatron.offload.config import OffloadConfig
from megatron.offload.documents import from_json, reading

_VARIABLE = "MEGATRON_OFFLOAD_RUN"

# These settings of the script hold in all runs; the others are what the runs compare.
_KEPT = (
    *("directories", "min_bytes", "threads", "inflight_bytes", "ssd_budget_bytes", "host_budget"),
    *("io", "write_bytes_per_s", "verify"),
)


@dataclass(frozen=True)
class MeasuredRun:
    """How a run of a script differs from what the script says.

    Attributes:
        flags: offload flags that hold instead of the script's settings; None: those hold.
        metrics_file: gets a line for each step.
        run_directory: gets the profile that `auto` measures.
        in_turns: each step waits for a line on the standard input.
        flags_file: gets the script's settings as flags, one a line; the script then ends.
    """

    flags: tuple[str, ...] | None = None
    metrics_file: str | None = None
    run_directory: str | None = None
    in_turns: bool = False
    flags_file: str | None = None

    @classmethod
    def of_environment(cls) -> MeasuredRun | None:
        """The one that this process was started for; None: it is not measured.

        Raises:
            ConfigurationError: the variable is something else.
        """
        text = os.environ.get(_VARIABLE)
        if not text:
            return None
        with reading(
            f"the environment variable {_VARIABLE} is not what a command of megatron-offload sets",
            "unset it",
        ):
            return msgspec.convert(from_json(text), cls)

    def environment(self) -> dict[str, str]:
        """The variables that a script is started with."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}

    def config(self, own: OffloadConfig) -> OffloadConfig:
        """The config of this run.

        Args:
            own: what the script asks for.

        Raises:
            ConfigurationError: the two contradict each other.
        """
        if self.flags is None:
            return own
        kept = OffloadConfig.flags_of({name: getattr(own, name) for name in _KEPT})
        return OffloadConfig.from_flags([*kept, *self.flags])
