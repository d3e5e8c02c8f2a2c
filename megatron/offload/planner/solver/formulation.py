# SPDX-License-Identifier: Apache-2.0
"""The choice of placements as a mixed-integer program, solved by HiGHS: `Program`.

It knows bandwidths and memory at the end of each layer, not the order of single events. The solver
starts from its solutions and improves them in the simulation, see `local_search`.

Note [The program]
    Layers stand in blocks of neighbours; n[b, o] of a block's layers take option o, which is one
    for a part or for all parts together. A micro-batch's forward pass with the most others in
    flight is followed layer by layer:
        backlog   a[b, t] >= a[b-1, t] + written bytes - bandwidth (forward + wait w[b]),
                  sum over t <= what may be in flight
        memory    others in flight x resident bytes + own resident bytes so far + backlog <= peak
    and its backward pass back:
        lead      l[b, t] <= l[b+1, t] + backward + recomputation + wait v[b] - read bytes
                  / bandwidth,  0 <= l <= what the window holds
        memory    others + own resident bytes so far + all bytes of the layer + the window <= peak
    In layer-major steps a unit's passes follow each other at once, so that of micro-batches M
        carried  c[u, t] >= c[u-1, t] + M (written bytes - bandwidth (forward + waits))
    is the backlog that its last pass begins with.
    Least: recomputation and waits of all micro-batches with peak <= budget, or peak with
    recomputation and waits <= what is allowed. A layer's bytes and seconds are the units.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.profile.pipeline_schedule import pipeline_schedule
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.options import Choices
from megatron.offload.planner.solver.layer_options import (
    ALL,
    LayerOption,
    Place,
    average,
    option_of,
    parts_of,
    places_of,
)
from megatron.offload.planner.solver.milp import Rows

_MOST_BLOCKS = 16


class Program:
    """The program of a profile. `solve` may be asked with several budgets."""

    def __init__(self, profile: StageProfile, choices: Choices) -> None:
        self._profile = profile
        # An average layer's: HiGHS drops factors that are very small beside others.
        layers = max(len(profile.layers), 1)
        self._unit_bytes = max(sum(one.movable_bytes for one in profile.layers) / layers, 1.0)
        self._unit_s = sum(one.forward_s for one in profile.layers) / layers or 1.0
        self._options = [places_of(choices, layer) for layer in profile.layers]
        self._spans = choices.spans
        self._blocks = self._make_blocks()
        self._others = _others_in_flight(profile)
        self._stalls = profile.num_micro_batches
        self._passes = profile.num_micro_batches + profile.position.num_stages - 1

    def solve(
        self, *, budget_bytes: float | None = None, slowdown_s: float | None = None
    ) -> Ints | None:
        """The best choices it sees; None if it sees none, or finds none soon.

        Args:
            budget_bytes: most memory, beyond what no plan changes; then the least time is sought.
            slowdown_s: most seconds of a step beyond keeping everything; then the least memory is.
        """
        if not self._blocks:
            return None
        rows = Rows()
        most = np.inf
        if budget_bytes is not None:
            working_bytes = self._profile.transient_bytes + self._profile.head_bytes
            most = max(budget_bytes - working_bytes, 0.0)
            most /= 1 + self._profile.allocator_slack
        peak = rows.variable(1, upper=most, unit=self._unit_bytes)[0]
        counts = [
            rows.variable(len(self._options[block[0]]), upper=len(block), is_integer=True)
            for block in self._blocks
        ]
        for block, of_block in zip(self._blocks, counts, strict=True):
            places = self._options[block[0]]
            for part in parts_of(places):
                terms = [
                    (int(n), 1.0)
                    for n, place in zip(of_block, places, strict=True)
                    if place.part in (part, ALL)
                ]
                rows.add(terms, len(block), len(block))
        slower = self._add_passes(rows, peak, counts)
        if slowdown_s is None:
            objective = slower
        else:
            rows.add(slower, -np.inf, slowdown_s)
            objective = [(peak, 1.0)]
        found = rows.solve(objective)
        if found is None:
            return None
        chosen = np.zeros(self._spans[-1][1], np.int64)
        for block, of_block in zip(self._blocks, counts, strict=True):
            self._choose(chosen, block, np.round(found[of_block]).astype(int))
        return chosen

    def _choose(self, chosen: Ints, block: list[int], numbers: Ints) -> None:
        """Spreads what the layers of a block get over them."""
        places = self._options[block[0]]
        of_part = np.array([place.part for place in places], np.int64)
        ways = np.where(of_part == ALL, numbers, 0)
        together = int(ways.sum())
        kinds = _spread(np.array([len(block) - together, together]))
        for part in parts_of(places):
            options = _spread(np.where(of_part == part, numbers, 0))
            apart = (layer for layer, kind in zip(block, kinds, strict=True) if kind == 0)
            for layer, option in zip(apart, options, strict=True):
                chosen[self._spans[layer][0] + part] = places[option].choice
        whole = (layer for layer, kind in zip(block, kinds, strict=True) if kind == 1)
        for layer, option in zip(whole, _spread(ways), strict=True):
            begin, end = self._spans[layer]
            chosen[begin:end] = places[option].choice

    def _add_passes(self, rows: Rows, peak: int, counts: list[Ints]) -> list[tuple[int, float]]:
        """Constraints of all passes; the terms of what they make a step slower."""
        profile = self._profile
        tiers = profile.tiers
        slower: list[tuple[int, float]] = []
        options_of_blocks = [self._options_of(block) for block in self._blocks]
        resident = [
            [(int(n), option.resident) for n, option in zip(of_block, options, strict=True)]
            for of_block, options in zip(counts, options_of_blocks, strict=True)
        ]
        for of_block, options in zip(counts, options_of_blocks, strict=True):
            for n, option in zip(of_block, options, strict=True):
                # The little that bytes cost decides between plans that are as fast.
                moved_s = sum(
                    option.moved[t] / tier.write_bytes_per_s for t, tier in enumerate(tiers)
                )
                slower.append((int(n), option.recompute_s * self._passes + 1e-4 * moved_s))
        carried: Ints | None = None
        for chunk in range(profile.position.num_chunks):
            mine = [
                b for b, block in enumerate(self._blocks) if profile.layers[block[0]].chunk == chunk
            ]
            fixed_bytes = (
                sum(
                    n * size
                    for n, size in zip(self._others[chunk], profile.pass_fixed_bytes, strict=True)
                )
                + profile.pass_fixed_bytes[chunk]
            )
            others: dict[int, float] = {}
            for b, terms in enumerate(resident):
                times = self._others[chunk][profile.layers[self._blocks[b][0]].chunk]
                if times:
                    others.update({n: size * times for n, size in terms})
            before = carried
            if profile.position.units and chunk < profile.position.num_chunks - 1:
                carried = self._new_backlog(rows)
            waits = self._add_forward(
                rows, peak, counts, options_of_blocks, mine, others, fixed_bytes, slower, carried
            )
            if carried is not None and carried is not before:
                self._add_carried(rows, counts, options_of_blocks, mine, waits, before, carried)
            self._add_backward(
                rows, peak, counts, options_of_blocks, mine, others, fixed_bytes, slower
            )
        return slower

    def _add_forward(
        self,
        rows: Rows,
        peak: int,
        counts: list[Ints],
        options_of_blocks: list[list[LayerOption]],
        mine: list[int],
        others: dict[int, float],
        fixed_bytes: float,
        slower: list[tuple[int, float]],
        before: Ints | None,
    ) -> list[int]:
        """The waits of its blocks."""
        tiers = self._profile.tiers
        held = dict(others)
        waits = []
        for b in mine:
            block, options = self._blocks[b], options_of_blocks[b]
            forward_s = self._forward_s(block)
            wait = rows.variable(1, unit=self._unit_s)[0]
            waits.append(int(wait))
            slower.append((int(wait), self._stalls))
            backlog = self._new_backlog(rows)
            for t, tier in enumerate(tiers):
                terms = [(backlog[t], -1.0), (wait, -tier.write_bytes_per_s)]
                if before is not None:
                    terms.append((before[t], 1.0))
                terms += [
                    (n, option.moved[t]) for n, option in zip(counts[b], options, strict=True)
                ]
                rows.add(terms, -np.inf, tier.write_bytes_per_s * forward_s)
            rows.add([(n, 1.0) for n in backlog], -np.inf, self._profile.inflight_bytes)
            for n, option in zip(counts[b], options, strict=True):
                held[int(n)] = held.get(int(n), 0.0) + option.resident
            # The block's last layer runs while the backlog of those before it goes out.
            terms = [*held.items(), (peak, -1.0)]
            share = 1.0 / len(block)
            terms += [
                (n, share * sum(option.moved)) for n, option in zip(counts[b], options, strict=True)
            ]
            if before is not None:
                terms += [(n, 1.0) for n in before]
            rows.add(terms, -np.inf, -fixed_bytes)
            before = backlog
        return waits

    def _add_carried(
        self,
        rows: Rows,
        counts: list[Ints],
        options_of_blocks: list[list[LayerOption]],
        mine: list[int],
        waits: list[int],
        before: Ints | None,
        carried: Ints,
    ) -> None:
        """What all forward passes of a unit leave to be written."""
        passes = self._profile.num_micro_batches
        forward_s = sum(self._forward_s(self._blocks[b]) for b in mine)
        for t, tier in enumerate(self._profile.tiers):
            terms = [(int(carried[t]), -1.0)]
            if before is not None:
                terms.append((int(before[t]), 1.0))
            terms += [(wait, -passes * tier.write_bytes_per_s) for wait in waits]
            for b in mine:
                options = zip(counts[b], options_of_blocks[b], strict=True)
                terms += [(int(n), passes * option.moved[t]) for n, option in options]
            rows.add(terms, -np.inf, passes * tier.write_bytes_per_s * forward_s)

    def _new_backlog(self, rows: Rows) -> Ints:
        """By tier."""
        most = self._profile.inflight_bytes
        return rows.variable(len(self._profile.tiers), upper=most, unit=self._unit_bytes)

    def _forward_s(self, block: list[int]) -> float:
        return sum(self._profile.layers[layer].forward_s for layer in block)

    def _add_backward(
        self,
        rows: Rows,
        peak: int,
        counts: list[Ints],
        options_of_blocks: list[list[LayerOption]],
        mine: list[int],
        others: dict[int, float],
        fixed_bytes: float,
        slower: list[tuple[int, float]],
    ) -> None:
        tiers = self._profile.tiers
        largest = self._largest_storage()
        after: tuple[Ints, int] | None = None
        for b in reversed(mine):
            block, options = self._blocks[b], options_of_blocks[b]
            wait = rows.variable(1, unit=self._unit_s)[0]
            slower.append((int(wait), self._stalls))
            lead = rows.variable(len(tiers), unit=self._unit_s)
            for t, tier in enumerate(tiers):
                # Pieces are read while the ones before are used: a layer may lie ahead.
                rows.add([(lead[t], 1.0)], -np.inf, 2 * largest / tier.read_bytes_per_s)
                terms = [(lead[t], 1.0), (wait, -1.0)]
                known_s = 0.0
                if after is not None:
                    terms.append((after[0][t], -1.0))
                    known_s = sum(
                        self._profile.layers[n].backward_s for n in self._blocks[after[1]]
                    )
                    terms += [
                        (n, -option.recompute_s)
                        for n, option in zip(
                            counts[after[1]], options_of_blocks[after[1]], strict=True
                        )
                    ]
                terms += [
                    (n, option.moved[t] / tier.read_bytes_per_s)
                    for n, option in zip(counts[b], options, strict=True)
                ]
                rows.add(terms, -np.inf, known_s)
            held = dict(others)
            for own in mine[: mine.index(b) + 1]:
                for n, option in zip(counts[own], options_of_blocks[own], strict=True):
                    held[int(n)] = held.get(int(n), 0.0) + option.resident
            for n, option in zip(counts[b], options, strict=True):
                held[int(n)] += (option.live - option.resident) / len(block)
            rows.add([*held.items(), (peak, -1.0)], -np.inf, -fixed_bytes)
            after = lead, b

    def _largest_storage(self) -> float:
        return max(
            (
                part.movable_bytes / max(part.num_storages, 1)
                for layer in self._profile.layers
                for part in layer.parts
            ),
            default=0.0,
        )

    def _options_of(self, block: list[int]) -> list[LayerOption]:
        """Of each option, the average of a block's layers."""
        tiers = len(self._profile.tiers)
        each = [
            [option_of(self._profile.layers[n], place, tiers) for place in self._options[n]]
            for n in block
        ]
        return [average(same) for same in zip(*each, strict=True)]

    def _make_blocks(self) -> list[list[int]]:
        """Neighbours of the same chunk, as few blocks as it takes.

        Layers of a block have the same options; where that would make too many blocks, those
        options that all of them have.
        """
        layers = self._profile.layers
        size = -(-len(layers) // _MOST_BLOCKS)
        windows: list[list[int]] = []
        for n, layer in enumerate(layers):
            last = windows[-1] if windows else []
            if last and len(last) < size and layers[last[0]].chunk == layer.chunk:
                last.append(n)
            else:
                windows.append([n])
        blocks: list[list[int]] = []
        for window in windows:
            alike: dict[tuple[Place, ...], list[int]] = {}
            for n in window:
                alike.setdefault(tuple(self._options[n]), []).append(n)
            blocks += alike.values()
        if len(blocks) <= 2 * len(windows):
            return blocks
        for window in windows:
            common = [
                option
                for option in self._options[window[0]]
                if all(option in self._options[n] for n in window)
            ]
            for n in window:
                self._options[n] = common
        return windows


def _spread(numbers: Ints) -> list[int]:
    """Repeats each option as often as asked for, spread as evenly as possible."""
    total = int(numbers.sum())
    places = sorted(
        ((k + 0.5) * total / number, option)
        for option, number in enumerate(numbers.tolist())
        for k in range(number)
    )
    return [option for _, option in places]


def _others_in_flight(profile: StageProfile) -> list[list[int]]:
    """For each chunk's forward pass when most is held: how many others, of each chunk, are held."""
    chunks = profile.position.num_chunks
    size = [0.0] * chunks
    for layer in profile.layers:
        size[layer.chunk] += layer.movable_bytes + sum(part.resident_bytes for part in layer.parts)
    held = [0] * chunks
    most: list[list[int]] = [[0] * chunks for _ in range(chunks)]
    for one in pipeline_schedule(profile.position, profile.num_micro_batches):
        if one.is_backward:
            held[one.chunk] -= 1
            continue
        weight = sum(n * s for n, s in zip(held, size, strict=True))
        if weight >= sum(n * s for n, s in zip(most[one.chunk], size, strict=True)):
            most[one.chunk] = held.copy()
        held[one.chunk] += 1
    return most
