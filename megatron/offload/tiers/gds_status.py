# SPDX-License-Identifier: Apache-2.0
"""Whether GPUDirect Storage (GDS) can be used here, and how it would move bytes: `gds_status`.

The GDS tier calls it before it opens, the integration before training, and `doctor` on request.
kvikio is imported only if there is a GPU. Nothing here raises: a failure becomes a line.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUFILE_SETTINGS = Path("/etc/cufile.json")
UDEV = Path("/run/udev")
_NOT_GDS = "use --activation-offload-io auto"


@dataclass(frozen=True)
class GdsStatus:
    """Whether GPUDirect Storage works on this machine, and if not, why.

    It describes the machine; for files that GPUDirect cannot serve, kvikio uses host memory.

    Args:
        available: kvikio can be used.
        is_gpudirect: bytes bypass host memory.
        line: which of the two, and why not the better one.
        advice: what to do about it.
        facts: what was found; None: not looked for, or not there.
    """

    available: bool
    is_gpudirect: bool
    line: str
    advice: str
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.line}; {self.advice}" if self.advice else self.line


def gds_status(has_gpu: bool) -> GdsStatus:
    """Asks kvikio and cuFile whether this machine has GPUDirect Storage.

    Args:
        has_gpu: activations are on a CUDA device.
    """
    settings = Path(os.environ.get("CUFILE_ENV_PATH_JSON", CUFILE_SETTINGS))
    facts: dict[str, Any] = {
        "kvikio": None,
        "compatibility_mode": None,
        "nvidia_fs": None,
        "settings": str(settings) if settings.is_file() else None,
    }
    if not has_gpu:
        line = "GPUDirect Storage needs a CUDA device, and there is none"
        return GdsStatus(False, False, line, _NOT_GDS, facts)
    try:
        kvikio, defaults, driver = import_kvikio()
        facts["kvikio"] = kvikio.__version__
        defaults.get("auto_direct_io_read")
        facts["compatibility_mode"] = defaults.is_compat_mode_preferred()
    except Exception as error:  # any error of its shared libraries and settings
        return GdsStatus(False, False, *_why_unavailable(error, facts["kvikio"]), facts)
    name = f"kvikio {facts['kvikio']}"
    if facts["compatibility_mode"]:
        reason, advice = _why_compatible_only()
        line = f"{name} in compatibility mode, through host memory: {reason}"
        return GdsStatus(True, False, line, advice, facts)
    try:
        facts["nvidia_fs"] = driver.get("is_gds_available")
    except Exception as error:
        line = f"{name}, through host memory: cuFile does not start ({_first_line(error)})"
        return GdsStatus(True, False, line, "see cufile.log in the current directory", facts)
    if facts["nvidia_fs"]:
        return GdsStatus(True, True, f"{name} with GPUDirect (nvidia_fs)", "", facts)
    if _uses_pci_p2pdma(settings):
        return GdsStatus(True, True, f"{name} with GPUDirect (PCI peer-to-peer)", "", facts)
    line = f"{name}, through host memory: the kernel module nvidia_fs is not loaded"
    if facts["settings"]:
        line += f" nor use_pci_p2pdma set in {settings}"
    advice = "install NVIDIA's nvidia-gds and load it on the host: modprobe nvidia-fs"
    return GdsStatus(True, False, line, advice, facts)


def import_kvikio() -> tuple[Any, Any, Any]:
    """kvikio, its settings, and its view of cuFile's driver. Raises what importing raises."""
    names = ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    kvikio, defaults, driver = (importlib.import_module(name) for name in names)
    return kvikio, defaults, driver


def _why_unavailable(error: Exception, version: str | None) -> tuple[str, str]:
    """What is wrong with kvikio, and what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name == "kvikio":
        return (
            "GPUDirect Storage needs the package kvikio, which is not installed",
            f"pip install kvikio-cu13 (CUDA 12: kvikio-cu12), or {_NOT_GDS}",
        )
    if version is not None and isinstance(error, (AttributeError, KeyError)):
        return (
            f"kvikio {version} would read through the page cache; 25.12 or later is needed",
            f"upgrade it, or {_NOT_GDS}",
        )
    return (
        f"kvikio cannot be loaded ({_first_line(error)})",
        f"install the one built for this CUDA version (kvikio-cu12, kvikio-cu13), or {_NOT_GDS}",
    )


def _why_compatible_only() -> tuple[str, str]:
    """The reason for kvikio's compatibility mode, and what to do."""
    if os.environ.get("KVIKIO_COMPAT_MODE", "").lower() in ("1", "true", "on", "yes"):
        return "KVIKIO_COMPAT_MODE asks for it", "unset KVIKIO_COMPAT_MODE"
    if "microsoft" in platform.release().lower():
        return "cuFile does not work in WSL", _NOT_GDS
    if not UDEV.is_dir():
        return f"{UDEV} is missing", f"in a container: docker run --volume {UDEV}:{UDEV}:ro"
    return "it does not find libcufile.so", "install NVIDIA's libcufile for this CUDA version"


def _uses_pci_p2pdma(settings: Path) -> bool:
    try:
        text = re.sub("//.*", "", settings.read_text(errors="replace"))
    except OSError:
        return False
    return re.search(r'"use_pci_p2pdma"\s*:\s*true', text) is not None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
