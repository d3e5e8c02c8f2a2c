# SPDX-License-Identifier: Apache-2.0
"""Jobs about the machine: whether a process can use its device, its memory, what it is.

`parts.py` lists them. The arithmetic of every other part stands on these facts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from check.gpu_day.settings import Settings
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.sizes import GIB, MIB

Note = Callable[[dict[str, Any]], None]
_PACKAGES = ("transformers", "accelerate", "trl", "liger-kernel", "msgspec", "scipy", "numba")


def touch_device(settings: Settings, note: Note) -> dict[str, Any]:
    """Computes something, which fails where this process cannot use the device; what both are."""
    found = machine_facts(settings.directory)
    total = float(torch.ones(8, device=settings.device).sum())
    return {"sum": total, "device": found["gpu"] or found["cpu"], "line": in_a_line(found)}


def grow_memory(settings: Settings, note: Note) -> dict[str, Any]:
    """Touches host memory until the machine has what the budgets ask for.

    The memory of a virtual machine may grow as it is used, and budgets are checked against what the
    kernel says there is.
    """

    def total_bytes() -> int:
        lines = kernel_text(Path("/proc/meminfo")).split("\n")
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))

    before = total_bytes()
    if settings.is_tiny:
        np.ones(8 * MIB, dtype=np.uint8)
        return {"before_bytes": before, "after_bytes": total_bytes()}
    wanted = settings.host_budget_bytes + settings.states_budget_bytes + 16 * GIB
    held: list[Any] = []
    while total_bytes() < wanted and len(held) * 4 * GIB < wanted:
        held.append(np.ones(4 * GIB, dtype=np.uint8))
        note({"before_bytes": before, "after_bytes": total_bytes()})
    del held
    return {"before_bytes": before, "after_bytes": total_bytes(), "wanted_bytes": wanted}


def facts(settings: Settings, note: Note) -> dict[str, Any]:
    """Processor, memory, GPU, versions; how the GPU stands before anything ran."""
    found = machine_facts(settings.directory)
    found["packages"] = {name: _version(name) for name in _PACKAGES}
    usage = shutil.disk_usage(settings.directory)
    found["drive_free_bytes"], found["drive_bytes"] = usage.free, usage.total
    if not settings.on_gpu:
        return found
    properties = torch.cuda.get_device_properties(settings.device)
    found["gpu_memory_bytes"] = properties.total_memory
    found["gpu_processors"] = properties.multi_processor_count
    torch.ones(1, device=settings.device)
    found["gpu_free_bytes"] = torch.cuda.mem_get_info(settings.device)[0]
    note(found)
    snapshot = torch.cuda.memory._snapshot()
    settings_of_it = snapshot.get("allocator_settings", {})
    found["allocator"] = {
        name: value for name, value in settings_of_it.items() if not isinstance(value, dict)
    }
    note(found)
    if command := shutil.which("nvidia-smi"):
        asked = [command, "-q", "-d", "CLOCK,POWER,PERFORMANCE"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        found["nvidia_smi"] = answer.stdout[:3000]
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not there"
