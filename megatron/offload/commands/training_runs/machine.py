# SPDX-License-Identifier: Apache-2.0
"""What measured figures depend on: `machine_facts`. Written beside them; decides nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.cuda import all_properties, has_cuda
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.machine.mounts import mount_of, read_mountinfo
from megatron.offload.sizes import GIB


def machine_facts(offload_dir: Path) -> dict[str, Any]:
    """Processor, memory, GPU, versions, and the file system that activations go to."""
    cpu = platform.machine()
    for line in kernel_text(Path("/proc/cpuinfo")).split("\n"):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        # The CPU runtime, once it is installed, counts a device where there is none.
        "gpu": next((one.name for one in all_properties()), None) if has_cuda() else None,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": _version("megatron-core"),
        "offload_filesystem": _filesystem_of(offload_dir),
    }


def in_a_line(machine: dict[str, Any]) -> str:
    """The facts that stand above a table of figures, as one line."""
    return (
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / GIB:.0f} GiB, {machine['offload_filesystem']}, "
        f"torch {machine['torch']}, megatron-core {machine['megatron_core']}"
    )


def _filesystem_of(path: Path) -> str:
    """Type and device of the file system that holds a path, from the kernel's mount table."""
    mount = mount_of(path.resolve(), read_mountinfo())
    return f"{mount.file_system} on {mount.source}" if mount else "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
