# SPDX-License-Identifier: Apache-2.0
"""What a stage does in a pass with given choices, instruction by instruction: `instructions_of`.

Part of the simulation, see `timeline`. All micro-batches follow the same script, with other pieces.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator import arrays as t
from megatron.offload.planner.simulator.arrays import Floats, Ints, StageArrays
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.transfers import (
    BYTES,
    NUM_PIECE_COLUMNS,
    STATE,
    STORAGES,
    TIER,
)

# Choices for a part. From `FIRST_TIER` on: the tier of that number. `SELECTIVE_OFFSET` is added to
# `KEEP` or a tier where its selective operations are recomputed and the rest is kept or moved.
KEEP, RECOMPUTE_PART, RECOMPUTE_LAYER, FIRST_TIER = 0, 1, 2, 3
SELECTIVE_OFFSET = 8

# Kinds of instructions, and what they are about
COMPUTE, RECOMPUTE = 0, 1  # layer (-1: outside), seconds
MEMORY = 2  # bytes more (or fewer, below 0)
HAND_OVER, USE, DROP = 3, 4, 5  # piece


@compiled
def new_pieces(stage: StageArrays, choices: Ints) -> tuple[Ints, Floats]:
    """The pieces of one micro-batch that go to tiers.

    Returns:
        The first of each chunk, and rows of `pieces` (see `flow`) with the chunk as state.
    """
    chunks = stage.chunks.shape[0]
    number = 0
    for part in range(choices.shape[0]):
        if choices[part] % SELECTIVE_OFFSET >= FIRST_TIER:
            number += int(stage.parts[part, t.PART_PIECES])
    first_piece = np.zeros(chunks + 1, np.int64)
    pieces = np.zeros((number, NUM_PIECE_COLUMNS))
    at = 0
    for chunk in range(chunks):
        first_part = stage.layer_part[stage.chunk_layer[chunk]]
        for part in range(first_part, stage.layer_part[stage.chunk_layer[chunk + 1]]):
            if choices[part] % SELECTIVE_OFFSET < FIRST_TIER:
                continue
            number = int(stage.parts[part, t.PART_PIECES])
            size = _moving_bytes(stage.parts[part], choices[part])
            for piece in range(number):
                pieces[at, STATE] = chunk
                pieces[at, BYTES] = _piece_bytes(size, piece, number)
                pieces[at, TIER] = choices[part] % SELECTIVE_OFFSET - FIRST_TIER
                pieces[at, STORAGES] = stage.parts[part, t.PART_STORAGES]
                at += 1
        first_piece[chunk + 1] = at
    return first_piece, pieces


@compiled
def _moving_bytes(part: Floats, choice: int) -> float:
    """Of a part's movable bytes, those that its selective operations do not produce again."""
    return part[t.PART_MOVABLE_BYTES] - (
        part[t.PART_SELECTIVE_BYTES] if choice >= SELECTIVE_OFFSET else 0.0
    )


@compiled
def _piece_bytes(size: float, piece: int, number: int) -> float:
    """Equal parts, the last one with the rest."""
    part = np.floor(size / number)
    return size - part * (number - 1) if piece == number - 1 else part


@compiled
def pass_seconds(stage: StageArrays, choices: Ints) -> tuple[Floats, Floats]:
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
            for part in range(stage.layer_part[layer], stage.layer_part[layer + 1]):
                if choices[part] == RECOMPUTE_LAYER:
                    backward_s[chunk] += stage.layers[layer, t.LAYER_RECOMPUTE_S]
                    break
                if choices[part] == RECOMPUTE_PART:
                    backward_s[chunk] += stage.parts[part, t.PART_RECOMPUTE_S]
                elif choices[part] >= SELECTIVE_OFFSET:
                    backward_s[chunk] += stage.parts[part, t.PART_SELECTIVE_S]
    return forward_s, backward_s


@compiled
def instructions_of(stage: StageArrays, choices: Ints) -> tuple[Ints, Floats, Ints]:
    """The instructions of all chunks' passes.

    Returns:
        Rows of kind and layer or piece (counted from the pass's first); seconds or bytes; where
        the forward and the backward pass of each chunk begin, and the end.
    """
    chunks, layers = stage.chunks.shape[0], stage.layers.shape[0]
    most = 12 * chunks + 12 * layers
    for part in range(choices.shape[0]):
        most += 8 + 4 * int(stage.parts[part, t.PART_PIECES])
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
def _is_recomputed(stage: StageArrays, choices: Ints, layer: int) -> bool:
    """As a whole."""
    first = stage.layer_part[layer]
    return first < stage.layer_part[layer + 1] and choices[first] == RECOMPUTE_LAYER


