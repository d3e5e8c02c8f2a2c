# SPDX-License-Identifier: Apache-2.0
"""What the figures depend on: `machine_facts`. Asks the system, torch and nvidia-smi; never fails
because one of them does not answer.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from megatron.offload.commands.doctor.gpu import find_cuda
from megatron.offload.config import format_size
from megatron.offload.device.memory_limit import memory_limit
from megatron.offload.device.mounts import block_devices, mount_of, parse_mountinfo
from megatron.offload.tiers.gds_status import gds_status

_PACKAGES = ("megatron-core", "transformer-engine", "apex", "kvikio-cu13", "kvikio-cu12")
_LINK = "pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"


def machine_facts(device: torch.device, directory: Path) -> dict[str, Any]:
    """Plain values, for JSON and for `summary_lines`."""
    limit = memory_limit()
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": limit.total_bytes,
        "available_memory_bytes": limit.available_bytes,
        "locked_memory_limit_bytes": None if locked_bytes < 0 else locked_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "disk": _disk(directory),
        "gpu": None,
    }
    if device.type == "cuda":
        found = find_cuda()
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "num_gpus": torch.cuda.device_count(),
            "driver": found.driver,
            "cuda": found.runtime,
            "link_clock_power": _nvidia_smi(device),
            "gpudirect": str(gds_status(has_gpu=True)),
        }
    return facts


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """For people."""
    host = (
        f"{facts['cpu']}, {facts['cores']} cores, {format_size(facts['memory_bytes'])}; "
        f"disk: {facts['disk']}"
    )
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    software = f"torch {facts['torch']}, Python {facts['python']}, {packages or 'no megatron-core'}"
    if facts["gpu"] is None:
        return ["no GPU: this only tries the script out", host, software]
    gpu = (
        f"{facts['gpu']}, {format_size(facts['gpu_memory_bytes'])}, driver {facts['driver']}, "
        f"CUDA {facts['cuda']}; {facts['gpudirect']}"
    )
    return [gpu, host, software]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    if package == "megatron-core":
        try:  # a checkout on PYTHONPATH
            from megatron.core.package_info import __version__
        except ImportError:
            return None
        return str(__version__)
    return None


def _disk(directory: Path) -> str:
    mount = mount_of(directory.resolve(), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    if mount is None:
        return "unknown"
    drives = [
        f"{drive.model or drive.name}{' (virtual)' if drive.is_virtual else ''}"
        for drive in block_devices(mount)
    ]
    free = format_size(shutil.disk_usage(directory).free)
    return f"{mount.file_system} on {', '.join(drives) or 'no block device'}, {free} free"


def _nvidia_smi(device: torch.device) -> str | None:
    """PCIe generation and width, clock and power limit; None where nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_LINK}", "--format=csv,noheader", f"-i={device.index}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
