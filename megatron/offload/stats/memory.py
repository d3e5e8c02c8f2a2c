# SPDX-License-Identifier: Apache-2.0
"""How much memory activations take at the most: `PeakMemory`.

Trainers and benchmarks call it around forward and backward. CUDA has its allocator's counters. On
a CPU device memory is process memory: the growth of the resident set over the state before the
step.

Note [The state before the step]
The allocator may keep freed memory for reuse, so the resident set before a later step can hold
memory of the step before it, and growth over it would say too little. So the base is taken only at
the first two steps (in the second the optimizer's state exists), after asking the allocator to
return what it holds; later steps are measured against the lowest base seen since.
"""

from __future__ import annotations

from megatron.offload.device.device import Device


class PeakMemory:
    """Measures how far device memory grows within a step, in bytes."""

    NUM_BASE_STEPS = 2

    def __init__(self, device: Device) -> None:
        self._device = device
        self._peak = device.peak_reader()
        self._base_bytes = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """Takes the base that growth is measured against; call it before the forward pass."""
        if self._num_steps < self.NUM_BASE_STEPS:
            self._device.return_freed_memory()
            self._base_bytes = self._device.allocated_bytes()
        else:
            self._base_bytes = min(self._base_bytes, self._device.allocated_bytes())
        self._num_steps += 1
        self._peak.reset()

    def end_step(self) -> int:
        """The most bytes above the base since `begin_step`; call it after the backward pass."""
        return max(self._peak.peak_bytes() - self._base_bytes, 0)

    def device_bytes(self) -> int:
        """The most device memory since `begin_step`, in bytes, whatever it holds.

        Weights, gradients and states too; on a CPU the resident set of the process.
        """
        return self._peak.peak_bytes()
