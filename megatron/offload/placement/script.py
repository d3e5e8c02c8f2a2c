# SPDX-License-Identifier: Apache-2.0
"""What a stage does in a pass with given choices, instruction by instruction: `script_of`.

Part of the simulation, see `timeline`. All micro-batches follow the same script, with other pieces.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.placement import tables as t
from megatron.offload.placement.compiled import compiled
from megatron.offload.placement.flow import BYTES, NUM_PIECE_COLUMNS, STATE, STORAGES, TIER
from megatron.offload.placement.tables import Floats, Ints, StageTables

# Choices for a group. From `FIRST_TIER` on: the tier of that number. To `KEEP` or a tier `CHEAP` is
# added where the group's cheap operations are recomputed and the rest is kept or moved.
KEEP, RECOMPUTE_GROUP, RECOMPUTE_LAYER, FIRST_TIER = 0, 1, 2, 3
CHEAP = 8

# Kinds of instructions, and what they are about
COMPUTE, RECOMPUTE = 0, 1  # layer (-1: outside), seconds
MEMORY = 2  # bytes more (or fewer, below 0)
HAND_OVER, USE, DROP = 3, 4, 5  # piece


@compiled
def new_pieces(stage: StageTables, choices: Ints) -> tuple[Ints, Floats]:
    """The pieces of one micro-batch that go to tiers.

    Returns:
        The first of each chunk, and rows of `pieces` (see `flow`) with the chunk as state.
    """
    chunks = stage.chunks.shape[0]
    number = 0
    for group in range(choices.shape[0]):
        if choices[group] % CHEAP >= FIRST_TIER:
            number += int(stage.groups[group, t.GROUP_PIECES])
    first_piece = np.zeros(chunks + 1, np.int64)
    pieces = np.zeros((number, NUM_PIECE_COLUMNS))
    at = 0
    for chunk in range(chunks):
        first_group = stage.layer_group[stage.chunk_layer[chunk]]
        for group in range(first_group, stage.layer_group[stage.chunk_layer[chunk + 1]]):
            if choices[group] % CHEAP < FIRST_TIER:
                continue
            number = int(stage.groups[group, t.GROUP_PIECES])
            size = _moving_bytes(stage.groups[group], choices[group])
            for piece in range(number):
                pieces[at, STATE] = chunk
                pieces[at, BYTES] = _piece_bytes(size, piece, number)
                pieces[at, TIER] = choices[group] % CHEAP - FIRST_TIER
                pieces[at, STORAGES] = stage.groups[group, t.GROUP_STORAGES]
                at += 1
        first_piece[chunk + 1] = at
    return first_piece, pieces


@compiled
def _moving_bytes(group: Floats, choice: int) -> float:
    """Of a group's movable bytes, those that its cheap operations do not produce again."""
    return group[t.GROUP_MOVABLE_BYTES] - (group[t.GROUP_CHEAP_BYTES] if choice >= CHEAP else 0.0)


@compiled
def _piece_bytes(size: float, piece: int, number: int) -> float:
    """Equal parts, the last one with the rest."""
    part = np.floor(size / number)
    return size - part * (number - 1) if piece == number - 1 else part


@compiled
def pass_seconds(stage: StageTables, choices: Ints) -> tuple[Floats, Floats]:
    """Of a forward and of a backward pass without waits, by chunk."""
    chunks = stage.chunks.shape[0]
    forward_s, backward_s = np.empty(chunks), np.empty(chunks)
    for chunk in range(chunks):
        of_chunk = stage.chunks[chunk]
        forward_s[chunk] = of_chunk[t.CHUNK_BEFORE_S] + of_chunk[t.CHUNK_AFTER_S]
        backward_s[chunk] = of_chunk[t.CHUNK_BACKWARD_BEFORE_S] + of_chunk[t.CHUNK_BACKWARD_AFTER_S]
        for layer in range(stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]):
            forward_s[chunk] += stage.layers[layer, t.LAYER_FORWARD_S]
            backward_s[chunk] += stage.layers[layer, t.LAYER_BACKWARD_S]
            for group in range(stage.layer_group[layer], stage.layer_group[layer + 1]):
                if choices[group] == RECOMPUTE_LAYER:
                    backward_s[chunk] += stage.layers[layer, t.LAYER_RECOMPUTE_S]
                    break
                if choices[group] == RECOMPUTE_GROUP:
                    backward_s[chunk] += stage.groups[group, t.GROUP_RECOMPUTE_S]
                elif choices[group] >= CHEAP:
                    backward_s[chunk] += stage.groups[group, t.GROUP_CHEAP_S]
    return forward_s, backward_s


@compiled
def script_of(stage: StageTables, choices: Ints) -> tuple[Ints, Floats, Ints]:
    """The instructions of all chunks' passes.

    Returns:
        Rows of kind and layer or piece (counted from the pass's first); seconds or bytes; where
        the forward and the backward pass of each chunk begin, and the end.
    """
    chunks, layers = stage.chunks.shape[0], stage.layers.shape[0]
    most = 12 * chunks + 12 * layers
    for group in range(choices.shape[0]):
        most += 8 + 4 * int(stage.groups[group, t.GROUP_PIECES])
    script, amounts = np.zeros((most, 2), np.int64), np.zeros(most)
    begins = np.zeros(2 * chunks + 1, np.int64)
    at = 0
    for chunk in range(chunks):
        of_chunk = stage.chunks[chunk]
        first, end = stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]
        at = _add(script, amounts, at, MEMORY, 0, of_chunk[t.CHUNK_FIXED_BYTES])
        at = _add(script, amounts, at, COMPUTE, -1, of_chunk[t.CHUNK_BEFORE_S])
        piece = 0
        for layer in range(first, end):
            at, piece = _forward(stage, choices, script, amounts, at, layer, piece)
        at = _add(script, amounts, at, COMPUTE, -1, of_chunk[t.CHUNK_AFTER_S])
        begins[2 * chunk + 1] = at
        at = _add(script, amounts, at, COMPUTE, -1, of_chunk[t.CHUNK_BACKWARD_BEFORE_S])
        for layer in range(end - 1, first - 1, -1):
            at, piece = _backward(stage, choices, script, amounts, at, layer, piece)
        at = _add(script, amounts, at, COMPUTE, -1, of_chunk[t.CHUNK_BACKWARD_AFTER_S])
        at = _add(script, amounts, at, MEMORY, 0, -of_chunk[t.CHUNK_FIXED_BYTES])
        begins[2 * chunk + 2] = at
    return script, amounts, begins


