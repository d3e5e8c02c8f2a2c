# SPDX-License-Identifier: Apache-2.0
"""How a step is divided: `Setting`. What is measured, predicted and chosen is one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Setting:
    """A step's micro-batches and their order.

    Attributes:
        units: of a layer-major step; 0: the step runs one micro-batch after the other.
        micro_batch_size: samples of a micro-batch on a rank.
        micro_batches: of a step on a rank.
    """

    units: int
    micro_batch_size: int
    micro_batches: int

    @property
    def samples(self) -> int:
        """Samples of a step on a rank."""
        return self.micro_batch_size * self.micro_batches

    @property
    def name(self) -> str:
        """The setting as written in file names and errors."""
        order = f"{self.units}-units" if self.units else "micro-batch-major"
        return f"{self.micro_batches}x{self.micro_batch_size}-{order}"

    def flags(self, data_parallel_size: int) -> list[str]:
        """What the training command takes for it."""
        return [
            *("--micro-batch-size", str(self.micro_batch_size)),
            *("--global-batch-size", str(self.samples * data_parallel_size)),
            *("--layer-major-units", str(self.units or "off")),
        ]

    def waiting_micro_batches(self, num_layers: int | None, num_stages: int = 1) -> float:
        """How many micro-batches' activations wait at once, at the step's fullest moment.

        One after the other it is one, on the first stage of a pipeline as many as there are stages.
        Layer-major the layers of all units but the last have run for
        all micro-batches when the last unit begins, which runs each forward and backward at once.

        Args:
            num_layers: of the model; None: not known, units are taken for equal.
            num_stages: of its pipeline.
        """
        if num_stages > 1:
            return min(self.micro_batches, num_stages)
        return 1.0 + (self.micro_batches - 1) * self.share_before_last_unit(num_layers)

    def share_before_last_unit(self, num_layers: int | None) -> float:
        """The share of layers that are in earlier units than the last one."""
        if not self.units:
            return 0.0
        if num_layers is None:
            return 1.0 - 1.0 / self.units
        # As `layer_major/units.py` divides them: layer i is in unit i * units // layers.
        return -(-(self.units - 1) * num_layers // self.units) / num_layers


def settings_to_measure(
    sizes: Sequence[int], counts: Sequence[int], units: Sequence[int]
) -> list[Setting]:
    """The settings that have to run so that all terms of the fits are known; the cheapest first.

    Both orders have a fit of their own, and each is measured at both sizes and both counts. What
    depends on the number of units is measured at the fewest as well, with the larger count.

    Args:
        sizes: two micro-batch sizes.
        counts: two numbers of micro-batches.
        units: that are to be compared; 0 is micro-batch-major.
    """
    layer_major = sorted({one for one in units if one})
    orders = [*([0] if 0 in units else []), *layer_major[-1:]]
    found = [Setting(one, size, count) for one in orders for size in sizes for count in counts]
    found += [Setting(one, size, max(counts)) for one in layer_major[:-1][:1] for size in sizes]
    return sorted(found, key=lambda one: (one.samples, one))
