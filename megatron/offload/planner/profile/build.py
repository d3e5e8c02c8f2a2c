# SPDX-License-Identifier: Apache-2.0
"""Makes a `StageProfile` of what a profiler noted: `profile_of`, `passes_s`, `tier_profiles`.

The planner calls them between steps. Durations are medians over micro-batches (of two,
the shorter one), so that those that were disturbed do not count; bytes are the largest.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.policy import SELECTIVE, WHOLE_LAYER, Placement
from megatron.offload.activations.saved.scope import name_after
from megatron.offload.config import DEFAULT_INFLIGHT_BYTES
from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    HandsOver,
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
    tokens_of,
)
from megatron.offload.planner.profile.timings import (
    LayerTimings,
    PartTimings,
    PassTimings,
    TimeSpan,
    Timestamp,
)
from megatron.offload.tiers.tier import Tier

Seconds = Callable[[Timestamp | None, Timestamp | None], float]
Rates = tuple[float | None, float | None]  # bytes a second written and read; None: not known

_PARTS = ("attention", "mlp")
_ORDER = (*_PARTS, WHOLE_LAYER)
_SLOWEST_BYTES_PER_S = 1.0  # of a tier that nothing has been measured of, and that was not used


class _May(NamedTuple):
    """What may become of layers."""

    recompute: bool
    move_inputs: bool  # of what is recomputed


def profile_of(
    steps: Sequence[Sequence[PassTimings]],
    position: PipelinePosition,
    tiers: Sequence[TierProfile],
    *,
    seconds_between: Callable[[object, object], float],
    waits_s: Sequence[float] = (),
    encodings: Sequence[TimeSpan] = (),
    step_fixed_s: float,
    recomputes: bool,
    moves_inputs: bool = True,
    previous: StageProfile | None = None,
    plan: Plan | None = None,
    sizes: dict[str, int] | None = None,
    inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    hands_over: HandsOver = "layer",
    head_bytes: int = 0,
    source: str = "",
) -> StageProfile:
    """Puts a stage's profile together from measured steps.

    Args:
        steps: complete passes of at least one step.
        layout: of the stage.
        tiers: see `tier_profiles`.
        seconds_between: two timestamps.
        waits_s: of each time that compute waited for the engine.
        encodings: each time that a codec encoded a storage, see `Profiler`.
        step_fixed_s: seconds of a step outside of its passes.
        recomputes: whether layers may be recomputed at all.
        moves_inputs: whether what that starts from may wait on a tier.
        previous: an earlier profile, for what layers save that were recomputed in these steps, or
            kept without replay or a codec.
        plan: that the steps followed; None: all that could be was replayed and encoded.
        head_bytes: as measured; 0: as the earlier profile says, in proportion to the tokens.
        sizes, inflight_bytes, hands_over, source: see `StageProfile`.
    """

    def between(earlier: Timestamp | None, later: Timestamp | None) -> float:
        if earlier is None or later is None:
            return 0.0
        others_s = sum(waits_s[earlier.num_waits : later.num_waits])
        for one in encodings[earlier.num_encodings : later.num_encodings]:
            others_s += between(*one)
        return max(seconds_between(earlier.timestamp, later.timestamp) - others_s, 0.0)

    passes = [one for step in steps for one in step]
    by_chunk = [_alike([p for p in passes if p.chunk == c]) for c in range(position.num_chunks)]
    layers: list[LayerProfile] = []
    may = _May(recomputes, moves_inputs)
    for chunk, own in enumerate(by_chunk):
        earlier = {
            one.name: one for one in (previous.layers if previous else ()) if one.chunk == chunk
        }
        found = _between_layers(chunk, 0, own, between)
        for number, alike in enumerate(zip(*(one.layers for one in own), strict=True), 1):
            found.append(_layer(chunk, list(alike), own, between, may, earlier))
            found += _between_layers(chunk, number, own, between)
        layers += [_as_if_replayed(one, earlier.get(one.name), plan) for one in found]

    before = [_seconds_outside(own, 0, between) for own in by_chunk]
    after = [_seconds_outside(own, -1, between) for own in by_chunk]
    return StageProfile(
        position=position,
        num_micro_batches=max(sum(one.chunk == 0 for one in step) for step in steps),
        layers=tuple(layers),
        tiers=tuple(tiers),
        before_s=tuple(forward_s for forward_s, _ in before),
        after_s=tuple(forward_s for forward_s, _ in after),
        backward_before_s=tuple(backward_s for _, backward_s in after),
        backward_after_s=tuple(backward_s for _, backward_s in before),
        step_fixed_s=max(step_fixed_s, 0.0),
        pass_fixed_bytes=tuple(max(one.held_bytes for one in own) for own in by_chunk),
        passed_on_bytes=_passed_on_bytes(by_chunk) if position.units else (),
        inflight_bytes=inflight_bytes,
        hands_over=hands_over,
        head_bytes=head_bytes or _head_bytes(previous, sizes or {}),
        sizes=dict(sizes or {}),
        source=source,
    )


def _head_bytes(previous: StageProfile | None, sizes: Mapping[str, int]) -> int:
    if previous is None:
        return 0
    scale = tokens_of(sizes) / (tokens_of(previous.sizes) or 1) or 1
    return round(previous.head_bytes * scale)


def _alike(passes: Sequence[PassTimings]) -> list[PassTimings]:
    """The passes that ran the most layers, the same ones: LayerDrop leaves some out at random."""
    names = [tuple(layer.name for layer in one.layers) for one in passes]
    most = max(names, key=lambda found: (len(found), names.count(found)), default=())
    return [one for one, found in zip(passes, names, strict=True) if found == most]


def passes_s(
    steps: Sequence[Sequence[PassTimings]], seconds: Callable[[object, object], float]
) -> float:
    """Seconds that the passes of a step take together, waits included."""
    return statistics.median(
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
    timings: list[LayerTimings],
    passes: list[PassTimings],
    between: Seconds,
    may: _May,
    previous: Mapping[str, LayerProfile],
) -> LayerProfile:
    """One layer; `timings` has it once for each of `passes`."""
    name = timings[0].name
    input_bytes = max(one.input_bytes for one in timings)
    ran_again = [_again_s(m, between, WHOLE_LAYER) for m in timings if WHOLE_LAYER in m.again]
    forward_s = _median(between(m.began, m.ended) for m in timings)
    backward_s = _median(
        # Without a gradient for its input its backward ends with that of the pass.
        between(m.backward_began, m.backward_ended or p.backward_ended)
        - _again_s(m, between, *m.again)
        - sum(_replay_s(part, between) for part in m.parts.values())
        for m, p in zip(timings, passes, strict=True)
    )
    can_be = may.recompute and all(m.can_be_recomputed for m in timings)
    parts = _parts(timings, between, can_be, may.move_inputs)
    if name in previous:
        scale = input_bytes / max(previous[name].input_bytes, 1)
        known = {one.name: _scaled(one, scale) for one in previous[name].parts}
        if ran_again:  # nothing of it was saved
            parts = tuple(known.values())
        parts = tuple(_remembered(one, known.get(one.name), timings) for one in parts)
    recompute_s = _median(ran_again) if ran_again else forward_s
    return LayerProfile(
        chunk=chunk,
        name=name,
        forward_s=forward_s,
        backward_s=max(backward_s, 0.0),
        recompute_s=recompute_s if can_be else None,
        input_bytes=input_bytes,
        parts=parts,
        movable_input_bytes=may.move_inputs * max(m.movable_input_bytes for m in timings),
    )


def _between_layers(
    chunk: int, number: int, passes: list[PassTimings], between: Seconds
) -> list[LayerProfile]:
    """What runs after so many layers, where it saves anything, as one that is not recomputed."""
    saved = [one.between[number] for one in passes if number in one.between]
    if not saved:
        return []
    forward_s, backward_s = _seconds_between_layers(passes, number, between)
    part = PartProfile(
        name=WHOLE_LAYER,
        movable_bytes=max(one.movable_bytes for one in saved),
        resident_bytes=max(one.resident_bytes for one in saved),
        num_storages=max(one.num_storages for one in saved),
        produced_s=forward_s,
        first_use_s=0.0,
        **_replayed(saved, between),
    )
    backward_s = max(backward_s - part.replay_s, 0.0)
    name = name_after(passes[0].layers[number - 1].name if number else "")
    return [LayerProfile(chunk, name, forward_s, backward_s, None, 0, (part,))]


def _passed_on_bytes(by_chunk: Sequence[Sequence[PassTimings]]) -> tuple[int, ...]:
    """What each unit of a layer-major step hands to the next one: that one's first input."""
    taken = [max(one.layers[0].input_bytes for one in own) for own in by_chunk[1:]]
    return (*taken, 0)


