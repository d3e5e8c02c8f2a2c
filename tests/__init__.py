# SPDX-License-Identifier: Apache-2.0
"""Threads of an operation that wait for work sleep, in all that tests run: `OMP_WAIT_POLICY`.

By default they keep their cores busy while they wait. Where other processes want the cores, and the
suite runs two halves side by side, small operations then take many times as long. How operations
are divided among threads stays the same, and so do their bits.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: must come first
