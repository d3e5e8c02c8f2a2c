# SPDX-License-Identifier: Apache-2.0
"""What device memory is made of within a step, by name: `StepMemory`, as it is kept in a file.

The sampler finds it out, a report writes and reads it, and the planner's simulation explains its
predicted peak by the same names. Measures nothing. Bytes and seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from megatron.offload.activations.saved.scope import Scope, layer_of
from megatron.offload.documents import each_line
from megatron.offload.errors import ConfigurationError

FORMAT_VERSION = 1

# What saved activations do at a moment.
KEPT = "kept by layers"
OUTSIDE = "kept outside of layers"  # embedding, logits, loss
WRITING = "being written"
HELD = "written, still held"  # by another reference: moving it has freed nothing yet
AHEAD = "read ahead"
USED = "in use by backward"
RECOMPUTED = "recomputed"
REPLAYED = "replayed"  # computed again from others that are saved
# What operations work in, gradients of activations, and what an allocator keeps or wastes.
REST = "not saved"
# Of a peak only: what came and went between two samples.
BETWEEN = "between two samples"

PARTS = (
    KEPT,
    OUTSIDE,
    HELD,
    WRITING,
    AHEAD,
    USED,
    RECOMPUTED,
    REPLAYED,
    REST,
)  # as they are stacked

OUTSIDE_OF_LAYERS = "outside of layers"  # in place of a layer


@dataclass(frozen=True)
class Moment:
    """Device memory at a moment of a step, above what there was when the step began.

    Attributes:
        time_s: since the step began.
        phase: `forward`, `backward`, or empty between passes.
        where: the layer that the step has come to.
        parts: bytes by the names above; all of memory together.
        layers: bytes of saved activations by layer; given of a step's peak only.
    """

    time_s: float
    phase: str
    where: str
    parts: Mapping[str, int]
    layers: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step of one rank.

    Attributes:
        rank: global rank.
        step: its number, from 1.
        peak_bytes: the most above the step's beginning, also between samples.
        reusable_bytes: that the allocator held for reuse at the peak, beside these; None: unknown.
        reserved_bytes: that it held in all then, and what was there before the step; None: unknown.
        peak: the largest sample.
        moments: all samples, in order.
        plan, profile: that the step followed, as JSON; empty without `auto`.
        replayed_bytes: saved in storages that are computed again; 0 without replay.
        unreplayed: of the other storages, by the operation that made them.
    """

    rank: int
    step: int
    peak_bytes: int
    reusable_bytes: int | None
    peak: Moment
    moments: tuple[Moment, ...]
    plan: str = ""
    profile: str = ""
    reserved_bytes: int | None = None
    replayed_bytes: int = 0
    unreplayed: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_parts(self) -> dict[str, int]:
        """What the peak is made of; together `peak_bytes`."""
        return {**self.peak.parts, BETWEEN: self.peak_bytes - self.peak.num_bytes}

    def to_json(self) -> str:
        """One line that `load_steps` reads."""
        return json.dumps({"version": FORMAT_VERSION, **asdict(self)})


@dataclass(frozen=True)
class PredictedPeak:
    """Device memory at the peak of a simulated step, in bytes.

    Attributes:
        parts: by the names above; together the predicted peak.
        layers: of saved activations, by layer.
    """

    parts: Mapping[str, int]
    layers: Mapping[str, int]


def load_steps(path: Path) -> list[StepMemory]:
    """The steps in a file of `--activation-memory-report`.

    Raises:
        ConfigurationError: it is none, or is of another format version.
        OSError: it cannot be read.
    """

    def read(line: bytes) -> StepMemory:
        version = msgspec.json.decode(line, type=_Head).version
        if version != FORMAT_VERSION:
            raise ConfigurationError(
                f"the memory report {path} has format {version}, this release reads "
                f"{FORMAT_VERSION}; run the training again"
            )
        return msgspec.json.decode(line, type=StepMemory)

    advice = "give a file that --activation-memory-report has written"
    return each_line(path, "a memory report", advice, read)


def name_of(scope: Scope) -> str:
    """Whose activations these are: `decoder.7 mlp`."""
    return f"{scope.layer} {scope.part}".strip() or OUTSIDE_OF_LAYERS


def layer_and_part(name: str) -> tuple[str, str]:
    """A layer and its part, of a name that `name_of` has given; the part may be empty."""
    if name == OUTSIDE_OF_LAYERS:
        return name, ""
    layer, _, part = name.partition(" ")
    return layer, part


def part_of(scope: Scope) -> str:
    """The name, of those above, of what a scope saved and keeps."""
    return KEPT if layer_of(scope.layer) else OUTSIDE


@dataclass(frozen=True)
class _Head:
    """What a line of any format has."""

    version: int
