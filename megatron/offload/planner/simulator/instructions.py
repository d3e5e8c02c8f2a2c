# SPDX-License-Identifier: Apache-2.0
"""What a stage does in a pass with given choices, instruction by instruction: `instructions_of`.

Part of the simulation, see `timeline`. All micro-batches follow the same instructions,
with other pieces.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator.arrays import Floats, Ints, Row, Rows, StageArrays
from megatron.offload.planner.simulator.jit import compiled
from megatron.offload.planner.simulator.transfers import PIECE

# Choices for a part. From `FIRST_TIER` on: the tier of that number. `SELECTIVE_OFFSET` is added to
# `KEEP` or a tier where its selective operations are recomputed and the rest is kept or moved.
KEEP, RECOMPUTE_PART, RECOMPUTE_LAYER, FIRST_TIER = 0, 1, 2, 3
SELECTIVE_OFFSET = 8

# Kinds of instructions, and what they are about
COMPUTE, RECOMPUTE = 0, 1  # layer (-1: outside), seconds
MEMORY = 2  # bytes more (or fewer, below 0)
HAND_OVER, USE, DROP = 3, 4, 5  # piece

# One of a pass; where: layer or piece (counted from the pass's first); amount: seconds or bytes.
INSTRUCTION = np.dtype([("kind", np.int64), ("where", np.int64), ("amount", np.float64)])


@compiled
def new_pieces(stage: StageArrays, choices: Ints) -> tuple[Ints, Rows]:
    """The pieces of one micro-batch that go to tiers.

    Args:
        choices: [parts].

    Returns:
        [chunks + 1], the first of each chunk, and [pieces] of `transfers.PIECE` with the chunk as
        state.
    """
    chunks = stage.chunks.shape[0]
    number = 0
    for part in range(choices.shape[0]):
        if choices[part] % SELECTIVE_OFFSET >= FIRST_TIER:
            number += stage.parts[part].num_pieces
    first_piece = np.zeros(chunks + 1, np.int64)
    pieces = np.zeros(number, PIECE)
    at = 0
    for chunk in range(chunks):
        first_part, largest = stage.layer_part[stage.chunk_layer[chunk]], 0.0
        for part in range(first_part, stage.layer_part[stage.chunk_layer[chunk + 1]]):
            if choices[part] % SELECTIVE_OFFSET < FIRST_TIER:
                continue
            number = stage.parts[part].num_pieces
            size = _moving_bytes(stage.parts[part], choices[part])
            for piece in range(number):
                pieces[at].state = chunk
                pieces[at].size_bytes = _piece_bytes(size, piece, number)
                largest = max(largest, pieces[at].size_bytes)
                pieces[at].largest_bytes = largest
                pieces[at].tier = choices[part] % SELECTIVE_OFFSET - FIRST_TIER
                pieces[at].num_storages = stage.parts[part].storages_each
                at += 1
        first_piece[chunk + 1] = at
    return first_piece, pieces


@compiled
def _moving_bytes(part: Row, choice: int) -> float:
    """Of a part's movable bytes, those that its selective operations do not produce again."""
    return part.movable_bytes - (part.selective_bytes if choice >= SELECTIVE_OFFSET else 0.0)


@compiled
def _piece_bytes(size: float, piece: int, number: int) -> float:
    """Equal parts, the last one with the rest."""
    part = np.floor(size / number)
    return size - part * (number - 1) if piece == number - 1 else part


@compiled
def pass_seconds(stage: StageArrays, choices: Ints) -> tuple[Floats, Floats]:
    """Seconds of a forward and of a backward pass without waits: [chunks] each.

    Args:
        choices: [parts].
    """
    chunks = stage.chunks.shape[0]
    forward_s, backward_s = np.empty(chunks), np.empty(chunks)
    for chunk in range(chunks):
        of_chunk = stage.chunks[chunk]
        forward_s[chunk] = of_chunk.before_s + of_chunk.after_s
        backward_s[chunk] = of_chunk.backward_before_s + of_chunk.backward_after_s
        for layer in range(stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]):
            forward_s[chunk] += stage.layers[layer].forward_s
            backward_s[chunk] += stage.layers[layer].backward_s
            for part in range(stage.layer_part[layer], stage.layer_part[layer + 1]):
                if choices[part] == RECOMPUTE_LAYER:
                    backward_s[chunk] += stage.layers[layer].recompute_s
                    break
                if choices[part] == RECOMPUTE_PART:
                    backward_s[chunk] += stage.parts[part].recompute_s
                elif choices[part] >= SELECTIVE_OFFSET:
                    backward_s[chunk] += stage.parts[part].selective_s
    return forward_s, backward_s


@compiled
def instructions_of(stage: StageArrays, choices: Ints) -> tuple[Rows, Ints]:
    """The instructions of all chunks' passes.

    Args:
        choices: [parts].

    Returns:
        Rows of INSTRUCTION, and [2 x chunks + 1]: where the forward and the backward pass of each
        chunk begin, and the end.
    """
    chunks, layers = stage.chunks.shape[0], stage.layers.shape[0]
    most = 12 * chunks + 12 * layers
    for part in range(choices.shape[0]):
        most += 8 + 4 * stage.parts[part].num_pieces
    instructions = np.zeros(most, INSTRUCTION)
    begins = np.zeros(2 * chunks + 1, np.int64)
    at = 0
    for chunk in range(chunks):
        of_chunk = stage.chunks[chunk]
        first, end = stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]
        at = _add(instructions, at, MEMORY, 0, of_chunk.fixed_bytes)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.before_s)
        piece = 0
        for layer in range(first, end):
            at, piece = _forward(stage, choices, instructions, at, layer, piece)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.after_s)
        begins[2 * chunk + 1] = at
        at = _add(instructions, at, COMPUTE, -1, of_chunk.backward_before_s)
        for layer in range(end - 1, first - 1, -1):
            at, piece = _backward(stage, choices, instructions, at, layer, piece)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.backward_after_s)
        at = _add(instructions, at, MEMORY, 0, -of_chunk.fixed_bytes)
        begins[2 * chunk + 2] = at
    return instructions, begins


