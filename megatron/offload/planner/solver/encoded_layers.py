# SPDX-License-Identifier: Apache-2.0
"""Plans of which a codec encodes some layers and leaves the others as they are: `EncodedLayers`.

The solver begins with such plans. Whether to encode a part is one more choice for each, and with
all of them at once its program and its search find plans that are worse than those of a run without
a codec. With some layers encoded for good there are no more choices than without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.offload.planner.profile.stage_profile import PartProfile, StageProfile
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import EXACT_OFFSET, FIRST_TIER, KEEP, base_of
from megatron.offload.planner.simulator.options import Choices


class EncodedLayers:
    """Some of a stage's layers.

    Attributes:
        profile: of a run whose codec encodes what these save, and nothing else.
        seconds: that this takes, of a micro-batch.
    """

    def __init__(self, profile: StageProfile, encoded: frozenset[int]) -> None:
        layers = tuple(
            dataclasses.replace(
                layer,
                parts=tuple((_encoded if n in encoded else _exact)(part) for part in layer.parts),
            )
            for n, layer in enumerate(profile.layers)
        )
        self.profile = dataclasses.replace(profile, layers=layers)
        self.seconds = sum(part.codec_s for n in encoded for part in profile.layers[n].parts)
        self._encoded = encoded

    def choices(self, chosen: Ints, choices: Choices) -> Ints:
        """What was chosen for this profile, as choices of the one that it was made of."""
        found = chosen.copy()
        for n, (begin, _) in enumerate(choices.spans):
            if n in self._encoded:
                continue
            for number, part in enumerate(choices.profile.layers[n].parts, begin):
                base = base_of(int(chosen[number]))
                if part.codec_spared_bytes and (base == KEEP or base >= FIRST_TIER):
                    found[number] += EXACT_OFFSET
        return found


def encoded_in_turn(profile: StageProfile, shares: int) -> Iterator[EncodedLayers]:
    """None of the layers that a codec could encode, one of so many shares of them, two, and all.

    Those of a share are evenly spread.
    """
    able = [
        n
        for n, layer in enumerate(profile.layers)
        if any(part.codec_spared_bytes for part in layer.parts)
    ]
    most = len(able)
    for number in sorted({most * share // shares for share in range(shares + 1)}):
        encoded = (
            n
            for place, n in enumerate(able)
            if place * number // most < (place + 1) * number // most
        )
        yield EncodedLayers(profile, frozenset(encoded))


def _encoded(part: PartProfile) -> PartProfile:
    """As it is, and there is no other way."""
    return dataclasses.replace(part, codec_spared_bytes=0, codec_s=0.0)


def _exact(part: PartProfile) -> PartProfile:
    """Without a codec."""
    return dataclasses.replace(
        _encoded(part),
        movable_bytes=part.movable_bytes + part.codec_spared_bytes,
        replayed_bytes=part.replayed_bytes - part.codec_spared_bytes,
        replay_s=part.replay_s - part.codec_s,
        replay_extra_bytes=part.exact_extra_bytes,
        selective_bytes=part.exact_selective_bytes,
    )
