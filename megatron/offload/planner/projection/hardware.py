# SPDX-License-Identifier: Apache-2.0
"""What a GPU and its drives can do, by data sheet: `GpuSpec`, `DriveSpec`, `Hardware`.

Read from `gpus.json` and `drives.json` beside this file, where each figure has its source and each
assumption its reason. Never looks at the machine it runs on.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import TierProfile

_HERE = Path(__file__).parent
DEFAULT_DRIVE = "9550-max"


@dataclass(frozen=True)
class Fractions:
    """How much of a data sheet's figure training reaches; each is an assumption."""

    matmul: float
    attention: float
    memory: float
    nvlink: float
    host_link: float


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. Rates per second; links in one direction.

    Attributes:
        flops: dense, by name of the element type.
    """

    name: str
    title: str
    flops: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    host_link: str
    host_link_bytes_per_s: float
    assumed: Fractions
    source: str
    assumed_from: str

    @classmethod
    def load(cls, name: str) -> GpuSpec:
        """A described GPU. Raises ConfigurationError: there is none of this name."""
        values = _find("gpus", "GPU", name)
        values["assumed"] = Fractions(**values["assumed"])
        return cls(name=name, **values)

    @classmethod
    def of_device(cls, name: str, memory_bytes: int) -> GpuSpec | None:
        """The description of a device, by the name that its driver gives it; None: there is none.

        Args:
            name: e.g. `NVIDIA H100 80GB HBM3`.
            memory_bytes: of it; of several that fit the nearest is taken.
        """
        words = name.lower().replace("-", " ").split()
        fitting = [cls.load(one) for one in names("gpus") if _model_words(one) <= set(words)]
        return min(fitting, key=lambda one: abs(one.memory_bytes - memory_bytes), default=None)

    def reaching(self, fraction: float) -> GpuSpec:
        """A copy that reaches another part of its peak in matrix products, e.g. a measured one."""
        if not 0 < fraction <= 1:
            raise ConfigurationError(
                f"matrix products cannot reach {fraction} of a GPU's peak; give a part above 0 "
                "and at most 1"
            )
        return dataclasses.replace(self, assumed=dataclasses.replace(self.assumed, matmul=fraction))

    def peak_flops(self, dtype: str) -> float:
        """Raises ConfigurationError: it does not compute in this type."""
        if dtype not in self.flops:
            raise ConfigurationError(
                f"{self.title} is not described for {dtype}; choose one of {', '.join(self.flops)}"
            )
        return self.flops[dtype]


@dataclass(frozen=True)
class DriveSpec:
    """One SSD. `rated_bytes` is what it is rated to be written in its life (TBW)."""

    name: str
    title: str
    capacity_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    rated_bytes: float
    source: str
    assumed_fraction: float

    @classmethod
    def load(cls, name: str) -> DriveSpec:
        """A described drive. Raises ConfigurationError: there is none of this name."""
        fraction = _read("drives")["assumed_fraction"]
        return cls(name=name, assumed_fraction=fraction, **_find("drives", "SSD", name))


@dataclass(frozen=True)
class Hardware:
    """What one rank computes on and may write to.

    Attributes:
        gpu: one of them.
        drive: the model of its SSDs.
        num_drives: for each GPU; not whole where GPUs share drives.
        host_bytes: of host memory for each GPU; 0: none.
    """

    gpu: GpuSpec
    drive: DriveSpec
    num_drives: float = 1
    host_bytes: int = 0

    @property
    def link_bytes_per_s(self) -> float:
        """Between GPU and host, in one direction, as far as it is reached."""
        return self.gpu.host_link_bytes_per_s * self.gpu.assumed.host_link

    @property
    def rated_bytes(self) -> float:
        """Bytes that may be written to all drives of one GPU in their life."""
        return self.num_drives * self.drive.rated_bytes

    def tiers(self) -> tuple[TierProfile, ...]:
        """The drives together, and host memory. None is faster than the link to the GPU.

        A drive that reads and writes at once moves no more than when it only reads (an
        assumption); a link carries both directions at once. Neither shows that host memory and
        drives share the link.
        """
        link = self.link_bytes_per_s
        tiers = []
        if self.host_bytes:
            tiers.append(TierProfile("host", link, link, None, 1e-5, self.host_bytes))
        if self.num_drives:
            together = self.num_drives * self.drive.assumed_fraction
            read = min(link, together * self.drive.read_bytes_per_s)
            tiers.append(
                TierProfile(
                    name="ssd",
                    write_bytes_per_s=min(link, together * self.drive.write_bytes_per_s),
                    read_bytes_per_s=read,
                    shared_bytes_per_s=min(2 * link, together * self.drive.read_bytes_per_s),
                    latency_s=1e-4,
                    capacity_bytes=int(self.num_drives * self.drive.capacity_bytes),
                )
            )
        return tuple(tiers)

    def tier(self, name: str) -> TierProfile:
        """For states and parameters, which may be in host memory where no activations are.

        Raises:
            ConfigurationError: there are no drives.
        """
        if name == "host":
            return TierProfile("host", self.link_bytes_per_s, self.link_bytes_per_s)
        for one in self.tiers():
            if one.name == name:
                return one
        raise ConfigurationError(
            "what is offloaded to ssd needs drives, and --ssds is 0; give a number of drives"
        )


def _model_words(name: str) -> set[str]:
    """What a driver's name of the GPU has of ours: all but the size of its memory."""
    return {word for word in name.split("-") if not word.endswith("gb")}


def names(kind: str) -> list[str]:
    """Names of the described hardware; `kind` is `gpus` or `drives`."""
    return sorted(_read(kind)[kind])


def _read(kind: str) -> dict[str, Any]:
    return dict(json.loads((_HERE / f"{kind}.json").read_text()))


def _find(kind: str, noun: str, name: str) -> dict[str, Any]:
    described = _read(kind)[kind]
    if name not in described:
        raise ConfigurationError(
            f"no {noun} is called {name!r}; choose one of {', '.join(sorted(described))}"
        )
    return dict(described[name])
