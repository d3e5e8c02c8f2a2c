# SPDX-License-Identifier: Apache-2.0
"""The accelerators that tests run on, and how to make their streams lag: `Accelerator`.

`Cuda` is a GPU, `Lag` the test accelerator of `tests/support/lag`. What is shown on `Lag` is the
order of things, nothing of CUDA's driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.cuda import CudaPlatform
from megatron.offload.device.platform import Platform, platform_of, register_platform
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform

_BUSY_CYCLES = 1_000_000_000  # more than 0.4 s on GPUs up to 2.5 GHz
_BUSY_S = 0.5


class Accelerator:
    """One kind of device.

    Attributes:
        module: torch's of that kind.
    """

    kind: str
    module: Any

    def open(self, index: int | None = None) -> AcceleratorDevice:
        """The device as the package sees it; without an index the current one."""
        return AcceleratorDevice(torch.device(self.kind, index), self.platform())

    def platform(self) -> Platform:
        """What torch has no generic name for."""
        raise NotImplementedError

    def keep_busy(self) -> None:
        """What is queued on the current stream after this is still to come on the next line."""
        raise NotImplementedError

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is queued on the current stream from here on is still to come at the end."""
        raise NotImplementedError
        yield

    def nap(self) -> None:
        """Queues about a millisecond of work on the current stream."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Whatever waits for the device when it is done for the first time is done now.

        A storage then takes the memory that one of its size has just left.
        """
        warm = torch.full((8,), 1, dtype=torch.uint8, device=self.kind)
        self.nap()
        int((warm.fill_(2) != 1).sum())
        del warm
        self.module.synchronize()
        self.module.empty_cache()


class Cuda(Accelerator):
    """A GPU. It cannot be held; a kernel takes so long that the host is sure to be faster."""

    kind = "cuda"
    module = torch.cuda

    def platform(self) -> Platform:
        return CudaPlatform()

    def keep_busy(self) -> None:
        torch.cuda._sleep(_BUSY_CYCLES)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.keep_busy()
        yield

    def nap(self) -> None:
        torch.cuda._sleep(2_000_000)


class Lag(Accelerator):
    """The test accelerator."""

    kind = "lag"

    def __init__(self, lag: LagModule) -> None:
        self.module = lag
        # The same for all tests of a process: they share its devices, as users of one process do.
        known = platform_of(self.kind)
        self._platform = LagPlatform(lag) if known is None else known
        register_platform(self.kind, self._platform)

    def platform(self) -> Platform:
        return self._platform

    def keep_busy(self) -> None:
        self.module.late(self.module.current_stream(), _BUSY_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self.module.held(self.module.current_stream()):
            yield

    def nap(self) -> None:
        self.module.sleep(0.001)


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), place
