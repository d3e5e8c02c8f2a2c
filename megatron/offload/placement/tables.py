# SPDX-License-Identifier: Apache-2.0
"""A stage's profile as tables of numbers, for the compiled simulation: `StageTables`, `tables_of`.

`Timeline` makes them once for a profile; the simulation only reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.offload.placement.passes import passes_of_step
from megatron.offload.placement.profile import GroupProfile, LayerProfile, StageProfile

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_PIECES = 8  # that a group's bytes move in
_MOST_TRANSFERS = 4000  # that a simulated step should have: more pieces where there are few groups
_SMALL_STEP = 600  # groups of all micro-batches up to which every micro-batch is simulated
_STEADY = 3  # micro-batches (with chunks: groups of them) beyond those that fill the pipeline

# Columns of the tables
CHUNK_BEFORE_S, CHUNK_AFTER_S, CHUNK_BACKWARD_BEFORE_S, CHUNK_BACKWARD_AFTER_S = 0, 1, 2, 3
CHUNK_FIXED_BYTES = 4
LAYER_FORWARD_S, LAYER_BACKWARD_S, LAYER_RECOMPUTE_S, LAYER_INPUT_BYTES = 0, 1, 2, 3
GROUP_MOVABLE_BYTES, GROUP_KEPT_BYTES, GROUP_PRODUCED_S, GROUP_USE_S = 0, 1, 2, 3
GROUP_RECOMPUTE_S, GROUP_PIECES, GROUP_STORAGES = 4, 5, 6  # storages: in a piece
GROUP_INPUT_BYTES, GROUP_CHEAP_BYTES, GROUP_CHEAP_S, GROUP_CHEAP_EXTRA_BYTES = 7, 8, 9, 10
TIER_WRITE, TIER_READ, TIER_SHARED, TIER_LATENCY_S, TIER_CAPACITY_BYTES = 0, 1, 2, 3, 4
# Places in `StageTables.figures`
STEP_FIXED_S, TRANSIENT_BYTES, INFLIGHT_BYTES, NUM_MORE, STEADY_COUNT, ALLOCATOR_SLACK = range(6)


class StageTables(NamedTuple):
    """Rows: stages' passes, chunks, layers, groups of all layers in order, tiers.

    A piece is what moves at a time: a storage, or several of a group taken together.
    """

    passes: Ints  # [stage, place, 3]: is backward, chunk, micro-batch
    own: int  # this stage
    micro_batches: int  # that are simulated; figures[NUM_MORE] take as long as those in the middle
    steady: Ints  # [2]: places of backward passes; figures[STEADY_COUNT] micro-batches apart
    chunk_layer: Ints  # [chunks + 1]: first layer
    layer_group: Ints  # [layers + 1]: first group
    chunks: Floats
    layers: Floats
    groups: Floats
    tiers: Floats
    figures: Floats
    chunk_with_loss: int  # -1: not on this stage


def tables_of(profile: StageProfile, *, all_micro_batches: bool = False) -> StageTables:
    """The tables of a profile.

    Args:
        all_micro_batches: simulate every one, not only as many as it takes to see a steady state.
    """
    layout = profile.layout
    groups = [group for layer in profile.layers for group in layer.groups]
    enough = _num_simulated(profile)
    simulated = profile.num_micro_batches if all_micro_batches else enough
    own = [
        [tuple(one) for one in passes_of_step(layout._replace(stage=stage), simulated)]
        for stage in range(layout.num_stages)
    ]
    passes = np.array(own, np.int64)
    steady, count = _steady(profile, passes[layout.stage], simulated)
    of_chunk = [sum(layer.chunk == c for layer in profile.layers) for c in range(layout.num_chunks)]
    return StageTables(
        passes=passes,
        own=layout.stage,
        micro_batches=simulated,
        steady=np.array(steady, np.int64),
        chunk_layer=_starts(of_chunk),
        layer_group=_starts([len(layer.groups) for layer in profile.layers]),
        chunks=_table(
            5,
            zip(
                profile.before_s,
                profile.after_s,
                profile.backward_before_s,
                profile.backward_after_s,
                profile.pass_fixed_bytes,
                strict=True,
            ),
        ),
        layers=_table(
            4,
            (
                (one.forward_s, one.backward_s, one.recompute_s or 0.0, one.input_bytes)
                for one in profile.layers
            ),
        ),
        groups=_table(
            11,
            (
                _group_row(group, produced_s, use_s, len(groups) * enough)
                for layer in profile.layers
                for group, produced_s, use_s in _in_order(layer)
            ),
        ),
        tiers=_table(
            5,
            (
                (
                    tier.write_bytes_per_s,
                    tier.read_bytes_per_s,
                    tier.shared_bytes_per_s or tier.read_bytes_per_s + tier.write_bytes_per_s,
                    tier.latency_s,
                    np.inf if tier.capacity_bytes is None else tier.capacity_bytes,
                )
                for tier in profile.tiers
            ),
        ),
        figures=np.array(
            [
                profile.step_fixed_s,
                profile.transient_bytes,
                profile.inflight_bytes,
                profile.num_micro_batches - simulated,
                count,
                profile.allocator_slack,
            ],
            np.float64,
        ),
        chunk_with_loss=layout.num_chunks - 1 if layout.stage == layout.num_stages - 1 else -1,
    )


def _table(columns: int, rows: Any) -> Floats:
    return np.array(list(rows), np.float64).reshape(-1, columns)


def _starts(lengths: list[int]) -> Ints:
    return np.array([0, *np.cumsum(np.array(lengths, np.int64))], np.int64)


def _group_row(group: GroupProfile, produced_s: float, use_s: float, num_groups: int) -> Any:
    storages = max(group.num_storages, 1)
    # All groups of all micro-batches together stay below the most transfers.
    pieces = min(storages, _MOST_PIECES, max(_MOST_TRANSFERS // num_groups, 1))
    recompute_s = group.recompute_s or 0.0
    sizes = group.movable_bytes, group.kept_bytes
    seconds = produced_s, use_s, recompute_s
    cheap = group.cheap_bytes, group.cheap_s or 0.0, group.cheap_extra_bytes
    return *sizes, *seconds, pieces, storages / pieces, group.input_bytes, *cheap


def _in_order(layer: LayerProfile) -> list[tuple[GroupProfile, float, float]]:
    """Groups with when they are produced, never decreasing, and used, never increasing."""
    produced, used = [], []
    latest = 0.0
    for group in layer.groups:
        latest = min(max(latest, group.produced_s), layer.forward_s)
        produced.append(latest)
    latest = 0.0
    for group in reversed(layer.groups):
        latest = min(max(latest, group.first_use_s), layer.backward_s)
        used.append(latest)
    return list(zip(layer.groups, produced, reversed(used), strict=True))


def _num_simulated(profile: StageProfile) -> int:
    """Micro-batches that fill the pipeline, and some more."""
    layout = profile.layout
    group = layout.group_size if layout.num_chunks > 1 else 1
    later = layout.num_stages - layout.stage - 1
    filling = later if layout.num_chunks == 1 else -(-2 * later // layout.num_chunks) + group
    needed = -(-filling // group) * group + _STEADY * group
    # With chunks the order of passes repeats only for whole groups.
    whole = profile.num_micro_batches % group == 0
    num_groups = sum(len(layer.groups) for layer in profile.layers)
    if whole and num_groups * profile.num_micro_batches > _SMALL_STEP:
        return min(needed, profile.num_micro_batches)
    return profile.num_micro_batches


def _steady(profile: StageProfile, passes: Ints, simulated: int) -> tuple[list[int], int]:
    """Two backward passes between which the step repeats itself, and the micro-batches between."""
    layout = profile.layout
    count = layout.group_size if layout.num_chunks > 1 else 1
    last_forward = int(np.flatnonzero(passes[:, 0] == 0)[-1])
    backward = [int(n) for n in np.flatnonzero(passes[:, 0] == 1) if n <= last_forward + 1]
    apart = count * layout.num_chunks
    if simulated == profile.num_micro_batches:
        return [0, 0], 1
    return [backward[-1 - apart], backward[-1]], count