def _seconds_outside(
    passes: list[PassTimings], number: int, between: Seconds
) -> tuple[float, float]:
    """Seconds before the first layer (0) or after the last (-1), where no layer above has them."""
    number_after_all = len(passes[0].layers)
    if number == -1 and not number_after_all:
        return 0.0, 0.0  # all of the pass is before
    number %= number_after_all + 1
    if any(number in one.between for one in passes):
        return 0.0, 0.0
    return _seconds_between_layers(passes, number, between)


def _seconds_between_layers(
    passes: list[PassTimings], number: int, between: Seconds
) -> tuple[float, float]:
    """Seconds, forward and backward, after so many layers and before the next one."""
    forward_s, backward_s = [], []
    for one in passes:
        before = one.layers[number - 1] if number else None
        after = one.layers[number] if number < len(one.layers) else None
        forward_s.append(
            between(before.ended if before else one.began, after.began if after else one.ended)
        )
        backward_s.append(
            between(
                after.backward_ended if after else one.backward_began,
                before.backward_began if before else one.backward_ended,
            )
        )
    return _median(forward_s), _median(backward_s)


def _parts(
    timings: list[LayerTimings], between: Seconds, can_be: bool, moves_inputs: bool
) -> tuple[PartProfile, ...]:
    can_be = can_be and all(one.has_parts and one.middle for one in timings)
    names = {name for one in timings for name in one.parts}
    found = []
    for name in (*_ORDER, *sorted(names.difference(_ORDER))):
        if name not in names:
            continue
        own = [one.parts[name] for one in timings if name in one.parts]
        is_first = name == "attention"
        produced = _median(between(m.began, m.middle if is_first else m.ended) for m in timings)
        used = _median(
            between(m.backward_began, m.backward_middle)
            - _again_s(m, between, "mlp", "mlp" + SELECTIVE)
            - (_replay_s(m.parts["mlp"], between) if "mlp" in m.parts else 0.0)
            for m in timings
        )
        # What it takes to run it again: measured if it did, else as long as its forward.
        alone_s = [_again_s(m, between, name) for m in timings if name in m.again] or [
            between(m.began, m.middle) if is_first else between(m.middle, m.ended) for m in timings
        ]
        selective = [
            _again_s(m, between, name + SELECTIVE) for m in timings if name + SELECTIVE in m.again
        ] or [sum(between(*span) for span in one.selective) for one in own]
        selective_bytes = max(0, *(one.selective_bytes for one in own))
        is_part = can_be and name in _PARTS
        found.append(
            PartProfile(
                name=name,
                movable_bytes=max(one.movable_bytes for one in own),
                resident_bytes=max(one.resident_bytes for one in own),
                num_storages=max(one.num_storages for one in own),
                produced_s=produced,
                first_use_s=max(used, 0.0) if is_first else 0.0,
                recompute_s=_median(alone_s) if is_part else None,
                input_bytes=max(m.input_bytes if is_first else m.middle_bytes for m in timings),
                selective_bytes=selective_bytes,
                exact_selective_bytes=max(0, *(one.exact_selective_bytes for one in own)),
                selective_s=_median(selective) if is_part else None,
                selective_extra_bytes=max(one.selective_extra_bytes for one in own),
                movable_input_bytes=moves_inputs
                * max(
                    m.movable_input_bytes if is_first else m.movable_middle_bytes for m in timings
                ),
                **_replayed(own, between),
            )
        )
    return tuple(found)


