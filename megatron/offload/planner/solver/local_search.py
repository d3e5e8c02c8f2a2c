# SPDX-License-Identifier: Apache-2.0
"""Better choices than those at hand, by trying changes in the simulation: `Search`.

The solver gives it starting points and a goal. It knows nothing of bandwidths or schedules.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import INPUT_OFFSET
from megatron.offload.planner.simulator.options import recomputes_layer
from megatron.offload.planner.simulator.timeline import Cost, Timeline

Value = tuple[float, ...]  # the smaller the better
Goal = Callable[[Cost], Value]
Option = tuple[int, ...]  # a choice for each part of a layer
_Change = list[tuple[int, Option]]  # layers and their new options

_MOST_TRIED = 400  # from one starting point
_MOST_SINGLE_CHANGES = 400  # in a neighbourhood; of more, a random part is tried
_KICKED = 1 / 3  # of the layers, to leave a dead end
_MOST_PAIRS = 300
_MOST_TRIPLES = 100
_MOST_OPTIONS = 24  # of a layer; of more, those that change a part or make all alike


class Search:
    """Tries changes of one, two and three layers, and of many alike, as long as it may.

    Args:
        timeline: simulates.
        most_events: simulated in all searches together; the same on every machine.

    Attributes:
        left_events: that may still be simulated.
        tried: all choices that were simulated, after their costs.
    """

    def __init__(self, timeline: Timeline, most_events: float) -> None:
        self._timeline = timeline
        self._choices = timeline.choices
        self.left_events = most_events
        self.tried: list[tuple[Cost, Ints]] = []
        self._costs: dict[bytes, Cost] = {}
        self._best: dict[Goal, tuple[int, Value, Ints]] = {}  # of how many tried, value, choices
        # Layers with the same options are of one kind.
        kinds: dict[tuple[Option, ...], int] = {}
        options = [tuple(one) for one in self._choices.options]
        self._kinds = [kinds.setdefault(one, len(kinds)) for one in options]
        self._options = [frozenset(one) for one in kinds]
        num_options = sum(len(one) for one in options)
        self._tries_all = num_options <= _MOST_SINGLE_CHANGES
        self._nearest: dict[tuple[int, Option], list[Option]] = {}

    @property
    def num_tried(self) -> int:
        """How many different choices were simulated."""
        return len(self.tried)

    def cost(self, chosen: Ints) -> Cost:
        """What a step with these choices costs; each is simulated once."""
        key = chosen.tobytes()
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._timeline.cost(chosen)
            self.tried.append((found, chosen.copy()))
            self.left_events -= found.num_events
        return found

    def best(self, goal: Goal) -> Ints:
        """The best choices for a goal among all that were simulated; of equals, the first."""
        seen, value, chosen = self._best.get(goal) or (1, goal(self.tried[0][0]), self.tried[0][1])
        for cost, one in self.tried[seen:]:
            other = goal(cost)
            if other < value:
                value, chosen = other, one
        self._best[goal] = self.num_tried, value, chosen
        return chosen

    def improve(self, chosen: Ints, goal: Goal, most_events: float) -> Ints:
        """The best that is found from here, with so many events at most."""
        until = self.left_events - most_events
        most_tried = self.num_tried + _MOST_TRIED
        chance = random.Random(0)
        value = goal(self.cost(chosen))
        better = True
        while better:
            better = False
            for change in self._changes(chosen, chance):
                if self.left_events <= max(until, 0.0) or self.num_tried >= most_tried:
                    return chosen
                changed = chosen.copy()
                for layer, option in change:
                    begin, end = self._choices.spans[layer]
                    changed[begin:end] = option
                changed_value = goal(self.cost(changed))
                if changed_value < value:
                    chosen, value, better = changed, changed_value, True
                    break
        return chosen

    def kick(self, chosen: Ints, number: int) -> Ints:
        """Random options for a third of the layers, another third for each number."""
        chance = random.Random(number)
        kicked = chosen.copy()
        for layer, (begin, end) in enumerate(self._choices.spans):
            if chance.random() < _KICKED and begin < end:
                kicked[begin:end] = chance.choice(self._choices.options[layer])
        return kicked

    def _changes(self, chosen: Ints, chance: random.Random) -> Iterator[_Change]:
        """The small ones first, in random order."""
        singles = self._single_changes(chosen)
        chance.shuffle(singles)
        if len(singles) > _MOST_SINGLE_CHANGES / 4:
            yield from self._changes_of_many(chosen, chance)
        yield from ([one] for one in singles[:_MOST_SINGLE_CHANGES])
        pairs = itertools.islice(itertools.combinations(singles, 2), 20 * _MOST_PAIRS)
        triples = itertools.islice(itertools.combinations(singles, 3), 20 * _MOST_TRIPLES)
        of_two = [[a, b] for a, b in pairs if a[0] != b[0]]  # of two layers
        chance.shuffle(of_two)
        yield from of_two[:_MOST_PAIRS]
        of_three = [[a, b, c] for a, b, c in triples if a[0] != b[0] != c[0] != a[0]]
        chance.shuffle(of_three)
        yield from of_three[:_MOST_TRIPLES]

    def _single_changes(self, chosen: Ints) -> _Change:
        changes = []
        for layer, (begin, end) in enumerate(self._choices.spans):
            now = tuple(chosen[begin:end].tolist())
            changes += [(layer, option) for option in self._near(layer, now)]
        return changes

    def _near(self, layer: int, now: Option) -> list[Option]:
        """Options of a layer with another choice for one part, or for all at once.

        Where that makes too many, a recomputation begins with its input in memory, which may move
        in a second change.
        """
        key = self._kinds[layer], now
        if key not in self._nearest:
            near = []
            for option in self._choices.options[layer]:
                differs = sum(a != b for a, b in zip(option, now, strict=True))
                whole = any(map(recomputes_layer, (*option[:1], *now[:1])))
                begins_moved = any(
                    new >= INPUT_OFFSET and new % INPUT_OFFSET != old % INPUT_OFFSET
                    for new, old in zip(option, now, strict=True)
                )
                is_near = differs == 1 or (differs and whole)
                if is_near and (self._tries_all or not begins_moved):
                    near.append(option)
            self._nearest[key] = near
        return self._nearest[key]

    def _changes_of_many(self, chosen: Ints, chance: random.Random) -> Iterator[_Change]:
        """Of all layers that have one option, some get another: half of them down to one."""
        alike: dict[Option, list[int]] = {}
        for layer, (begin, end) in enumerate(self._choices.spans):
            alike.setdefault(tuple(chosen[begin:end].tolist()), []).append(layer)
        share = 0.5
        while share * len(self._choices.spans) >= 0.5:
            moves = []
            for now, layers in alike.items():
                number = max(round(share * len(layers)), 1)
                first = chance.randrange(len(layers))
                step = len(layers) / number
                some = sorted({layers[int(first + k * step) % len(layers)] for k in range(number)})
                kinds = {self._kinds[layer] for layer in some}
                moves += [
                    [(layer, option) for layer in some]
                    for option in self._few(some[0], now)
                    if all(option in self._options[kind] for kind in kinds)
                ]
            chance.shuffle(moves)
            yield from moves
            share /= 2

    def _few(self, layer: int, now: Option) -> list[Option]:
        """Options of a layer to try where there are too many."""
        options = self._choices.options[layer]
        if len(options) <= _MOST_OPTIONS:
            return options
        alike = [option for option in options if len(set(option)) == 1]
        return [*alike, *(one for one in self._near(layer, now) if len(set(one)) > 1)]
