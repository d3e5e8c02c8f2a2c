# SPDX-License-Identifier: Apache-2.0
"""How much memory activations take at the most: `PeakMemory`.

Trainers and benchmarks call it around forward and backward. CUDA has its allocator's counters. On
a CPU device memory is process memory: the growth of the resident set over the state before the
step. The kernel tracks its peak (VmHWM), so short peaks are not missed.

Note [The state before the step]
The allocator may keep freed memory for reuse, so the resident set before a later step can hold
memory of the step before it, and growth over it would say too little. So the base is taken only at
the first two steps (in the second the optimizer's state exists), after asking the allocator to
return what it holds; later steps are measured against the lowest base seen since.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.offload.storage.allocator import return_freed_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Peak growth of device memory within a step, in bytes."""

    NUM_BASE_STEPS = 2

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base_bytes = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """Call before the forward pass."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._base_bytes = torch.cuda.memory_allocated()
            return
        if self._num_steps < self.NUM_BASE_STEPS:
            return_freed_memory()
            self._base_bytes = _status_bytes("VmRSS")
        else:
            self._base_bytes = min(self._base_bytes, _status_bytes("VmRSS"))
        self._num_steps += 1
        _CLEAR_REFS.write_text(_RESET_PEAK)

    def end_step(self) -> int:
        """Call after the backward pass. The most bytes above the base at any moment since."""
        if self._cuda:
            return torch.cuda.max_memory_allocated() - self._base_bytes
        return max(_status_bytes("VmHWM") - self._base_bytes, 0)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}: peak memory on a CPU needs Linux")