def _again_s(timings: LayerTimings, between: Seconds, *names: str) -> float:
    """Seconds that these took in backward."""
    return sum(between(*span) for name in names for span in timings.again.get(name, ()))


def _replay_s(part: PartTimings, between: Seconds) -> float:
    """Seconds that its replays took in backward, and decoding."""
    return sum(between(*span) for span in (*part.replays, *part.decodings))


def _replayed(own: Sequence[PartTimings], between: Seconds) -> dict[str, Any]:
    """What is replayed of a part, by the names of its profile."""
    replay_s = _median(sum(between(*span) for span in one.replays) for one in own)
    codec_s = _median(
        sum(between(*span) for span in (*one.encodings, *one.decodings))
        if one.codec_spared_bytes
        else 0.0
        for one in own
    )
    return {
        "replayed_bytes": max(one.replayed_bytes for one in own),
        "replay_s": replay_s + codec_s,
        "codec_s": codec_s,
        "codec_spared_bytes": max(one.codec_spared_bytes for one in own),
        "exact_extra_bytes": max(one.exact_extra_bytes for one in own),
        "replay_extra_bytes": max(one.replay_extra_bytes for one in own),
        "only_for_replay_bytes": max(one.only_for_replay_bytes for one in own),
    }


def _as_if_replayed(
    layer: LayerProfile, known: LayerProfile | None, plan: Plan | None
) -> LayerProfile:
    """The layer as it was known, where it was kept without replay, or left as it is by a codec."""
    if known is None or plan is None:
        return layer
    slower = layer.forward_s / known.forward_s if known.forward_s else 1.0
    before = {one.name: one for one in known.parts}
    lines = {one.key: one for one in plan.parts if not (one.replays and one.encodes)}
    again = {one.key for one in plan.parts if one.part.endswith(SELECTIVE)}
    parts = []
    for part in layer.parts:
        line, earlier = lines.get((layer.chunk, layer.name, part.name)), before.get(part.name)
        is_remembered = (layer.chunk, layer.name, part.name + SELECTIVE) in again
        if line is not None and earlier is not None and not is_remembered:
            known_bytes = earlier.exact_bytes if line.replays else earlier.all_bytes
            part = _part_as_if_replayed(part, earlier, known_bytes, slower)
        parts.append(part)
    return dataclasses.replace(layer, parts=tuple(parts))


