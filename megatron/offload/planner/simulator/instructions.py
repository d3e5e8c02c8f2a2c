# SPDX-License-Identifier: Apache-2.0
"""What a stage does in a pass with given choices, instruction by instruction: `instructions_of`.

Part of the simulation, see `timeline`. All micro-batches follow the same instructions,
with other pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.offload.planner.simulator.arrays import Floats, Ints, Row, Rows, StageArrays
from megatron.offload.planner.simulator.jit import compiled, in_both
from megatron.offload.planner.simulator.rows import PIECE

# Choices for a part. From `FIRST_TIER` on: the tier of that number. A part that is kept or moved
# replays what it can, and a codec encodes the rest; with `KEEP_ALL` it keeps all as it is and
# replays nothing. Added to `KEEP` or a tier are
# `EXACT_OFFSET` where what is not replayed is kept or moved as it is;
# `SELECTIVE_OFFSET` where its selective operations are recomputed;
# and to a recomputation `INPUT_OFFSET`, if its input goes to the first tier, twice for the next.
KEEP, RECOMPUTE_PART, RECOMPUTE_LAYER, KEEP_ALL, FIRST_TIER = 0, 1, 2, 3, 4
EXACT_OFFSET = 8
SELECTIVE_OFFSET = 16
INPUT_OFFSET = 32

# Kinds of instructions, and what they are about
COMPUTE, RECOMPUTE = 0, 1  # layer (-1: outside), seconds
# Layer (-1: outside), bytes more (or fewer, below 0): saved in forward, or again in backward.
MEMORY, MEMORY_AGAIN = 2, 3
HAND_OVER, USE, DROP = 4, 5, 6  # piece
BEGIN_LAYER = 7  # in forward
MEMORY_REPLAYED = 8  # layer, bytes more (or fewer) that backward has computed again from others

# One of a pass; where: layer or piece (counted from the pass's first); amount: seconds or bytes.
INSTRUCTION = np.dtype([("kind", np.int64), ("where", np.int64), ("amount", np.float64)])


@compiled
def base_of(choice: int) -> int:
    """The choice without what is added to it."""
    return choice % EXACT_OFFSET


@compiled
def is_exact(choice: int) -> bool:
    """Whether a part that a codec could encode is kept or moved as it is, and yet replays."""
    return choice // EXACT_OFFSET % 2 == 1


@compiled
def is_selective(choice: int) -> bool:
    """Whether a part's selective operations are recomputed, whatever becomes of the rest."""
    return choice // SELECTIVE_OFFSET % 2 == 1


@compiled
def _tier(choice: int) -> int:
    """The tier that bytes go to; below 0: none."""
    if choice >= INPUT_OFFSET:
        return choice // INPUT_OFFSET - 1
    return base_of(choice) - FIRST_TIER


@compiled
def _num_pieces(stage: StageArrays, choice: int, layer: int, part: int) -> int:
    """Of a part's bytes that go to a tier. A whole layer's input is its first part's piece."""
    if _tier(choice) < 0:
        return 0
    if choice < INPUT_OFFSET:
        return stage.parts[part].num_pieces
    of_layer = base_of(choice) == RECOMPUTE_LAYER
    return 0 if of_layer and part > stage.layer_part[layer] else 1


@compiled
def new_pieces(stage: StageArrays, choices: Ints) -> tuple[Ints, Rows]:
    """The pieces of one micro-batch that go to tiers.

    Args:
        choices: [parts].

    Returns:
        [chunks + 1], the first of each chunk, and [pieces] of `rows.PIECE` with the chunk as
        state.
    """
    chunks, layers = stage.chunks.shape[0], stage.layers.shape[0]
    total = 0
    for layer in range(layers):
        for part in range(stage.layer_part[layer], stage.layer_part[layer + 1]):
            total += _num_pieces(stage, choices[part], layer, part)
    first_piece = np.zeros(chunks + 1, np.int64)
    pieces = np.zeros(total, PIECE)
    at = 0
    for chunk in range(chunks):
        largest = 0.0
        for layer in range(stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]):
            for part in range(stage.layer_part[layer], stage.layer_part[layer + 1]):
                choice = choices[part]
                number = _num_pieces(stage, choice, layer, part)
                size, each = (
                    saved_bytes(stage.parts[part], choice),
                    stage.parts[part].storages_each,
                )
                if choice >= INPUT_OFFSET:
                    size, each = _moved_input_bytes(stage, choice, layer, part), 1.0
                for piece in range(number):
                    pieces[at].state = chunk
                    pieces[at].size_bytes = _piece_bytes(size, piece, number)
                    largest = max(largest, pieces[at].size_bytes)
                    pieces[at].largest_bytes = largest
                    pieces[at].layer = layer
                    pieces[at].tier = _tier(choice)
                    pieces[at].num_storages = each
                    at += 1
        first_piece[chunk + 1] = at
    return first_piece, pieces