@compiled
def _add(script: Ints, amounts: Floats, at: int, kind: int, where: int, amount: float) -> int:
    """Appends an instruction, unless it would do nothing."""
    if kind <= MEMORY and amount == 0:
        return at
    script[at, 0], script[at, 1], amounts[at] = kind, where, amount
    return at + 1


@compiled
def _is_recomputed(stage: StageTables, choices: Ints, layer: int) -> bool:
    """As a whole."""
    first = stage.layer_group[layer]
    return first < stage.layer_group[layer + 1] and choices[first] == RECOMPUTE_LAYER


@compiled
def _forward(
    stage: StageTables,
    choices: Ints,
    script: Ints,
    amounts: Floats,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Bytes are there from when their group begins to be produced; all are handed over at the end.

    Returns:
        Where the script goes on, and the next piece.
    """
    row = stage.layers[layer]
    groups = range(stage.layer_group[layer], stage.layer_group[layer + 1])
    if _is_recomputed(stage, choices, layer):
        at = _add(script, amounts, at, MEMORY, 0, row[t.LAYER_INPUT_BYTES])
        return _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_FORWARD_S]), piece
    now = 0.0
    for group in groups:
        of_group = stage.groups[group]
        size = of_group[t.GROUP_KEPT_BYTES]
        if choices[group] == RECOMPUTE_GROUP:
            size += of_group[t.GROUP_INPUT_BYTES]
        else:
            size += _moving_bytes(of_group, choices[group])
        at = _add(script, amounts, at, MEMORY, 0, size)
        at = _add(script, amounts, at, COMPUTE, layer, of_group[t.GROUP_PRODUCED_S] - now)
        now = of_group[t.GROUP_PRODUCED_S]
    at = _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_FORWARD_S] - now)
    for group in groups:
        if choices[group] % CHEAP >= FIRST_TIER:
            for _ in range(int(stage.groups[group, t.GROUP_PIECES])):
                at = _add(script, amounts, at, HAND_OVER, piece, 0.0)
                piece += 1
    return at, piece


@compiled
def _backward(
    stage: StageTables,
    choices: Ints,
    script: Ints,
    amounts: Floats,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Group by group, the last one first, and piece by piece where they come back from a tier.

    Returns:
        Where the script goes on, and the piece that was used last.
    """
    row = stage.layers[layer]
    first = stage.layer_group[layer]
    groups = stage.groups[first : stage.layer_group[layer + 1]]
    if _is_recomputed(stage, choices, layer):
        size = groups[:, t.GROUP_MOVABLE_BYTES].sum() + groups[:, t.GROUP_KEPT_BYTES].sum()
        at = _add(script, amounts, at, MEMORY, 0, size)
        at = _add(script, amounts, at, RECOMPUTE, layer, row[t.LAYER_RECOMPUTE_S])
        at = _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_BACKWARD_S])
        size += row[t.LAYER_INPUT_BYTES]
        return _add(script, amounts, at, MEMORY, 0, -size), piece
    now = 0.0
    for number in range(groups.shape[0] - 1, -1, -1):
        group, choice = groups[number], choices[first + number]
        at = _add(script, amounts, at, COMPUTE, layer, group[t.GROUP_USE_S] - now)
        now = group[t.GROUP_USE_S]
        if choice == RECOMPUTE_GROUP:
            again = group[t.GROUP_MOVABLE_BYTES] - group[t.GROUP_INPUT_BYTES]
            at = _add(script, amounts, at, MEMORY, 0, again)
            at = _add(script, amounts, at, RECOMPUTE, layer, group[t.GROUP_RECOMPUTE_S])
        elif choice >= CHEAP:
            again = group[t.GROUP_CHEAP_BYTES] + group[t.GROUP_CHEAP_EXTRA_BYTES]
            at = _add(script, amounts, at, MEMORY, 0, again)
            at = _add(script, amounts, at, RECOMPUTE, layer, group[t.GROUP_CHEAP_S])
        until = groups[number - 1, t.GROUP_USE_S] if number > 0 else row[t.LAYER_BACKWARD_S]
        freed = group[t.GROUP_KEPT_BYTES]
        if choice >= CHEAP:
            freed += group[t.GROUP_CHEAP_EXTRA_BYTES]
        if choice % CHEAP >= FIRST_TIER:
            freed += group[t.GROUP_MOVABLE_BYTES] - _moving_bytes(group, choice)
            pieces = int(group[t.GROUP_PIECES])
            for _ in range(pieces):
                piece -= 1
                at = _add(script, amounts, at, USE, piece, 0.0)
                at = _add(script, amounts, at, COMPUTE, layer, (until - now) / pieces)
                at = _add(script, amounts, at, DROP, piece, 0.0)
        else:
            at = _add(script, amounts, at, COMPUTE, layer, until - now)
            freed += group[t.GROUP_MOVABLE_BYTES]
        at = _add(script, amounts, at, MEMORY, 0, -freed)
        now = until
    return _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_BACKWARD_S] - now), piece