def _part_as_if_replayed(
    part: PartProfile, known: PartProfile, known_bytes: int, slower: float
) -> PartProfile:
    saved_bytes = part.movable_bytes + part.resident_bytes
    return dataclasses.replace(
        _as_it_ran(_scaled(known, saved_bytes / max(known_bytes, 1)), part),
        selective_s=part.selective_s,
        # Both layers' seconds say how fast the machine was.
        replay_s=known.replay_s * slower,
        codec_s=known.codec_s * slower,
    )


def _remembered(
    part: PartProfile, known: PartProfile | None, timings: list[LayerTimings]
) -> PartProfile:
    """What a part saves, as it was known, if it or a part of it was recomputed now."""
    names = {part.name, part.name + SELECTIVE}
    if known is None or all(names.isdisjoint(one.again) for one in timings):
        return part
    selective_s = known.selective_s if part.name in timings[0].again else part.selective_s
    return dataclasses.replace(_as_it_ran(known, part), selective_s=selective_s)


def _as_it_ran(known: PartProfile, part: PartProfile) -> PartProfile:
    """What a part is known to save, with the seconds and the input that it has now."""
    return dataclasses.replace(
        known,
        produced_s=part.produced_s,
        first_use_s=part.first_use_s,
        recompute_s=part.recompute_s,
        input_bytes=part.input_bytes,
        movable_input_bytes=part.movable_input_bytes,
    )


def _scaled(part: PartProfile, scale: float) -> PartProfile:
    """The part with all bytes and seconds in proportion, and as many storages."""

    def scaled(name: str, number: float) -> float:
        if name.endswith("_bytes"):
            return round(number * scale)
        return number * scale if name.endswith("_s") else number

    return with_numbers(scaled, part)


def _median(values: Iterable[float]) -> float:
    values = list(values)
    return float(statistics.median_low(values)) if values else 0.0