@in_both
def saved_bytes(part: Any, choice: int) -> Any:
    """What a part keeps or moves: movable bytes that selective operations do not produce again."""
    if choice == KEEP_ALL:
        return part.movable_bytes + part.spared_bytes
    all_bytes = part.movable_bytes + (part.codec_spared_bytes if is_exact(choice) else 0)
    return all_bytes - selective_bytes(part, choice)


@in_both
def selective_bytes(part: Any, choice: int) -> Any:
    """What selective operations produce again."""
    if not is_selective(choice):
        return 0
    return part.exact_selective_bytes if is_exact(choice) else part.selective_bytes


@compiled
def _replay_s(part: Row, choice: int) -> float:
    """What a part that is kept or moved takes to replay and, unless it is exact, to encode."""
    if choice == KEEP_ALL:
        return 0.0
    return part.replay_s - (part.codec_s if is_exact(choice) else 0.0)


@compiled
def _moved_input_bytes(stage: StageArrays, choice: int, layer: int, part: int) -> float:
    """Of what a recomputation starts from, what goes to a tier meanwhile."""
    if choice < INPUT_OFFSET:
        return 0.0
    if base_of(choice) == RECOMPUTE_LAYER:
        return stage.layers[layer].movable_input_bytes
    return stage.parts[part].movable_input_bytes


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
                if base_of(choices[part]) == RECOMPUTE_LAYER:
                    backward_s[chunk] += stage.layers[layer].recompute_s
                    break
                if base_of(choices[part]) == RECOMPUTE_PART:
                    backward_s[chunk] += stage.parts[part].recompute_s
                    continue
                backward_s[chunk] += _replay_s(stage.parts[part], choices[part])
                if is_selective(choices[part]):
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
    most = 16 * chunks + 15 * layers
    for part in range(choices.shape[0]):
        most += 13 + 5 * stage.parts[part].num_pieces
    instructions = np.zeros(most, INSTRUCTION)
    begins = np.zeros(2 * chunks + 1, np.int64)
    at = 0
    for chunk in range(chunks):
        of_chunk = stage.chunks[chunk]
        first, end = stage.chunk_layer[chunk], stage.chunk_layer[chunk + 1]
        taken_bytes = stage.chunks[chunk - 1].passed_on_bytes if chunk > 0 else 0.0
        at = _add(instructions, at, MEMORY, -1, of_chunk.fixed_bytes - taken_bytes)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.before_s)
        piece = 0
        for layer in range(first, end):
            at, piece = _forward(stage, choices, instructions, at, layer, piece)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.after_s)
        head_bytes = stage.head_bytes if chunk == stage.chunk_with_loss else 0.0
        at = _add(instructions, at, MEMORY, -1, head_bytes)
        at = _add(instructions, at, MEMORY, -1, -head_bytes)
        at = _add(instructions, at, MEMORY, -1, of_chunk.passed_on_bytes)
        begins[2 * chunk + 1] = at
        at = _add(instructions, at, MEMORY, -1, -of_chunk.passed_on_bytes)  # of the gradient
        at = _add(instructions, at, MEMORY, -1, head_bytes)
        at = _add(instructions, at, MEMORY, -1, -head_bytes)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.backward_before_s)
        for layer in range(end - 1, first - 1, -1):
            at, piece = _backward(stage, choices, instructions, at, layer, piece)
        at = _add(instructions, at, COMPUTE, -1, of_chunk.backward_after_s)
        at = _add(instructions, at, MEMORY, -1, taken_bytes - of_chunk.fixed_bytes)
        begins[2 * chunk + 2] = at
    return instructions, begins


@compiled
def _add(instructions: Rows, at: int, kind: int, where: int, amount: float) -> int:
    """Appends an instruction, unless it would do nothing."""
    if amount == 0 and (kind <= MEMORY_AGAIN or kind == MEMORY_REPLAYED):
        return at
    row = instructions[at]
    row.kind, row.where, row.amount = kind, where, amount
    return at + 1