@compiled
def _add(instructions: Rows, at: int, kind: int, where: int, amount: float) -> int:
    """Appends an instruction, unless it would do nothing."""
    if kind <= MEMORY and amount == 0:
        return at
    row = instructions[at]
    row.kind, row.where, row.amount = kind, where, amount
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
    instructions: Rows,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Bytes are there from when their part begins to be produced; all are handed over at the end.

    Or, by operation: pieces come, and are handed over, one after the other at an even pace.

    Returns:
        Where the instructions go on, and the next piece.
    """
    row = stage.layers[layer]
    parts = range(stage.layer_part[layer], stage.layer_part[layer + 1])
    if _is_recomputed(stage, choices, layer):
        at = _add(instructions, at, MEMORY, 0, row.input_bytes)
        return _add(instructions, at, COMPUTE, layer, row.forward_s), piece
    now = 0.0
    for part in parts:
        of_part = stage.parts[part]
        size, seconds = of_part.resident_bytes, of_part.produced_s - now
        now = of_part.produced_s
        if stage.by_operation and choices[part] % SELECTIVE_OFFSET >= FIRST_TIER:
            at = _add(instructions, at, MEMORY, 0, size)
            size, pieces = _moving_bytes(of_part, choices[part]), of_part.num_pieces
            for number in range(pieces):
                at = _add(instructions, at, MEMORY, 0, _piece_bytes(size, number, pieces))
                at = _add(instructions, at, COMPUTE, layer, seconds / pieces)
                at = _add(instructions, at, HAND_OVER, piece, 0.0)
                piece += 1
            continue
        if choices[part] == RECOMPUTE_PART:
            size += of_part.input_bytes
        else:
            size += _moving_bytes(of_part, choices[part])
        at = _add(instructions, at, MEMORY, 0, size)
        at = _add(instructions, at, COMPUTE, layer, seconds)
    at = _add(instructions, at, COMPUTE, layer, row.forward_s - now)
    if stage.by_operation:
        return at, piece
    for part in parts:
        if choices[part] % SELECTIVE_OFFSET >= FIRST_TIER:
            for _ in range(stage.parts[part].num_pieces):
                at = _add(instructions, at, HAND_OVER, piece, 0.0)
                piece += 1
    return at, piece


@compiled
def _backward(
    stage: StageArrays,
    choices: Ints,
    instructions: Rows,
    at: int,
    layer: int,
    piece: int,
) -> tuple[int, int]:
    """Part by part, the last one first, and piece by piece where they come back from a tier.

    Returns:
        Where the instructions go on, and the piece that was used last.
    """
    row = stage.layers[layer]
    first = stage.layer_part[layer]
    parts = stage.parts[first : stage.layer_part[layer + 1]]
    if _is_recomputed(stage, choices, layer):
        size = parts.movable_bytes.sum() + parts.resident_bytes.sum()
        at = _add(instructions, at, MEMORY, 0, size)
        at = _add(instructions, at, RECOMPUTE, layer, row.recompute_s)
        at = _add(instructions, at, COMPUTE, layer, row.backward_s)
        size += row.input_bytes
        return _add(instructions, at, MEMORY, 0, -size), piece
    now = 0.0
    for number in range(parts.shape[0] - 1, -1, -1):
        part, choice = parts[number], choices[first + number]
        at = _add(instructions, at, COMPUTE, layer, part.first_use_s - now)
        now = part.first_use_s
        if choice == RECOMPUTE_PART:
            again = part.movable_bytes - part.input_bytes
            at = _add(instructions, at, MEMORY, 0, again)
            at = _add(instructions, at, RECOMPUTE, layer, part.recompute_s)
        elif choice >= SELECTIVE_OFFSET:
            again = part.selective_bytes + part.selective_extra_bytes
            at = _add(instructions, at, MEMORY, 0, again)
            at = _add(instructions, at, RECOMPUTE, layer, part.selective_s)
        until = parts[number - 1].first_use_s if number > 0 else row.backward_s
        freed = part.resident_bytes
        if choice >= SELECTIVE_OFFSET:
            freed += part.selective_extra_bytes
        if choice % SELECTIVE_OFFSET >= FIRST_TIER:
            freed += part.movable_bytes - _moving_bytes(part, choice)
            pieces = part.num_pieces
            for _ in range(pieces):
                piece -= 1
                at = _add(instructions, at, USE, piece, 0.0)
                at = _add(instructions, at, COMPUTE, layer, (until - now) / pieces)
                at = _add(instructions, at, DROP, piece, 0.0)
        else:
            at = _add(instructions, at, COMPUTE, layer, until - now)
            freed += part.movable_bytes
        at = _add(instructions, at, MEMORY, 0, -freed)
        now = until
    return _add(instructions, at, COMPUTE, layer, row.backward_s - now), piece
