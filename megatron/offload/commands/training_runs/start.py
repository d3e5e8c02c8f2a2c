# SPDX-License-Identifier: Apache-2.0
"""How a training script is started on this machine: `Start`. A `Trainer` has one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LAUNCHER = "megatron.offload.launch"


@dataclass(frozen=True)
class Start:
    """Processes of one machine, with this Python.

    Attributes:
        processes: more than 1: torchrun starts them.
        module: runs the script: the launcher for those of Megatron-LM; None: Python does.
        expects_rank: the script reads its rank from the environment, also where it is alone.
        variables: of its environment.
    """

    processes: int = 1
    module: str | None = None
    expects_rank: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, script: Path, arguments: Sequence[str]) -> list[str]:
        """The words that start it."""
        words = [*(["-m", self.module] if self.module else []), str(script), *arguments]
        if self.processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            words = [*torchrun, f"--nproc-per-node={self.processes}", *words]
        return [sys.executable, *words]

    def environment(self) -> dict[str, str]:
        """The variables that it needs; where it is alone, what torchrun would set."""
        if self.processes > 1 or not (self.expects_rank or self.module):
            return dict(self.variables)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return {**alone, **self.variables}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
