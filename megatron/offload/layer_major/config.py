# SPDX-License-Identifier: Apache-2.0
"""How a step is divided into units: `LayerMajorConfig`. Its flags are made of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron.offload.errors import STEPS_PREFIX, ConfigurationError
from megatron.offload.flag import Settings, flag
from megatron.offload.values import count_or_word


@dataclass(frozen=True)
class LayerMajorConfig(Settings):
    """In which order a step runs layers and micro-batches."""

    group: ClassVar[str] = "layer-major steps"
    prefix: ClassVar[str] = STEPS_PREFIX
    other_names: ClassVar[Mapping[str, str]] = {"--layer-major-order": "alternates"}

    units: str | int = flag(
        "--layer-major-units",
        "off",
        "divide the layers into so many units, and run each unit for all micro-batches of a step "
        "before the next. A unit's parameters, if they are offloaded or sharded, then come in once "
        "a step and not once a micro-batch. auto: each layer is a unit. Needs one pipeline stage. "
        "Results are bit-identical. Of a weight that several units use, such as a tied embedding, "
        "gradients of all micro-batches wait in memory, or where --activation-boundary says.",
        parse=count_or_word("units"),
        metavar="{off,auto,N}",
    )
    order: str = flag(
        "--layer-major-order",
        "ascending",
        "order of the micro-batches. ascending: the same in every unit, so that gradients are the "
        "same sums. alternating: every second unit takes them in reverse and begins with what the "
        "unit before has just made; gradients are added in that order, and layers that keep "
        "something from one micro-batch to the next (BatchNorm's running means) see them in it.",
        choices=("ascending", "alternating"),
    )
    evaluation: str = flag(
        "--layer-major-eval",
        "off",
        "on: evaluation too runs each unit for all micro-batches of an iteration before the next, "
        "so parameters that are offloaded are read once for all of them. Results are "
        "bit-identical. Hidden states wait in memory.",
        choices=("off", "on"),
    )

    @property
    def enabled(self) -> bool:
        """Whether steps are layer-major."""
        return self.units != "off"

    @property
    def evaluates(self) -> bool:
        """Whether evaluation runs unit by unit as well."""
        return self.evaluation == "on"

    @property
    def num_units(self) -> int | None:
        """Units that were asked for; None: as many as there are layers."""
        return self.units if isinstance(self.units, int) else None

    @property
    def alternates(self) -> bool:
        """Whether every second unit takes the micro-batches in reverse."""
        return self.order == "alternating"


def refusal(sentence: str) -> ConfigurationError:
    """The error for what cannot work in such a step."""
    return ConfigurationError(STEPS_PREFIX + sentence)
