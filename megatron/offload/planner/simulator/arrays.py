# SPDX-License-Identifier: Apache-2.0
"""A stage's profile as tables of numbers, for the compiled simulation: `StageArrays`, `arrays_of`.

`Timeline` makes them once for a profile; the simulation only reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.offload.planner.profile.pipeline_schedule import pipeline_schedule
from megatron.offload.planner.profile.stage_profile import LayerProfile, PartProfile, StageProfile

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = Any  # a structured array of one of the dtypes here, in `transfers` or in `instructions`
Row = Any  # one of its rows: its fields are attributes where numba compiles

_MOST_PIECES = 8  # that a part's bytes move in
_MOST_TRANSFERS = 4000  # that a simulated step should have: more pieces where there are few parts
_SMALL_STEP = 600  # parts of all micro-batches up to which every micro-batch is simulated
_STEADY = 3  # micro-batches (with chunks: parts of them) beyond those that fill the pipeline


def _row(*names: str, **others: type) -> np.dtype[np.void]:
    """A row of floats, and of what else is named."""
    return np.dtype([*((name, np.float64) for name in names), *others.items()])


CHUNK = _row(
    *("before_s", "after_s", "backward_before_s", "backward_after_s", "fixed_bytes"),
    "passed_on_bytes",  # to the chunk after it
)
LAYER = _row("forward_s", "backward_s", "recompute_s", "input_bytes", "movable_input_bytes")
PART = _row(
    *("movable_bytes", "resident_bytes", "produced_s", "first_use_s", "recompute_s"),
    *("input_bytes", "movable_input_bytes"),
    *("selective_bytes", "selective_s", "selective_extra_bytes"),
    *("spared_bytes", "replay_s", "replay_extra_bytes"),
    *("codec_spared_bytes", "codec_s", "exact_extra_bytes", "exact_selective_bytes"),
    "storages_each",  # in a piece
    num_pieces=np.int64,
)
TIER = _row(
    *("write_bytes_per_s", "read_bytes_per_s"),
    "shared_bytes_per_s",  # while both go on
    *("latency_s", "capacity_bytes"),
    by_device=np.int64,  # 1: a device that runs behind its host makes the copies
)


class StageArrays(NamedTuple):
    """A profile as the simulation reads it. Seconds and bytes.

    A piece is what moves at a time: a storage, or several of a part taken together.
    """

    passes: Ints  # [stage, place, 3]: is backward, chunk, micro-batch
    own: int  # this stage
    micro_batches: int  # that are simulated; `num_more` take as long as those in the middle
    num_more: int
    steady: Ints  # [2]: places of backward passes, `steady_count` micro-batches apart
    steady_count: int
    chunk_layer: Ints  # [chunks + 1]: first layer
    layer_part: Ints  # [layers + 1]: first part
    chunks: Rows  # [chunks] of CHUNK
    layers: Rows  # [layers] of LAYER
    parts: Rows  # [parts] of PART
    tiers: Rows  # [tiers] of TIER
    step_fixed_s: float
    transient_bytes: float
    head_bytes: float
    inflight_bytes: float
    by_operation: int  # 1: pieces are handed over while their layer runs, else at its end
    allocator_slack: float
    chunk_with_loss: int  # -1: not on this stage
    lead_layers: int  # 0: the host computes


def arrays_of(profile: StageProfile, *, all_micro_batches: bool = False) -> StageArrays:
    """Makes the arrays that the simulation reads from a profile.

    Args:
        all_micro_batches: simulate every one, not only as many as it takes to see a steady state.
    """
    position = profile.position
    parts = [part for layer in profile.layers for part in layer.parts]
    enough = _num_simulated(profile)
    simulated = profile.num_micro_batches if all_micro_batches else enough
    own = [
        [tuple(one) for one in pipeline_schedule(position._replace(stage=stage), simulated)]
        for stage in range(position.num_stages)
    ]
    passes = np.array(own, np.int64)
    steady, count = _steady(profile, passes[position.stage], simulated)
    of_chunk = [
        sum(layer.chunk == c for layer in profile.layers) for c in range(position.num_chunks)
    ]
    return StageArrays(
        passes=passes,
        own=position.stage,
        micro_batches=simulated,
        num_more=profile.num_micro_batches - simulated,
        steady=np.array(steady, np.int64),
        steady_count=count,
        chunk_layer=_starts(of_chunk),
        layer_part=_starts([len(layer.parts) for layer in profile.layers]),
        chunks=_table(
            CHUNK,
            zip(
                profile.before_s,
                profile.after_s,
                profile.backward_before_s,
                profile.backward_after_s,
                profile.pass_fixed_bytes,
                profile.passed_on_bytes or (0,) * position.num_chunks,
                strict=True,
            ),
        ),
        layers=_table(
            LAYER,
            (
                (
                    *(one.forward_s, one.backward_s, one.recompute_s or 0.0),
                    *(one.input_bytes, one.movable_input_bytes),
                )
                for one in profile.layers
            ),
        ),
        parts=_table(
            PART,
            (
                _part_row(part, produced_s, use_s, len(parts) * enough)
                for layer in profile.layers
                for part, produced_s, use_s in _in_order(layer)
            ),
        ),
        tiers=_table(
            TIER,
            (
                (
                    tier.write_bytes_per_s,
                    tier.read_bytes_per_s,
                    tier.shared_bytes_per_s or tier.read_bytes_per_s + tier.write_bytes_per_s,
                    tier.latency_s,
                    np.inf if tier.capacity_bytes is None else tier.capacity_bytes,
                    int(tier.name == "host" and profile.lead_layers > 0),
                )
                for tier in profile.tiers
            ),
        ),
        step_fixed_s=float(profile.step_fixed_s),
        transient_bytes=float(profile.transient_bytes),
        head_bytes=float(profile.head_bytes),
        inflight_bytes=float(profile.inflight_bytes),
        by_operation=int(profile.hands_over == "operation"),
        allocator_slack=float(profile.allocator_slack),
        chunk_with_loss=position.num_chunks - 1
        if position.stage == position.num_stages - 1
        else -1,
        lead_layers=int(profile.lead_layers),
    )


def _table(kind: np.dtype[np.void], rows: Iterable[tuple[float, ...]]) -> Rows:
    return np.array(list(rows), kind)


def _starts(lengths: list[int]) -> Ints:
    return np.array([0, *np.cumsum(np.array(lengths, np.int64))], np.int64)


def _part_row(part: PartProfile, produced_s: float, use_s: float, num_parts: int) -> Any:
    storages = max(part.num_storages, 1)
    # All parts of all micro-batches together stay below the most transfers.
    pieces = min(storages, _MOST_PIECES, max(_MOST_TRANSFERS // num_parts, 1))
    recompute_s = part.recompute_s or 0.0
    sizes = part.movable_bytes, part.resident_bytes
    seconds = produced_s, use_s, recompute_s
    selective = part.selective_bytes, part.selective_s or 0.0, part.selective_extra_bytes
    inputs = part.input_bytes, part.movable_input_bytes
    replay = part.spared_bytes, part.replay_s, part.replay_extra_bytes
    codec = part.codec_spared_bytes, part.codec_s
    exact = part.exact_extra_bytes, part.exact_selective_bytes
    moved = storages / pieces, pieces
    return *sizes, *seconds, *inputs, *selective, *replay, *codec, *exact, *moved


def _in_order(layer: LayerProfile) -> list[tuple[PartProfile, float, float]]:
    """Parts with when they are produced, never decreasing, and used, never increasing."""
    produced, used = [], []
    latest = 0.0
    for part in layer.parts:
        latest = min(max(latest, part.produced_s), layer.forward_s)
        produced.append(latest)
    latest = 0.0
    for part in reversed(layer.parts):
        latest = min(max(latest, part.first_use_s), layer.backward_s)
        used.append(latest)
    return list(zip(layer.parts, produced, reversed(used), strict=True))


def _num_simulated(profile: StageProfile) -> int:
    """Micro-batches that fill the pipeline, and some more; of layer-major steps all."""
    position = profile.position
    if position.units:
        return profile.num_micro_batches
    part = position.group_size if position.num_chunks > 1 else 1
    later = position.num_stages - position.stage - 1
    filling = later if position.num_chunks == 1 else -(-2 * later // position.num_chunks) + part
    needed = -(-filling // part) * part + _STEADY * part
    # With chunks the order of passes repeats only for whole parts.
    whole = profile.num_micro_batches % part == 0
    num_parts = sum(len(layer.parts) for layer in profile.layers)
    if whole and num_parts * profile.num_micro_batches > _SMALL_STEP:
        return min(needed, profile.num_micro_batches)
    return profile.num_micro_batches


def _steady(profile: StageProfile, passes: Ints, simulated: int) -> tuple[list[int], int]:
    """Two backward passes between which the step repeats itself, and the micro-batches between."""
    position = profile.position
    count = position.group_size if position.num_chunks > 1 else 1
    last_forward = int(np.flatnonzero(passes[:, 0] == 0)[-1])
    backward = [int(n) for n in np.flatnonzero(passes[:, 0] == 1) if n <= last_forward + 1]
    apart = count * position.num_chunks
    if simulated == profile.num_micro_batches:
        return [0, 0], 1
    return [backward[-1 - apart], backward[-1]], count
