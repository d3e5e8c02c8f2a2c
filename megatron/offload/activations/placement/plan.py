# SPDX-License-Identifier: Apache-2.0
"""A decision: which placement each part of each layer of a stage gets, and why: `Plan`.

The solver makes it, a policy follows it, a file keeps it (`plan_file.py`), a person reads it as a
table (`plan_table.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from megatron.offload.activations.placement.policy import SELECTIVE, WHOLE_LAYER, Placement
from megatron.offload.activations.saved.scope import layer_of
from megatron.offload.errors import ConfigurationError

_PARTS = ("attention", "mlp")
_ALL_PARTS = (*_PARTS, WHOLE_LAYER, *(part + SELECTIVE for part in _PARTS))


@dataclass(frozen=True)
class Prediction:
    """What a plan should cost and need. Seconds and bytes of one step of one stage.

    Attributes:
        step_s: a step, from its first forward pass to the optimizer's end.
        stall_s: of it, computing waited for reads or for room to write.
        recompute_s: of it, forward passes repeated in backward.
        peak_bytes: most bytes of activations in device memory at a time.
        written_bytes: to all tiers together; read_bytes: from them.
    """

    step_s: float
    stall_s: float
    recompute_s: float
    peak_bytes: int
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class PlannedPart:
    """One line of a plan: what becomes of a part of a layer.

    Attributes:
        chunk: model chunk of the stage.
        layer: e.g. `decoder.7`.
        part: `attention`, `mlp` or `layer`. A recomputed layer has one line, `layer`. Besides them
            `attention-selective` and `mlp-selective` where norms, the activation function and the
            like are recomputed and what else the part saves is not.
        placement: `KEEP`, `RECOMPUTE`, `HOST` or `SSD`.
        movable_bytes: of one micro-batch that it decides about.
        reason: for people, a few words.
        input: with `RECOMPUTE`, where what the recomputation starts from waits: `KEEP` or a tier.
        replays: in a run with replay or a codec, what can be computed again from others is not
            kept, and the rest in few bits. False: all of it is kept as it is, with `KEEP`.
        encodes: in a run with a codec, the rest is kept or moved in few bits. False: it is as it
            is, with `KEEP` or a tier.
    """

    chunk: int
    layer: str
    part: str
    placement: Placement
    movable_bytes: int
    reason: str = ""
    input: Placement = Placement.KEEP
    replays: bool = True
    encodes: bool = True

    @property
    def key(self) -> tuple[int, str, str]:
        """Chunk, layer and part."""
        return self.chunk, self.layer, self.part


@dataclass(frozen=True)
class Plan:
    """Where each part of a stage's activations goes, and what that should cost.

    Attributes:
        parts: by chunk, layer and part, in the order of the forward pass.
        goal: what was asked for, for people: `at most 12 GiB`, `at most 2 % slower`.
        predicted: of this plan. `fastest`: of keeping everything, whatever it needs.
        lead_layers: most layers that forward may be launched ahead of a device that runs behind its
            host, see `transfer/lead.py`; None: no bound but that of the bytes on their way out.
    """

    parts: tuple[PlannedPart, ...]
    goal: str = ""
    predicted: Prediction | None = None
    fastest: Prediction | None = None
    stage: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)
    lead_layers: int | None = None

    @property
    def placements(self) -> dict[tuple[int, str, str], Placement]:
        """Placements by chunk, layer and part."""
        return {one.key: one.placement for one in self.parts}

    @property
    def inputs(self) -> dict[tuple[int, str, str], Placement]:
        """By the same, where inputs of recomputations wait; not in it: in device memory."""
        return {one.key: one.input for one in self.parts if one.input is not Placement.KEEP}

    @property
    def unreplayed(self) -> frozenset[tuple[int, str, str]]:
        """By the same, parts that keep what could be replayed."""
        return frozenset(one.key for one in self.parts if not one.replays)

    @property
    def unencoded(self) -> frozenset[tuple[int, str, str]]:
        """By the same, parts that a codec leaves as they are."""
        return frozenset(one.key for one in self.parts if not one.encodes)

    def digest(self) -> int:
        """A number below 2^48 that plans share if they place alike, and otherwise almost never.

        Ranks compare it as a double, which holds it exactly.
        """
        lines = [
            f"{key}{placement.value}"
            for placed in (self.placements, self.inputs)
            for key, placement in sorted(placed.items())
        ]
        lines += [f"{key} not replayed" for key in sorted(self.unreplayed)]
        lines += [f"{key} not encoded" for key in sorted(self.unencoded)]
        if self.lead_layers is not None:
            lines.append(f"lead {self.lead_layers}")
        return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6], "big")

    def check(self, layers: Iterable[tuple[int, str]], tiers: Collection[Placement]) -> None:
        """Whether a stage can follow it.

        Args:
            layers: chunk and name of each layer of the stage. What runs between them may be
                planned or not.
            tiers: placements that there is a tier for.

        Raises:
            ConfigurationError: other layers, unknown parts, or tiers that are not there.
        """
        planned = {(one.chunk, layer) for one in self.parts if (layer := layer_of(one.layer))}
        there = set(layers)
        for chunk, layer in sorted(planned ^ there):
            has, lacks = ("plan", "model") if (chunk, layer) in planned else ("model", "plan")
            raise ConfigurationError(
                f"the plan does not fit stage {self.stage} of the model: the {has} has layer "
                f"{layer} in chunk {chunk} and the {lacks} has not; plan again for this model"
            )
        if self.lead_layers is not None and self.lead_layers < 1:
            raise ConfigurationError(
                f"the plan has lead_layers {self.lead_layers}; expected a number of layers from 1 "
                "up, or null where forward may be launched as far ahead as it comes; correct it"
            )
        for one in self.parts:
            if one.part not in _ALL_PARTS:
                raise ConfigurationError(
                    f"the plan has a part {one.part!r} of {one.layer}; expected one of "
                    f"{', '.join(_ALL_PARTS)}; correct it or plan again"
                )
            if one.part.endswith(SELECTIVE) and one.placement is not Placement.RECOMPUTE:
                raise ConfigurationError(
                    f"the plan has {one.part} of {one.layer} as {one.placement.value}; expected "
                    f"{Placement.RECOMPUTE.value}; without the line it goes where the rest goes"
                )
            again = one.placement is Placement.RECOMPUTE and not one.part.endswith(SELECTIVE)
            if one.input is not Placement.KEEP and not again:
                raise ConfigurationError(
                    f"the plan has an input of {one.part} of {one.layer}, which is not recomputed "
                    f"from one; expected {Placement.RECOMPUTE.value} as its placement; correct it "
                    "or plan again"
                )
            if not one.replays and one.placement is not Placement.KEEP:
                raise ConfigurationError(
                    f"the plan has {one.part} of {one.layer} as {one.placement.value} and without "
                    f"replay; expected {Placement.KEEP.value}, with which alone a part can do "
                    "without; correct it or plan again"
                )
            if not one.encodes and one.placement is Placement.RECOMPUTE:
                raise ConfigurationError(
                    f"the plan has {one.part} of {one.layer} as {one.placement.value} and without "
                    "a codec; expected keep, host or ssd, since what is recomputed is not encoded; "
                    "correct it or plan again"
                )
            if one.placement not in (*tiers, Placement.KEEP, Placement.RECOMPUTE):
                raise ConfigurationError(
                    f"the plan sends {one.layer} to {one.placement.value}, which this run does not "
                    f"have; give {_flag(one.placement)} or plan again"
                )
            if one.input not in (*tiers, Placement.KEEP):
                raise ConfigurationError(
                    f"the plan sends the input of {one.layer} to {one.input.value}, which this run "
                    f"does not have; give {_flag(one.input)} or plan again"
                )


def _flag(placement: Placement) -> str:
    """What gives a run this tier."""
    if placement is Placement.HOST:
        return "--activation-offload-host-budget"
    return "--activation-offload-dir"
