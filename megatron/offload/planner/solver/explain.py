# SPDX-License-Identifier: Apache-2.0
"""Why a plan has each part where it is, in a few words: `Reasons`.

Found by simulating the other choices. For people; nothing is decided by it.
"""

from __future__ import annotations

import math

from megatron.offload.activations.placement.policy import Placement
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import (
    EXACT_OFFSET,
    FIRST_TIER,
    INPUT_OFFSET,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
    RECOMPUTE_PART,
    base_of,
    is_exact,
    is_selective,
)
from megatron.offload.planner.simulator.options import recomputes_layer
from megatron.offload.planner.simulator.timeline import Cost, Timeline

_NOTICEABLE = 1e-5  # of a step
_MOST_EVENTS = 150_000  # simulated; layers that are not asked for say what their neighbours say


class Reasons:
    """Says why a plan's parts are placed as they are.

    Args:
        timeline: simulates.
        chosen: the plan's choices.
        budget_bytes: that it was made for; infinite if for another goal.
    """

    def __init__(self, timeline: Timeline, chosen: Ints, budget_bytes: float) -> None:
        self._timeline = timeline
        self._choices = timeline.choices
        self._chosen = chosen
        self._budget_bytes = budget_bytes
        self._cost = timeline.cost(chosen)
        self._passes = timeline.profile.num_micro_batches

    def of_parts(self) -> list[str]:
        """Gives a reason for each part, in the order of the profile."""
        reasons = [""] * self._choices.num_parts
        known: dict[tuple[int, int, str, int], str] = {}  # the nearest layer's so far
        asked = max(int(_MOST_EVENTS / (4 * max(self._cost.num_events, 1))), 4)
        layers = self._choices.profile.layers
        step = max(-(-len(layers) // asked), 1)
        for n, (layer, (begin, end)) in enumerate(zip(layers, self._choices.spans, strict=True)):
            for part in range(begin, end):
                name = layer.parts[part - begin].name
                key = layer.chunk, int(self._chosen[part]), name, n // step
                if key not in known:
                    known[key] = self._of_part(n, part - begin)
                reasons[part] = known[key]
        return reasons

    def _of_part(self, layer: int, part: int) -> str:
        choice = int(self._chosen[self._choices.spans[layer][0] + part])
        profile = self._choices.profile.layers[layer].parts[part]
        if profile.movable_bytes == profile.replayed_bytes == 0:
            return "nothing to move"
        others = {c: self._with(layer, part, c) for c in self._other_choices(layer, part)}
        if choice == KEEP_ALL:
            return self._of_unreplayed(others[KEEP])
        replays = others.pop(KEEP_ALL, None) is not None
        if is_exact(choice):
            return self._of_exact(layer, part, choice)
        if base_of(choice) == KEEP:
            return self._of_kept(others, "no room without replay" if replays else "")
        if base_of(choice) >= FIRST_TIER:
            return self._of_moved(others[choice - base_of(choice) + KEEP], others)
        return self._of_recomputed(others)

    def _of_unreplayed(self, replayed: Cost) -> str:
        costs_s = self._slower_s(replayed)
        if costs_s > 0 and not self._fits_everything():
            return f"replaying it would cost {_ms(costs_s)}"
        return "there is room"

    def _of_exact(self, layer: int, part: int, choice: int) -> str:
        profile = self._choices.profile.layers[layer]
        encoded = choice - EXACT_OFFSET
        if encoded not in self._choices.of_part(profile, part):
            encoded = base_of(choice)  # of what is encoded selective operations produce nothing
        costs_s = self._slower_s(self._with(layer, part, encoded))
        return f"encoding it would cost {_ms(costs_s)}" if costs_s > 0 else "there is room"

    def _of_kept(self, others: dict[int, Cost], why_replayed: str) -> str:
        if not others:
            return why_replayed or "cannot be elsewhere"
        if self._fits_everything():
            return "there is room"
        moved = {c: cost for c, cost in others.items() if base_of(c) >= FIRST_TIER}
        fastest = min(moved or others, key=lambda c: others[c].step_s)
        costs_s = self._slower_s(others[fastest])
        if costs_s > 0:
            what = "recomputing" if base_of(fastest) < FIRST_TIER else "moving"
            return f"{what} it would cost {_ms(costs_s)}"
        if others[fastest].written_bytes <= self._cost.written_bytes:
            return "used at once"
        return why_replayed or "there is room"

    def _of_moved(self, kept: Cost, others: dict[int, Cost]) -> str:
        saved_s = -self._slower_s(kept)
        if saved_s <= 0:
            return "hides behind compute"
        recomputed = [cost for c, cost in others.items() if c in (RECOMPUTE_PART, RECOMPUTE_LAYER)]
        if recomputed:
            more_s = self._slower_s(min(recomputed, key=lambda cost: cost.step_s))
            if more_s > 0:
                return f"costs {_ms(saved_s)}, recomputing it {_ms(more_s)} more"
        return f"no room; costs {_ms(saved_s)}"

    def _of_recomputed(self, others: dict[int, Cost]) -> str:
        moved = {c: cost for c, cost in others.items() if base_of(c) >= FIRST_TIER}
        if not moved:
            return "no room"
        fastest = min(moved, key=lambda c: moved[c].step_s)
        word = "the SSD" if self._choices.placement(fastest) is Placement.SSD else "host memory"
        waits_s = self._slower_s(moved[fastest])
        if waits_s > 0:
            return f"cheaper than waiting {_ms(waits_s)} for {word}"
        if moved[fastest].peak_bytes > self._budget_bytes:
            return f"no room until {word} has taken it"
        return "needs less memory than moving"

    def _fits_everything(self) -> bool:
        everything = self._choices.all(KEEP_ALL)
        return not (self._chosen != everything).any() and self._budget_bytes < math.inf

    def _other_choices(self, layer: int, part: int) -> list[int]:
        profile = self._choices.profile.layers[layer]
        now = int(self._chosen[self._choices.spans[layer][0] + part])
        # Whether its selective operations are recomputed is taken as it is.
        choices = [
            c
            for c in self._choices.of_part(profile, part)
            if c < INPUT_OFFSET
            and (is_selective(c) == is_selective(now) or c == RECOMPUTE_PART)
            and is_exact(c) <= is_exact(now)
        ]
        whole = [RECOMPUTE_LAYER] if profile.recompute_s is not None else []
        return [c for c in (*choices, *whole) if c != now]

    def _with(self, layer: int, part: int, choice: int) -> Cost:
        """The cost if this part, or with whole layers every one, had this choice."""
        begin, end = self._choices.spans[layer]
        changed = self._chosen.copy()
        if choice == RECOMPUTE_LAYER:
            changed[begin:end] = choice
        elif recomputes_layer(int(changed[begin])):
            profile = self._choices.profile.layers[layer]
            for n in range(end - begin):
                same = choice in self._choices.of_part(profile, n)
                changed[begin + n] = choice if same else KEEP
        else:
            changed[begin + part] = choice
        return self._timeline.cost(changed)

    def _slower_s(self, other: Cost) -> float:
        """Seconds by which the other is slower, for a micro-batch; 0 below what can be noticed."""
        slower_s = other.step_s - self._cost.step_s
        if abs(slower_s) <= _NOTICEABLE * self._cost.step_s:
            return 0.0
        return slower_s / self._passes


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms"
