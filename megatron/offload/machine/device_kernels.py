# SPDX-License-Identifier: Apache-2.0
"""Kernels in the place of operations of torch, where they give the same bits: `Kernels`.

By numba for a CPU, by Triton for a GPU. Modules with operations of torch call them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Kernels:
    """What computes faster than a module's operations of torch; loaded with its first use.

    Args:
        name: of the module. `NAME_on_host` has machine code for a CPU, `NAME_on_gpu` Triton
            kernels.
        prefix: of the sentence that says why there are none for a GPU.
        agrees: whether Triton kernels, on a device, give the bits of torch.
    """

    def __init__(self, name: str, prefix: str, agrees: Callable[[Any, torch.device], bool]) -> None:
        self._name, self._prefix, self._agrees = name, prefix, agrees
        self.on_host = functools.cache(self._load_on_host)
        self.on_gpu = functools.cache(self._load_on_gpu)

    def of(self, values: torch.Tensor) -> Any:
        """The module of kernels for values of this type on this device; None: there is none."""
        if values.device.type == "cuda":
            return self.on_gpu(values.device)
        has_kernel = values.device.type == "cpu" and values.dtype in (torch.float32, torch.bfloat16)
        return self.on_host() if has_kernel else None

    def _load_on_host(self) -> Any:
        """None: numba is not installed (the extra `auto`)."""
        if importlib.util.find_spec("numba") is None:
            return None
        return importlib.import_module(f"{self._name}_on_host")

    def _load_on_gpu(self, device: torch.device) -> Any:
        name = f"{self._name}_on_gpu"
        return load_kernels(name, self._prefix, lambda kernels: self._agrees(kernels, device))


def load_kernels(module: str, prefix: str, agrees: Callable[[Any], bool]) -> Any:
    """A module of Triton kernels; None: there is no Triton here, or it computes something else.

    A compiler may contract or approximate what an operation of torch rounds, on some device or in
    some version. So what a kernel gives is compared with torch's own before it is used.

    Args:
        module: its full name.
        prefix: of the sentence that says why there are none.
        agrees: runs its kernels on a device, and says whether they gave the bits of torch.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    reason = "they do not give the bits that PyTorch gives"
    try:
        kernels = importlib.import_module(module)
        if agrees(kernels):
            return kernels
    except Exception as error:  # whatever a compiler and a driver raise
        reason = f"{type(error).__name__}: {str(error)[:300]}"
    logger.warning(
        "%sthe Triton kernels of %s are not used here (%s); operations of PyTorch do the same more "
        "slowly",
        prefix,
        module.rsplit(".", 1)[-1],
        reason,
    )
    return None


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on a tensor's device."""
    if tensor.device.type == "cpu":  # Triton's interpreter runs there
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[object] = torch.accelerator.device_index(
        tensor.device.index
    )
    return device


def sample_values(group: int) -> torch.Tensor:
    """Values that kernels are compared with operations of torch on: float32, in host memory.

    Groups of all magnitudes, also below the smallest normal number; two have a NaN and an infinite
    value, one is all zeros, the last is not whole.
    """
    powers = torch.arange(-148, 120, device="cpu").repeat_interleave(group)[: 267 * group + 61]
    draw = torch.Generator().manual_seed(0)
    sample = torch.randn(len(powers), generator=draw, dtype=torch.float32, device="cpu")
    sample *= torch.exp2(powers.to(torch.float32))
    sample[3 * group], sample[7 * group + 1] = float("nan"), float("-inf")
    sample[11 * group : 12 * group] = 0
    return sample
