# SPDX-License-Identifier: Apache-2.0
"""What a training is to fit into: `Memory`, by the name of a GPU or from a person's own JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.offload.documents import check_finite, from_json, reading
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.planner.projection.hardware import GpuSpec, names
from megatron.offload.sizes import GIB, parse_positive_size

CPU = "cpu"
# Of a GPU's memory what no tensor gets: the context, libraries' workspaces, fragments.
RESERVED_BYTES = GIB
_ADVICE = 'write for example {"title": "my card", "memory_bytes": "24GB"}'


@dataclass(frozen=True)
class Memory:
    """Device memory of one GPU, or of a machine whose CPU trains.

    Attributes:
        title: for people.
        device_bytes: all of it.
        reserved_bytes: of that, what is not for tensors.
        on_cpu: a CPU computes.
    """

    title: str
    device_bytes: int
    reserved_bytes: int = RESERVED_BYTES
    on_cpu: bool = False

    @classmethod
    def of(cls, name: str) -> Memory:
        """Described hardware, `cpu` for this machine, or a JSON file.

        Raises:
            ConfigurationError: there is none of this name, or the file says no size.
        """
        if name == CPU:
            return cls("this machine's CPU", memory_limit().total_bytes, 0, on_cpu=True)
        if name in names("gpus"):
            found = GpuSpec.load(name)
            return cls(found.title, int(found.memory_bytes))
        path = Path(name)
        if path.suffix != ".json":
            raise ConfigurationError(
                f"--hardware {name} is neither a GPU that is described nor a .json file; choose "
                f"one of {', '.join(names('gpus'))}, {CPU}, or give a file of your own"
            )
        if not path.is_file():
            raise ConfigurationError(f"--hardware {name}: there is no such file; {_ADVICE}")
        with reading(f"{path} describes no hardware", _ADVICE):
            return cls._from_values(path, from_json(path.read_bytes()))

    @classmethod
    def _from_values(cls, path: Path, values: Any) -> Memory:
        check_finite(values)
        size = values["memory_bytes"]
        num_bytes = parse_positive_size(int(size) if isinstance(size, float) else size)
        return cls(str(values.get("title", path.stem)), num_bytes)

    def fits(self, num_bytes: float) -> bool:
        """Whether tensors of so many bytes have room."""
        return num_bytes <= self.device_bytes - self.reserved_bytes
