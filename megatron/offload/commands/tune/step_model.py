# SPDX-License-Identifier: Apache-2.0
"""What a step takes, as a function of its setting, from short runs: `StepModel`.

Note [Terms]
b is the micro-batch size, m the number of micro-batches, u that of units.

Seconds. Both orders of a step have coefficients of their own: layer-major, a micro-batch pauses
where a unit ends, and what comes in for a layer comes once a step. `1` is the optimizer's step and
what else is done once a step, layer-major also what comes in for units. `m` is what each
micro-batch takes however small it is: launches, and parameters that come in for it. `m*b` is its
operations and the transfers that they cannot hide, both in proportion to its samples. Layer-major
`m*u` are the pauses.

Device memory. One fit for both orders, as a micro-batch that runs needs the same in both. `1` is
weights, gradients, optimizer states; `b` is what a micro-batch has at the fullest moment: what it
keeps, what is on its way to a tier, what an operation works in. One after the other m is no term: a
micro-batch's activations are gone before the next begins. Layer-major `m-1` is what each of the
others takes however small it is: its forward pass waits in a thread, for which allocators keep
memory. `1/u` is what is in memory of the parameters of one unit while it runs, where they come and
go. `b*(m-1)` is what the others keep between two units wherever their activations are: hidden
states and their gradients. And `b*(m-1)*away`, where `away` is the share of layers before the last
unit, is what they keep of those layers: without offload everything, with it what is too small to
move.

In a pipeline of p stages steps run one micro-batch after the other. Each stage computes for m of
them and waits for p - 1, while the first one comes to the last stage and the last one comes back:
(m + p - 1) times the seconds of one. So the seconds have a term `b` beside `1`, `m` and `m*b`, for
the part of the p - 1 that grows with the samples. Device memory is that of the stage that takes the
most, usually the first. It begins p micro-batches before the first of them comes back, or all of
them if there are fewer, so `b*held` stands beside `b`, where `held` is the smaller of m and p. On
the tiers so many wait at once.

On the tiers, for each micro-batch `1` (what does not depend on its size) and `b`. The sum over a
step is what is moved. At once there is what waits, `Setting.waiting_micro_batches`. With `tiered`
host memory takes the share that it had in the runs, up to its budget.

Terms that the runs cannot tell apart become one. `1/u` is left out where one number of units was
measured: as a constant of the order it would hide a part of what grows with m.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron.offload.commands.tune.fit import Fit, fit
from megatron.offload.commands.tune.setting import Setting

# Two candidates whose speeds are this close are equally fast.
NOISE = 0.01
# A part of predicted device memory, by which it may be too high: on a CPU of 27 candidates 10 % at
# most (docs/results/tune.json), those whose micro-batch is far from what the fits are made of.
TOO_HIGH = 0.12


@dataclass(frozen=True)
class Figures:
    """What a step with a setting takes on a rank, measured or predicted.

    Attributes:
        step_s: seconds of a step.
        device_bytes: most device memory, with weights and states.
        moved_bytes: of activations, to all tiers in a step.
        host_bytes: of those, most in host memory at once.
        ssd_bytes: of those, most on SSDs at once.
    """

    step_s: float
    device_bytes: float
    moved_bytes: float
    host_bytes: float
    ssd_bytes: float


@dataclass(frozen=True)
class Measurement:
    """One training that was measured.

    Attributes:
        step_s: seconds of a step, of the faster half of them.
        device_bytes: most device memory in any step.
        moved_bytes: of activations to the tiers in a step.
        host_share: of them, to host memory.
        tokens: of a step, of all ranks.
    """

    setting: Setting
    step_s: float
    device_bytes: float
    moved_bytes: float
    host_share: float
    tokens: float

    def figures(
        self, num_layers: int | None, host_budget_bytes: float, num_stages: int = 1
    ) -> Figures:
        """As predictions are given."""
        one = self.setting
        waiting = one.waiting_micro_batches(num_layers, num_stages)
        at_once = self.moved_bytes / one.micro_batches * waiting
        host = min(at_once * self.host_share, host_budget_bytes)
        return Figures(self.step_s, self.device_bytes, self.moved_bytes, host, at_once - host)


class StepModel:
    """Predicts what steps take.

    Args:
        measured: as `settings_to_measure` says.
        num_layers: of the model; None: not known.
        num_stages: of its pipeline.
        host_budget_bytes: most that host memory takes of activations, of a rank.
    """

    def __init__(
        self,
        measured: Sequence[Measurement],
        *,
        num_layers: int | None = None,
        num_stages: int = 1,
        host_budget_bytes: float = float("inf"),
    ) -> None:
        self.num_layers = num_layers
        self.num_stages = num_stages
        self._host_budget_bytes = host_budget_bytes
        moved = sum(one.moved_bytes for one in measured)
        in_host = sum(one.moved_bytes * one.host_share for one in measured)
        self._host_share = in_host / moved if moved else 0.0
        self.seconds: dict[bool, Fit] = {}  # by whether it is layer-major
        self.moved: dict[bool, Fit] = {}
        self.device = fit(
            _device_terms(num_layers, num_stages, {one.setting.units for one in measured}),
            {one.setting: one.device_bytes for one in measured},
        )
        for layer_major in sorted({bool(one.setting.units) for one in measured}):
            own = [one for one in measured if bool(one.setting.units) == layer_major]
            terms = _terms(layer_major, in_pipeline=num_stages > 1)
            self.seconds[layer_major] = fit(
                terms["seconds"], {one.setting: one.step_s for one in own}, relative=True
            )
            self.moved[layer_major] = fit(
                terms["moved"], {one.setting: one.moved_bytes for one in own}
            )

    def predict(self, setting: Setting) -> Figures:
        """What a step with this setting should take."""
        order = bool(setting.units)
        return Measurement(
            setting,
            self.seconds[order].at(setting),
            self.device.at(setting),
            self.moved[order].at(setting),
            self._host_share,
            tokens=0.0,
        ).figures(self.num_layers, self._host_budget_bytes, self.num_stages)


def _terms(
    layer_major: bool, *, in_pipeline: bool
) -> dict[str, Mapping[str, Callable[[Setting], float]]]:
    """Of what each order has coefficients of its own for; see Note [Terms]."""
    one: dict[str, Callable[[Setting], float]] = {
        "1": lambda s: 1.0,
        "m": lambda s: s.micro_batches,
        "m*b": lambda s: s.samples,
        "m*u": lambda s: s.micro_batches * s.units,
        "b": lambda s: s.micro_batch_size,
    }

    def of(*names: str) -> dict[str, Callable[[Setting], float]]:
        return {name: one[name] for name in names}

    return {
        "seconds": of(
            *("1", "m", "m*b"), *(["m*u"] if layer_major else []), *(["b"] if in_pipeline else [])
        ),
        "moved": of("m", "m*b"),
    }


def _device_terms(
    num_layers: int | None, num_stages: int, units: Collection[int]
) -> dict[str, Callable[[Setting], float]]:
    """See Note [Terms]; `units` are those that were measured."""

    def others(s: Setting) -> int:
        return s.micro_batches - 1 if s.units else 0

    of_units = {"1/u": lambda s: 1.0 / s.units if s.units else 0.0}
    of_stages = {"b*held": lambda s: s.micro_batch_size * min(s.micro_batches, num_stages)}
    return {
        "1": lambda s: 1.0,
        "b": lambda s: s.micro_batch_size,
        **(of_stages if num_stages > 1 else {}),
        "m-1": others,
        **(of_units if len({one for one in units if one}) > 1 else {}),
        "b*(m-1)": lambda s: s.micro_batch_size * others(s),
        "b*(m-1)*away": lambda s: (
            s.micro_batch_size * others(s) * s.share_before_last_unit(num_layers)
        ),
    }
