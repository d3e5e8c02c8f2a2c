# SPDX-License-Identifier: Apache-2.0
"""The GPU's part of `doctor`: CUDA devices, and whether GPUDirect Storage works.

`find_cuda` looks, `*_check` and `*_checks` judge what was found, so that each can be tried without
a GPU. Nothing here raises: a failure becomes a line.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.offload.commands.doctor.check import Check, Status
from megatron.offload.device.cuda import all_properties, has_cuda
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.machine.mounts import pci_numa_node
from megatron.offload.sizes import format_size
from megatron.offload.tiers.gds_status import GdsStatus

PROC = Path("/proc")
_PCI_PARTS = ("domain", "bus", "device")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as `doctor` shows it."""

    name: str
    memory_bytes: int
    numa_node: int | None


@dataclass(frozen=True)
class Cuda:
    """What this process sees of CUDA: devices, versions, or why there are none.

    Args:
        driver: version of NVIDIA's kernel driver; None: it is not loaded.
        runtime: CUDA version that torch is built for; None: a build for the CPU.
        failure: what torch said when it looked for devices.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    runtime: str | None = None
    failure: str = ""


def find_cuda(proc: Path = PROC) -> Cuda:
    """Asks torch for CUDA devices, and the kernel for the driver."""
    text = _text(proc / "driver/nvidia/version")
    driver = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    version = driver[1] if driver else None
    runtime = torch.version.cuda
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            gpus = _gpus() if has_cuda() else ()
            failure = " ".join(str(warning.message) for warning in said)
        except Exception as error:  # a broken driver: any of CUDA's errors
            gpus, failure = (), str(error)
    return Cuda(gpus, version, runtime, "" if gpus else failure.partition("\n")[0])


def _gpus() -> tuple[Gpu, ...]:
    found = []
    for device in all_properties():
        node = None
        if hasattr(device, "pci_bus_id"):  # not in every release of torch
            domain, bus, slot = (getattr(device, f"pci_{part}_id") for part in _PCI_PARTS)
            node = pci_numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
        found.append(Gpu(device.name, device.total_memory, node))
    return tuple(found)


def cuda_checks(cuda: Cuda) -> list[Check]:
    """One check for each CUDA device, or one that says why there are none."""
    facts = {"driver": cuda.driver, "runtime": cuda.runtime}
    if cuda.gpus:
        checks = [
            Check(
                f"device {index}",
                Status.OK,
                f"{gpu.name}, {format_size(gpu.memory_bytes)}; offload runs on this GPU",
                facts={"memory_bytes": gpu.memory_bytes, "numa_node": gpu.numa_node},
            )
            for index, gpu in enumerate(cuda.gpus)
        ]
        versions = f"CUDA {cuda.runtime}, driver {cuda.driver or 'of unknown version'}"
        return [*checks, Check("CUDA", Status.OK, versions, facts=facts)]
    if cuda.driver is not None and cuda.runtime is None:
        return [
            Check(
                "CUDA",
                Status.WARNING,
                f"NVIDIA driver {cuda.driver} is loaded, but this PyTorch is built for the CPU",
                "to train on the GPU, install a CUDA build of PyTorch (https://pytorch.org)",
                facts,
            )
        ]
    if cuda.driver is not None:
        reason = cuda.failure.rstrip(".") or "no device is visible"
        return [
            Check(
                "CUDA",
                Status.WARNING,
                f"NVIDIA driver {cuda.driver} is loaded, but PyTorch sees no device: {reason}",
                "see whether nvidia-smi lists the GPU, and whether CUDA_VISIBLE_DEVICES hides it",
                facts,
            )
        ]
    value = "no CUDA device: activations of CPU training only"
    return [Check("CUDA", Status.INFO, value, facts=facts)]


def direct_storage_check(found: GdsStatus, is_wanted: bool) -> Check:
    """Checks whether bytes go from device to SSD without host memory, and if not, says why."""
    if found.is_gpudirect:
        status = Status.OK
    elif is_wanted:
        status = Status.WARNING if found.available else Status.PROBLEM
    else:
        status = Status.INFO
    advice = found.advice if is_wanted or found.available else ""
    return Check("GPUDirect", status, found.line, advice, found.facts)


def _text(path: Path) -> str:
    try:
        return kernel_text(path)
    except OSError:
        return ""
