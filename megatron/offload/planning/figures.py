# SPDX-License-Identifier: Apache-2.0
"""Makes a `StageProfile` of what a profiler noted: `profile_of`, `passes_s`, `tier_profiles`.

The planner calls them between steps. Durations are medians over micro-batches, so that one that was
disturbed does not count; bytes are the largest.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.offload.placement.passes import Layout
from megatron.offload.placement.policy import CHEAP, WHOLE_LAYER, Placement
from megatron.offload.placement.profile import (
    GroupProfile,
    LayerProfile,
    StageProfile,
    TierProfile,
)
from megatron.offload.planning.marks import LayerMarks, Moment, PassMarks
from megatron.offload.storage.tier import Tier

Seconds = Callable[[Moment | None, Moment | None], float]
Rates = tuple[float | None, float | None]  # bytes a second written and read; None: not known

_PARTS = ("attention", "mlp")
_ORDER = (*_PARTS, WHOLE_LAYER)
_SLOWEST_BYTES_PER_S = 1.0  # of a tier that nothing has been measured of, and that was not used


def profile_of(
    steps: Sequence[Sequence[PassMarks]],
    layout: Layout,
    tiers: Sequence[TierProfile],
    *,
    seconds_between: Callable[[object, object], float],
    step_fixed_s: float,
    recomputes: bool,
    previous: StageProfile | None = None,
    sizes: dict[str, int] | None = None,
    inflight_bytes: int = 512 << 20,
    source: str = "",
) -> StageProfile:
    """What the steps show.

    Args:
        steps: complete passes of at least one step.
        layout: of the stage.
        tiers: see `tier_profiles`.
        seconds_between: two timestamps.
        step_fixed_s: seconds of a step outside of its passes.
        recomputes: whether layers may be recomputed at all.
        previous: an earlier profile, for what layers save that were recomputed in these steps.
        sizes, inflight_bytes, source: see `StageProfile`.
    """

    def between(earlier: Moment | None, later: Moment | None) -> float:
        if earlier is None or later is None:
            return 0.0
        waited_s = later.waited_s - earlier.waited_s
        return max(seconds_between(earlier.timestamp, later.timestamp) - waited_s, 0.0)

    passes = [one for step in steps for one in step]
    by_chunk = [[p for p in passes if p.chunk == c] for c in range(layout.num_chunks)]
    layers: list[LayerProfile] = []
    for chunk, own in enumerate(by_chunk):
        earlier = {one.name: one for one in (previous.layers if previous else ())}
        for alike in zip(*(one.layers for one in own), strict=True):
            layers.append(_layer(chunk, list(alike), own, between, recomputes, earlier))

    def outside(part: Callable[[PassMarks], float]) -> tuple[float, ...]:
        return tuple(_median(part(one) for one in own) for own in by_chunk)

    return StageProfile(
        layout=layout,
        num_micro_batches=len(by_chunk[0]) // len(steps),
        layers=tuple(layers),
        tiers=tuple(tiers),
        before_s=outside(lambda p: between(p.began, p.layers[0].began if p.layers else p.ended)),
        after_s=outside(lambda p: between(p.layers[-1].ended, p.ended) if p.layers else 0.0),
        backward_before_s=outside(
            lambda p: between(
                p.backward_began, p.layers[-1].backward_began if p.layers else p.backward_ended
            )
        ),
        backward_after_s=outside(
            lambda p: between(p.layers[0].backward_ended, p.backward_ended) if p.layers else 0.0
        ),
        step_fixed_s=max(step_fixed_s, 0.0),
        pass_fixed_bytes=tuple(max(one.held_bytes for one in own) for own in by_chunk),
        inflight_bytes=inflight_bytes,
        sizes=dict(sizes or {}),
        source=source,
    )


def passes_s(
    steps: Sequence[Sequence[PassMarks]], seconds: Callable[[object, object], float]
) -> float:
    """Seconds that the passes of a step take together, waits included."""
    return _median(
        sum(
            seconds(earlier.timestamp, later.timestamp)
            for p in step
            for earlier, later in ((p.began, p.ended), (p.backward_began, p.backward_ended))
            if earlier is not None and later is not None
        )
        for step in steps
    )


def tier_profiles(
    tiers: Mapping[Placement, Tier], recent: Mapping[Placement, Rates] | None = None
) -> list[TierProfile]:
    """The tiers as fast as they have been in the last seconds of use, or as `recent` says.

    One that has only been written, because all was still in memory when it was needed, is taken to
    read as fast; one that was not used at all gets next to nothing to do.
    """
    found = []
    for placement, tier in tiers.items():
        writes, reads = (recent or {}).get(placement, (None, None))
        writes = writes or tier.statistics.writes.bytes_per_s
        reads = reads or tier.statistics.reads.bytes_per_s
        limit = getattr(tier, "write_limit", None)
        known = writes or reads or _SLOWEST_BYTES_PER_S
        writes_bytes_per_s = writes or known
        if limit is not None:  # the meters count transfers, not the pauses between them
            writes_bytes_per_s = min(writes_bytes_per_s, limit.bytes_per_s)
        found.append(
            TierProfile(
                name=placement.value,
                write_bytes_per_s=writes_bytes_per_s,
                read_bytes_per_s=reads or known,
                capacity_bytes=tier.limit_bytes,
            )
        )
    return found


def _layer(
    chunk: int,
    marks: list[LayerMarks],
    passes: list[PassMarks],
    between: Seconds,
    recomputes: bool,
    previous: Mapping[str, LayerProfile],
) -> LayerProfile:
    """One layer; `marks` has it once for each of `passes`."""
    name = marks[0].name
    input_bytes = max(one.input_bytes for one in marks)
    ran_again = [_again_s(m, between, WHOLE_LAYER) for m in marks if WHOLE_LAYER in m.again]
    forward_s = _median(between(m.began, m.ended) for m in marks)
    backward_s = _median(
        # Without a gradient for its input its backward ends with that of the pass.
        between(m.backward_began, m.backward_ended or p.backward_ended)
        - _again_s(m, between, *m.again)
        for m, p in zip(marks, passes, strict=True)
    )
    can_be = recomputes and all(m.can_be_recomputed for m in marks)
    groups = _groups(marks, between, can_be)
    if name in previous:
        scale = input_bytes / max(previous[name].input_bytes, 1)
        known = {one.name: _scaled(one, scale) for one in previous[name].groups}
        if ran_again:  # nothing of it was saved
            groups = tuple(known.values())
        groups = tuple(_remembered(one, known.get(one.name), marks) for one in groups)
    recompute_s = _median(ran_again) if ran_again else forward_s
    return LayerProfile(
        chunk=chunk,
        name=name,
        forward_s=forward_s,
        backward_s=max(backward_s, 0.0),
        recompute_s=recompute_s if can_be else None,
        input_bytes=input_bytes,
        groups=groups,
    )


def _groups(marks: list[LayerMarks], between: Seconds, can_be: bool) -> tuple[GroupProfile, ...]:
    can_be = can_be and all(one.has_parts and one.middle for one in marks)
    names = {name for one in marks for name in one.groups}
    found = []
    for name in (*_ORDER, *sorted(names.difference(_ORDER))):
        if name not in names:
            continue
        own = [one.groups[name] for one in marks if name in one.groups]
        is_first = name == "attention"
        produced = _median(between(m.began, m.middle if is_first else m.ended) for m in marks)
        used = _median(
            between(m.backward_began, m.backward_middle)
            - _again_s(m, between, "mlp", "mlp" + CHEAP)
            for m in marks
        )
        # What it takes to run it again: measured if it did, else as long as its forward.
        alone_s = [_again_s(m, between, name) for m in marks if name in m.again] or [
            between(m.began, m.middle) if is_first else between(m.middle, m.ended) for m in marks
        ]
        cheap = [_again_s(m, between, name + CHEAP) for m in marks if name + CHEAP in m.again] or [
            sum(between(*span) for span in one.cheap) for one in own
        ]
        cheap_bytes = max(0, *(one.cheap_bytes for one in own))
        is_part = can_be and name in _PARTS
        found.append(
            GroupProfile(
                name=name,
                movable_bytes=max(one.movable_bytes for one in own),
                kept_bytes=max(one.kept_bytes for one in own),
                num_storages=max(one.num_storages for one in own),
                produced_s=produced,
                first_use_s=max(used, 0.0) if is_first else 0.0,
                recompute_s=_median(alone_s) if is_part else None,
                input_bytes=max(m.input_bytes if is_first else m.middle_bytes for m in marks),
                cheap_bytes=cheap_bytes,
                cheap_s=_median(cheap) if is_part else None,
                cheap_extra_bytes=max(one.cheap_extra_bytes for one in own),
            )
        )
    return tuple(found)


def _again_s(marks: LayerMarks, between: Seconds, *names: str) -> float:
    """Seconds that these took in backward."""
    return sum(between(*span) for name in names for span in marks.again.get(name, ()))


def _remembered(
    group: GroupProfile, known: GroupProfile | None, marks: list[LayerMarks]
) -> GroupProfile:
    """What a group saves, as it was known, if it or a part of it was recomputed now."""
    names = {group.name, group.name + CHEAP}
    if known is None or all(names.isdisjoint(one.again) for one in marks):
        return group
    return dataclasses.replace(
        known,
        produced_s=group.produced_s,
        first_use_s=group.first_use_s,
        recompute_s=group.recompute_s,
        input_bytes=group.input_bytes,
        cheap_s=known.cheap_s if group.name in marks[0].again else group.cheap_s,
    )


def _scaled(group: GroupProfile, scale: float) -> GroupProfile:
    return dataclasses.replace(
        group,
        movable_bytes=round(group.movable_bytes * scale),
        kept_bytes=round(group.kept_bytes * scale),
        produced_s=group.produced_s * scale,
        first_use_s=group.first_use_s * scale,
        recompute_s=None if group.recompute_s is None else group.recompute_s * scale,
        input_bytes=round(group.input_bytes * scale),
        cheap_bytes=round(group.cheap_bytes * scale),
        cheap_s=None if group.cheap_s is None else group.cheap_s * scale,
        cheap_extra_bytes=round(group.cheap_extra_bytes * scale),
    )


def _median(values: Iterable[float]) -> float:
    values = list(values)
    return float(statistics.median(values)) if values else 0.0
