# SPDX-License-Identifier: Apache-2.0
"""How transfers keep pace with compute, in numbers: `FORGETTING`, `TOLERATED_WAIT`, `MARKS`.

The prefetcher and the run-ahead limit go by them, and the simulation of a step does the same.
"""

FORGETTING = 0.7  # what is left of the prefetcher's missing bytes in the next backward pass
# Waits of up to this fraction of the previous backward pass do not widen the window: a hundredth of
# the time costs less than the memory that would hide it.
TOLERATED_WAIT = 0.01
MARKS = 4  # events in the bytes that the host may have used before the device has