@compiled
def _is_recomputed(stage: StageArrays, choices: Ints, layer: int) -> bool:
    """As a whole."""
    first = stage.layer_part[layer]
    if first == stage.layer_part[layer + 1]:
        return False
    return base_of(choices[first]) == RECOMPUTE_LAYER


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
    if stage.lead_layers > 0:
        at = _add(instructions, at, BEGIN_LAYER, layer, 0.0)
    if _is_recomputed(stage, choices, layer):
        at = _add(instructions, at, MEMORY, layer, row.input_bytes)
        first = stage.layer_part[layer]
        number = _num_pieces(stage, choices[first], layer, first)
        if number and stage.by_operation:
            at = _add(instructions, at, HAND_OVER, piece, 0.0)
        at = _add(instructions, at, COMPUTE, layer, row.forward_s)
        if number and not stage.by_operation:
            at = _add(instructions, at, HAND_OVER, piece, 0.0)
        return at, piece + number
    now = 0.0
    for part in parts:
        of_part, choice = stage.parts[part], choices[part]
        size, seconds = of_part.resident_bytes, of_part.produced_s - now
        now = of_part.produced_s
        if base_of(choice) == RECOMPUTE_PART:
            size += of_part.input_bytes
            at = _add(instructions, at, MEMORY, layer, size)
            if stage.by_operation and _num_pieces(stage, choice, layer, part):
                at = _add(instructions, at, HAND_OVER, piece, 0.0)
                piece += 1
        elif stage.by_operation and _tier(choice) >= 0:
            at = _add(instructions, at, MEMORY, layer, size)
            size, pieces = saved_bytes(of_part, choice), of_part.num_pieces
            for number in range(pieces):
                size_bytes = _piece_bytes(size, number, pieces)
                at = _add(instructions, at, MEMORY, layer, size_bytes)
                at = _add(instructions, at, COMPUTE, layer, seconds / pieces)
                at = _add(instructions, at, HAND_OVER, piece, 0.0)
                piece += 1
            continue
        else:
            size += saved_bytes(of_part, choice)
            if stage.lead_layers > 0 and stage.by_operation and of_part.num_pieces > 1:
                # What the operation before has saved leaves when the first of these is launched.
                first_bytes = _piece_bytes(size, 0, of_part.num_pieces)
                first_s = seconds / of_part.num_pieces
                at = _add(instructions, at, MEMORY, layer, first_bytes)
                at = _add(instructions, at, COMPUTE, layer, first_s)
                size, seconds = size - first_bytes, seconds - first_s
            at = _add(instructions, at, MEMORY, layer, size)
        at = _add(instructions, at, COMPUTE, layer, seconds)
    at = _add(instructions, at, COMPUTE, layer, row.forward_s - now)
    if stage.by_operation:
        return at, piece
    for part in parts:
        for _ in range(_num_pieces(stage, choices[part], layer, part)):
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
        number = _num_pieces(stage, choices[first], layer, first)
        if number:
            at = _add(instructions, at, USE, piece - 1, 0.0)
        size = parts.movable_bytes.sum() + parts.resident_bytes.sum() + parts.spared_bytes.sum()
        at = _add(instructions, at, MEMORY_AGAIN, layer, size)
        at = _add(instructions, at, RECOMPUTE, layer, row.recompute_s)
        at = _add(instructions, at, COMPUTE, layer, row.backward_s)
        if number:
            at = _add(instructions, at, DROP, piece - 1, 0.0)
        at = _add(instructions, at, MEMORY_AGAIN, layer, -size)
        size = row.input_bytes - _moved_input_bytes(stage, choices[first], layer, first)
        return _add(instructions, at, MEMORY, layer, -size), piece - number
    now = 0.0
    for number in range(parts.shape[0] - 1, -1, -1):
        part, choice = parts[number], choices[first + number]
        pieces = _num_pieces(stage, choice, layer, first + number)
        at = _add(instructions, at, COMPUTE, layer, part.first_use_s - now)
        now, again = part.first_use_s, 0.0
        until = parts[number - 1].first_use_s if number > 0 else row.backward_s
        freed = part.resident_bytes
        if base_of(choice) == RECOMPUTE_PART:
            if pieces:
                at = _add(instructions, at, USE, piece - 1, 0.0)
            again = part.movable_bytes + part.spared_bytes - part.input_bytes
            at = _add(instructions, at, MEMORY_AGAIN, layer, again)
            at = _add(instructions, at, RECOMPUTE, layer, part.recompute_s)
            at = _add(instructions, at, COMPUTE, layer, until - now)
            if pieces:
                piece -= 1
                at = _add(instructions, at, DROP, piece, 0.0)
            freed += part.movable_bytes + part.spared_bytes
            freed -= _moved_input_bytes(stage, choice, layer, first + number)
        elif choice == KEEP_ALL:
            at = _add(instructions, at, COMPUTE, layer, until - now)
            freed += saved_bytes(part, choice)
        else:
            replay_s, replayed_bytes = _replay_s(part, choice), part.replay_extra_bytes
            if is_exact(choice):
                replayed_bytes = part.exact_extra_bytes
            at = _add(instructions, at, MEMORY_REPLAYED, layer, replayed_bytes)
            if is_selective(choice):
                again = selective_bytes(part, choice) + part.selective_extra_bytes
                at = _add(instructions, at, MEMORY_AGAIN, layer, again)
                at = _add(instructions, at, RECOMPUTE, layer, part.selective_s)
                freed += again
            if not pieces:
                at = _add(instructions, at, RECOMPUTE, layer, replay_s)
                at = _add(instructions, at, COMPUTE, layer, until - now)
                freed += saved_bytes(part, choice)
            for _ in range(pieces):
                piece -= 1
                at = _add(instructions, at, USE, piece, 0.0)
                at = _add(instructions, at, RECOMPUTE, layer, replay_s / pieces)
                at = _add(instructions, at, COMPUTE, layer, (until - now) / pieces)
                at = _add(instructions, at, DROP, piece, 0.0)
            at = _add(instructions, at, MEMORY_REPLAYED, layer, -replayed_bytes)
        at = _add(instructions, at, MEMORY_AGAIN, layer, -again)
        at = _add(instructions, at, MEMORY, layer, again - freed)
        now = until
    return _add(instructions, at, COMPUTE, layer, row.backward_s - now), piece
