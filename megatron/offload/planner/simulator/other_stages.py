# SPDX-License-Identifier: Apache-2.0
"""When the other stages of a pipeline let each pass of this one begin: `ready_times`.

Part of the simulation, see `timeline`. Every stage is taken to need as long for a pass of a chunk
as this one, and to wait for nothing but its neighbours and its own passes before.
"""

from __future__ import annotations

import numpy as np

from megatron.offload.planner.simulator.arrays import Floats, Ints
from megatron.offload.planner.simulator.jit import compiled


@compiled
def ready_times(
    passes: Ints, own: int, num_micro_batches: int, forward_s: Floats, backward_s: Floats
) -> tuple[Floats, float]:
    """The longest way through the passes of all stages.

    Args:
        passes: [stages, places, 3], of all stages, see `StageArrays`.
        own: this stage.
        forward_s: [chunks], seconds of a pass.
        backward_s: [chunks], likewise.

    Returns:
        [places], the second when the input of each of this stage's passes arrives, and how many
        seconds later than this stage the last stage ends its passes; -1 if they wait for each
        other for ever.
    """
    stages, length = passes.shape[0], passes.shape[1]
    chunks = forward_s.shape[0]
    ready = np.zeros(length)
    if stages == 1:
        return ready, 0.0
    done = np.full((stages, 2, chunks, num_micro_batches), -1.0)
    position = np.zeros(stages, np.int64)
    now = np.zeros(stages)
    left = stages * length
    while left > 0:
        before = left
        for stage in range(stages):
            while position[stage] < length:
                is_backward, chunk, micro_batch = passes[stage, position[stage]]
                if is_backward == 0:
                    if stage > 0:
                        arrived = done[stage - 1, 0, chunk, micro_batch]
                    elif chunk > 0:
                        arrived = done[stages - 1, 0, chunk - 1, micro_batch]
                    else:
                        arrived = 0.0
                elif stage < stages - 1:
                    arrived = done[stage + 1, 1, chunk, micro_batch]
                elif chunk < chunks - 1:
                    arrived = done[0, 1, chunk + 1, micro_batch]
                else:
                    arrived = done[stage, 0, chunk, micro_batch]
                if arrived < 0:
                    break
                if stage == own:
                    ready[position[stage]] = arrived
                took = backward_s[chunk] if is_backward else forward_s[chunk]
                now[stage] = max(now[stage], arrived) + took
                done[stage, is_backward, chunk, micro_batch] = now[stage]
                position[stage] += 1
                left -= 1
        if left == before:
            return ready, -1.0
    return ready, now.max() - now[own]


@compiled
def ways_around(stages: int, own: int, forward_s: Floats, backward_s: Floats) -> Floats:
    """Seconds that a pass of a chunk comes after this stage's own pass that it depends on.

    Returns:
        [2, chunks]: of forward passes (after the forward pass of the chunk before; nothing for the
        first) and of backward passes (after the backward pass of the chunk after; of the last
        chunk, after its forward pass).
    """
    chunks = forward_s.shape[0]
    later, earlier = stages - own - 1, own
    around = np.zeros((2, chunks))
    for chunk in range(1, chunks):
        around[0, chunk] = later * forward_s[chunk - 1] + earlier * forward_s[chunk]
        around[1, chunk - 1] = earlier * backward_s[chunk] + later * backward_s[chunk - 1]
    around[1, chunks - 1] = later * (forward_s[chunks - 1] + backward_s[chunks - 1])
    return around
