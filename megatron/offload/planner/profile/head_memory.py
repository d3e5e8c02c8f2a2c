# SPDX-License-Identifier: Apache-2.0
"""Working memory of output layer and loss: `HeadMemory`. The profiler says when they run.

Logits, their copies in fp32 and their gradient are there just when all that is kept is in memory.
In the steps that a first plan is made from all leaves, so the most memory is somewhere else, and
the peak of a step does not show them: a plan that keeps layers would take more than its budget.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.offload.device.device import Device


class HeadMemory:
    """Measures what runs behind the last layer.

    Attributes:
        num_bytes: most beyond what is saved for backward; 0: not measured.

    Args:
        device: whose allocator says what tensors take.
        settle: waits until all that was saved and moves has left, so that nothing leaves meanwhile.
        hold: says whether reading ahead is to wait, so that nothing comes that is not used.
    """

    def __init__(
        self, device: Device, settle: Callable[[], None], hold: Callable[[bool], None]
    ) -> None:
        self.num_bytes = 0
        self._device = device
        self._settle = settle
        self._hold = hold
        self._peak = device.peak_reader()
        self._base_bytes = 0

    def begin(self) -> None:
        """The last layer has run, or the backward pass begins. Nothing is read ahead from here."""
        self._hold(True)
        self._settle()
        self._base_bytes = self._device.allocated_bytes()
        self._peak.reset()

    def end(self, saved_bytes: int) -> None:
        """The loss has run, or the backward pass has come to the last layer.

        Args:
            saved_bytes: of what the loss saved, those that are there now, or came back, and were
                not when it began.
        """
        found = self._peak.peak_bytes() - self._base_bytes - saved_bytes
        self.num_bytes = max(self.num_bytes, found)

    def leave(self) -> None:
        """Ends the measurement: reading ahead goes on."""
        self._hold(False)
