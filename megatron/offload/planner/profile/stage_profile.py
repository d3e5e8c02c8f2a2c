# SPDX-License-Identifier: Apache-2.0
"""What a planner knows of one pipeline stage: `StageProfile`.

Measured in the first steps of a run, or projected from descriptions of a model and of hardware; the
solver and the simulator treat both alike. Written and read as JSON. Bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from megatron.offload.config import DEFAULT_INFLIGHT_BYTES
from megatron.offload.documents import in_file, reading
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition

FORMAT_VERSION = 2

HandsOver = Literal["layer", "operation"]
UNBOUNDED = 1_000_000  # more layers than a stage has: the host's lead is not bounded by layers


@dataclass(frozen=True)
class PartProfile:
    """Activations of one part of a layer, which get one placement. For one micro-batch.

    Attributes:
        name: `attention`, `mlp`, or `layer` where a layer is not divided.
        movable_bytes: in storages that a tier can take.
        resident_bytes: in storages that always stay, such as those that are too small.
        num_storages: how many hold the movable bytes.
        produced_s: when the last of them is there, after the layer's forward began.
        first_use_s: when backward first needs one, after the layer's backward began.
        recompute_s: forward seconds to produce them again; None: not possible for it alone.
        input_bytes: of the bytes above, those that it starts from when it is recomputed alone.
        movable_input_bytes: of those, what may wait on a tier until then.
        selective_bytes: of the movable ones, those that its selective operations produce again, see
            `integration/megatron/selective_recompute.py`; the rest stays or moves.
        selective_s: forward seconds for that; None: not possible.
        selective_extra_bytes: that this takes in backward beyond what it produces.
        replayed_bytes: that it saves and that are neither kept nor moved, but computed again from
            the others when backward needs them, or decoded. All of them are there where it is
            recomputed, or kept without replay.
        replay_s: seconds in backward for that, unless it is recomputed or kept without replay.
        replay_extra_bytes: of them, those that are in memory at a time.
        only_for_replay_bytes: of the movable and the resident ones, those that are saved only so
            that others can be computed again.
        codec_spared_bytes: by how many a codec makes the movable ones fewer.
        codec_s: of `replay_s`, to encode and to decode: the former in forward, counted here.
        exact_extra_bytes: `replay_extra_bytes` where nothing is encoded.
        exact_selective_bytes: `selective_bytes` where nothing is.
    """

    name: str
    movable_bytes: int
    resident_bytes: int
    num_storages: int
    produced_s: float
    first_use_s: float
    recompute_s: float | None = None
    input_bytes: int = 0
    selective_bytes: int = 0
    selective_s: float | None = None
    selective_extra_bytes: int = 0
    movable_input_bytes: int = 0
    replayed_bytes: int = 0
    replay_s: float = 0.0
    replay_extra_bytes: int = 0
    only_for_replay_bytes: int = 0
    codec_spared_bytes: int = 0
    codec_s: float = 0.0
    exact_extra_bytes: int = 0
    exact_selective_bytes: int = 0

    @property
    def spared_bytes(self) -> int:
        """By which replay makes fewer what forward saves."""
        return self.replayed_bytes - self.only_for_replay_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes that forward saves without replay, and that are there while it is recomputed."""
        return self.movable_bytes + self.resident_bytes + self.spared_bytes

    @property
    def exact_bytes(self) -> int:
        """Bytes that forward saves with replay and without a codec."""
        return self.movable_bytes + self.resident_bytes + self.codec_spared_bytes