@compiled
def _forward(
    stage: StageArrays,
    choices: Ints,
    script: Ints,
    amounts: Floats,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Bytes are there from when their part begins to be produced; all are handed over at the end.

    Returns:
        Where the script goes on, and the next piece.
    """
    row = stage.layers[layer]
    parts = range(stage.layer_part[layer], stage.layer_part[layer + 1])
    if _is_recomputed(stage, choices, layer):
        at = _add(script, amounts, at, MEMORY, 0, row[t.LAYER_INPUT_BYTES])
        return _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_FORWARD_S]), piece
    now = 0.0
    for part in parts:
        of_part = stage.parts[part]
        size = of_part[t.PART_KEPT_BYTES]
        if choices[part] == RECOMPUTE_PART:
            size += of_part[t.PART_INPUT_BYTES]
        else:
            size += _moving_bytes(of_part, choices[part])
        at = _add(script, amounts, at, MEMORY, 0, size)
        at = _add(script, amounts, at, COMPUTE, layer, of_part[t.PART_PRODUCED_S] - now)
        now = of_part[t.PART_PRODUCED_S]
    at = _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_FORWARD_S] - now)
    for part in parts:
        if choices[part] % SELECTIVE_OFFSET >= FIRST_TIER:
            for _ in range(int(stage.parts[part, t.PART_PIECES])):
                at = _add(script, amounts, at, HAND_OVER, piece, 0.0)
                piece += 1
    return at, piece


@compiled
def _backward(
    stage: StageArrays,
    choices: Ints,
    script: Ints,
    amounts: Floats,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Group by part, the last one first, and piece by piece where they come back from a tier.

    Returns:
        Where the script goes on, and the piece that was used last.
    """
    row = stage.layers[layer]
    first = stage.layer_part[layer]
    parts = stage.parts[first : stage.layer_part[layer + 1]]
    if _is_recomputed(stage, choices, layer):
        size = parts[:, t.PART_MOVABLE_BYTES].sum() + parts[:, t.PART_KEPT_BYTES].sum()
        at = _add(script, amounts, at, MEMORY, 0, size)
        at = _add(script, amounts, at, RECOMPUTE, layer, row[t.LAYER_RECOMPUTE_S])
        at = _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_BACKWARD_S])
        size += row[t.LAYER_INPUT_BYTES]
        return _add(script, amounts, at, MEMORY, 0, -size), piece
    now = 0.0
    for number in range(parts.shape[0] - 1, -1, -1):
        part, choice = parts[number], choices[first + number]
        at = _add(script, amounts, at, COMPUTE, layer, part[t.PART_USE_S] - now)
        now = part[t.PART_USE_S]
        if choice == RECOMPUTE_PART:
            again = part[t.PART_MOVABLE_BYTES] - part[t.PART_INPUT_BYTES]
            at = _add(script, amounts, at, MEMORY, 0, again)
            at = _add(script, amounts, at, RECOMPUTE, layer, part[t.PART_RECOMPUTE_S])
        elif choice >= SELECTIVE_OFFSET:
            again = part[t.PART_SELECTIVE_BYTES] + part[t.PART_SELECTIVE_EXTRA_BYTES]
            at = _add(script, amounts, at, MEMORY, 0, again)
            at = _add(script, amounts, at, RECOMPUTE, layer, part[t.PART_SELECTIVE_S])
        until = parts[number - 1, t.PART_USE_S] if number > 0 else row[t.LAYER_BACKWARD_S]
        freed = part[t.PART_KEPT_BYTES]
        if choice >= SELECTIVE_OFFSET:
            freed += part[t.PART_SELECTIVE_EXTRA_BYTES]
        if choice % SELECTIVE_OFFSET >= FIRST_TIER:
            freed += part[t.PART_MOVABLE_BYTES] - _moving_bytes(part, choice)
            pieces = int(part[t.PART_PIECES])
            for _ in range(pieces):
                piece -= 1
                at = _add(script, amounts, at, USE, piece, 0.0)
                at = _add(script, amounts, at, COMPUTE, layer, (until - now) / pieces)
                at = _add(script, amounts, at, DROP, piece, 0.0)
        else:
            at = _add(script, amounts, at, COMPUTE, layer, until - now)
            freed += part[t.PART_MOVABLE_BYTES]
        at = _add(script, amounts, at, MEMORY, 0, -freed)
        now = until
    return _add(script, amounts, at, COMPUTE, layer, row[t.LAYER_BACKWARD_S] - now), piece
