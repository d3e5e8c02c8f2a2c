# SPDX-License-Identifier: Apache-2.0
"""A CUDA runtime for machines without one: `FakeCuda`, behind torch's own functions.

It page-locks nothing and allocates nothing: it notes which host memory is registered, remembers an
error until somebody asks for it, as CUDA does, and counts device memory as torch's allocator does.
It shows what the package asks of CUDA, in which order, and what a refusal leads to; not that CUDA
accepts it. The fixture `fake_cuda` installs one; nothing outside the tests knows it.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

_OUT_OF_MEMORY = 2


class FakeCuda:
    """Two GPUs, as far as page-locked memory and the counters of allocated memory go.

    Attributes:
        accepts: how many more ranges may be page-locked; the next one is refused.
        pinned: bytes of each page-locked range, by its address, in the order they were locked.
        has_error: a call failed, and no later one has raised its error yet.
        allocated: bytes that tensors take, by GPU.
        peak: the most that they took since the last reset, by GPU.
    """

    def __init__(self) -> None:
        self.accepts = 1 << 20
        self.pinned: dict[int, int] = {}
        self.has_error = False
        self.allocated, self.peak = [0, 0], [0, 0]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it behind torch's functions until the test ends."""
        cuda, memory = torch.cuda, torch.cuda.memory
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "cudart", lambda: self)
        monkeypatch.setattr(cuda, "check_error", self.check_error)
        for module in (cuda, memory):
            for function in (self.memory_stats_as_nested_dict, self.reset_peak_memory_stats):
                monkeypatch.setattr(module, function.__name__, function)
        zeros = torch.zeros

        def launched(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                self._raise_error()
                device = "cpu"
            return zeros(*size, device=device, **more)

        monkeypatch.setattr(torch, "zeros", launched)

    # -- Page-locked memory, by the names of CUDA's runtime ------------------------------------

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Page-locks whole pages, while `accepts` lasts."""
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == flags == 0
        assert address not in self.pinned
        if self.accepts == 0:
            self.has_error = True
            return _OUT_OF_MEMORY
        self.accepts -= 1
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Ends the process if the range has been unmapped, fails if it was never registered."""
        ctypes.string_at(address, 1)
        del self.pinned[address]
        return 0

    def check_error(self, code: int) -> None:
        """As `torch.cuda.check_error`."""
        if code:
            raise RuntimeError("out of memory")

    def _raise_error(self) -> None:
        if self.has_error:
            self.has_error = False
            raise RuntimeError("an error of an earlier call")

    # -- Device memory, by the names of torch's allocator ---------------------------------------

    def use(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory and gives it back at once."""
        self.peak[gpu] = max(self.peak[gpu], self.allocated[gpu] + num_bytes)

    def take(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory for good."""
        self.use(num_bytes, gpu)
        self.allocated[gpu] += num_bytes

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """As torch has them: pools of counters, and counters that are no pools."""
        gpu = _index(device)
        counters = {"current": self.allocated[gpu], "peak": self.peak[gpu], "freed": 7}
        pools = {"all": counters, "large_pool": dict(counters)}
        return {"allocated_bytes": pools, "reserved_bytes": {"all": dict(counters)}, "num_ooms": 3}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """As torch does: for everybody."""
        gpu = _index(device)
        self.peak[gpu] = self.allocated[gpu]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return 0 if device is None else int(torch.device(device).index)