@dataclass(frozen=True)
class LayerProfile:
    """One layer of one model chunk, the average of its micro-batches.

    Attributes:
        chunk: model chunk of this stage, 0 without virtual pipelining.
        name: e.g. `decoder.7`, see `Scope.layer`.
        forward_s: its forward pass.
        backward_s: its backward pass, without recomputation, replays and waits.
        recompute_s: its forward again in backward; None: it cannot be recomputed.
        input_bytes: what it starts from when it is recomputed as a whole.
        parts: in the order of the forward pass.
        movable_input_bytes: of the input's, what may wait on a tier until it is recomputed.
    """

    chunk: int
    name: str
    forward_s: float
    backward_s: float
    recompute_s: float | None
    input_bytes: int
    parts: tuple[PartProfile, ...]
    movable_input_bytes: int = 0

    @property
    def movable_bytes(self) -> int:
        """Bytes of all parts of the layer that a tier can take."""
        return sum(part.movable_bytes for part in self.parts)

    @property
    def replayed_bytes(self) -> int:
        """Bytes of all parts of the layer that are computed again."""
        return sum(part.replayed_bytes for part in self.parts)

    @property
    def replay_s(self) -> float:
        """Seconds of backward for that."""
        return sum(part.replay_s for part in self.parts)


@dataclass(frozen=True)
class TierProfile:
    """One tier, as fast as it is while the stage trains.

    Attributes:
        name: the placement that goes there, `host` or `ssd`.
        write_bytes_per_s: with nothing else under way.
        read_bytes_per_s: likewise.
        shared_bytes_per_s: reads and writes together while both are under way; None: neither slows
            the other.
        latency_s: of a transfer, whatever its size.
        capacity_bytes: None: more than can be needed.
    """

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    shared_bytes_per_s: float | None = None
    latency_s: float = 0.0
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class StageProfile:
    """One rank's view of a training step.

    Attributes:
        position: this stage's place in the pipeline.
        num_micro_batches: in a step.
        layers: by chunk, then in the order of the forward pass.
        tiers: that activations may go to.
        before_s: seconds of a forward pass before each chunk's first layer (embedding), by chunk.
        after_s: and after its last (head and loss).
        backward_before_s: the same parts in backward: the head and loss, by chunk.
        backward_after_s: the embedding.
        step_fixed_s: outside of forward and backward passes: optimizer, gradient reduction.
        pass_fixed_bytes: activations of a micro-batch outside of layers, by chunk.
        passed_on_bytes: of a micro-batch, that a chunk hands to the next one and that wait for it
            in memory; in backward as many of their gradient. By chunk; empty: nothing waits.
        transient_bytes: most working memory of the step beyond saved activations (gradients of
            activations).
        head_bytes: more working memory, of what runs behind the last layer of the model: logits.
        allocator_slack: what saved activations take beyond their own bytes, as a part of these.
        inflight_bytes: most bytes on their way out at a time; forward waits beyond it.
        lead_layers: most layers that the host may have begun to launch in forward and the device
            has not begun to compute. 0: the host computes (a CPU). `UNBOUNDED`: nothing but
            `inflight_bytes` bounds it, as on an accelerator under a plan that says nothing of it.
        hands_over: when forward hands over what is to leave: at the end of the `layer` that saved
            it, or of the `operation`.
        sizes: what the measurements depend on: micro-batch size, sequence length; in layer-major
            steps the number of micro-batches too.
        source: where they come from, for people.
    """

    position: PipelinePosition
    num_micro_batches: int
    layers: tuple[LayerProfile, ...]
    tiers: tuple[TierProfile, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    backward_before_s: tuple[float, ...]
    backward_after_s: tuple[float, ...]
    step_fixed_s: float = 0.0
    pass_fixed_bytes: tuple[int, ...] = (0,)
    passed_on_bytes: tuple[int, ...] = ()
    transient_bytes: int = 0
    head_bytes: int = 0
    allocator_slack: float = 0.0
    inflight_bytes: int = DEFAULT_INFLIGHT_BYTES
    lead_layers: int = 0
    hands_over: HandsOver = "layer"
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        chunks = self.position.num_chunks
        for name in (*_BY_CHUNK, *(["passed_on_bytes"] if self.passed_on_bytes else [])):
            if len(getattr(self, name)) != chunks:
                raise ConfigurationError(
                    f"the profile's {name} has {len(getattr(self, name))} entries; "
                    f"expected one for each of {chunks} model chunks; measure it again"
                )
        if [layer.chunk for layer in self.layers] != sorted(
            layer.chunk for layer in self.layers if 0 <= layer.chunk < chunks
        ):
            raise ConfigurationError(
                f"the profile's layers are not in the order of its {chunks} model chunks; "
                "measure it again"
            )
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names) or not set(names) <= {"host", "ssd"}:
            raise ConfigurationError(
                f"the profile has tiers {names}; expected host and ssd, each once at most; "
                "measure it again"
            )
        at = self.position
        if not 0 <= at.stage < at.num_stages <= _MOST_STAGES:
            raise ConfigurationError(
                f"the profile is of pipeline stage {at.stage} of {at.num_stages}; expected a "
                f"stage from 0 up of at most {_MOST_STAGES}; measure it again"
            )
        work = max(len(self.layers), at.num_stages * chunks) * self.num_micro_batches
        if work > _MOST_WORK:
            raise ConfigurationError(
                f"the profile has {len(self.layers)} layers, {at.num_stages} stages and "
                f"{self.num_micro_batches} micro-batches; at most {_MOST_WORK} passes of layers "
                f"can be planned, got {work}; divide the model or the batch among more ranks"
            )
        for field in dataclasses.fields(self):
            with_numbers(_check_number, getattr(self, field.name), name=field.name)

    def to_json(self) -> str:
        """Writes the profile as JSON text that `from_json` reads."""
        return json.dumps({"version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StageProfile:
        """The profile in a file's text.

        Raises:
            ConfigurationError: it is none, or one of another format version.
        """
        with reading("this is no profile of a stage", "give one that a run has written"):
            version = msgspec.json.decode(text, type=_Head).version
            if version != FORMAT_VERSION:
                raise ConfigurationError(
                    f"the profile has format {version}, this release reads {FORMAT_VERSION}; "
                    "measure it again"
                )
            try:
                return msgspec.json.decode(text, type=cls)
            except msgspec.MsgspecError as error:
                if isinstance(error.__cause__, ConfigurationError):  # of `__post_init__`
                    raise error.__cause__ from None
                raise

    @classmethod
    def load(cls, path: Path) -> StageProfile:
        """The profile in a file. Raises ConfigurationError, OSError."""
        with reading(f"{path} is no profile of a stage", "give one that a run has written"):
            text = path.read_text(encoding="utf-8")
        with in_file(str(path)):
            return cls.from_json(text)


def tokens_of(sizes: Mapping[str, int]) -> int:
    """Tokens that are in memory at a time with a profile's `sizes`; 0: not known.

    A micro-batch's; in layer-major steps, where `micro_batches` is among the sizes, those of all.
    """
    of_one = sizes.get("sequence_length", 0) * sizes.get("micro_batch_size", 0)
    return of_one * sizes.get("micro_batches", 1)


@dataclass(frozen=True)
class _Head:
    """What a profile's file of any format has."""

    version: int


_BY_CHUNK = ("before_s", "after_s", "backward_before_s", "backward_after_s", "pass_fixed_bytes")
_ABOVE_ZERO = ("bytes_per_s", "num_micro_batches", "num_stages", "num_chunks")


# Beyond these a simulation has no end, or its sums are wrong.
_MOST_WORK = 4_000_000  # layers, or chunks of all stages, times micro-batches
_MOST_STAGES = 10_000
_MOST = {"bytes": 2.0**50, "s": 1e9}  # of what names end with; of all other numbers:
_MOST_OF_OTHERS = 1e18


def _check_number(name: str, number: float) -> float:
    most = _MOST.get(name.rpartition("_")[2], _MOST_OF_OTHERS)
    if name.endswith(("_per_s", "capacity_bytes")):
        most = _MOST_OF_OTHERS
    if number > most:
        raise ConfigurationError(
            f"the profile has {name} = {number:.4g}; the largest value that can be planned with is "
            f"{most:.4g}; measure it again, or give a smaller model"
        )
    if not math.isfinite(number) or number < 0 or (number == 0 and name.endswith(_ABOVE_ZERO)):
        raise ConfigurationError(
            f"the profile has {name} = {number}; expected a finite number from zero up, and above "
            "zero for bandwidths and counts; measure it again"
        )
    return number
