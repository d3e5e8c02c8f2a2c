# SPDX-License-Identifier: Apache-2.0
"""The GPU's part of `doctor`: CUDA devices, and whether GPUDirect Storage works.

`find_*` looks, `*_check` judges what was found, so that each can be tried without a GPU. kvikio is
imported only where there is a CUDA device for it. Nothing here raises: a failure becomes a line.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.offload.config import format_size
from megatron.offload.report.doctor.check import Check, Status
from megatron.offload.storage.mounts import pci_numa_node

PROC = Path("/proc")
CUFILE_SETTINGS = Path("/etc/cufile.json")
_PCI_PARTS = ("domain", "bus", "device")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device."""

    name: str
    memory_bytes: int
    numa_node: int | None


@dataclass(frozen=True)
class Cuda:
    """What this process sees of CUDA.

    Args:
        driver: version of NVIDIA's kernel driver; None: it is not loaded.
        runtime: CUDA version that torch is built for; None: a build for the CPU.
        failure: what torch said when it looked for devices.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    runtime: str | None = None
    failure: str = ""


@dataclass(frozen=True)
class DirectStorage:
    """What GPUDirect Storage needs.

    Args:
        is_compatible_only: kvikio goes through host memory; None: it could not be asked.
        failure: why it could not be asked.
        settings: cuFile's settings file, if there is one.
    """

    kvikio: str | None = None
    is_compatible_only: bool | None = None
    failure: str = ""
    has_nvidia_fs: bool = False
    settings: Path | None = None
    settings_text: str = ""


def find_cuda(proc: Path = PROC) -> Cuda:
    """Asks torch for CUDA devices, and the kernel for the driver."""
    text = _text(proc / "driver/nvidia/version")
    driver = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    version = driver[1] if driver else None
    runtime = torch.version.cuda
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            gpus = _gpus() if torch.cuda.is_available() else ()
            failure = " ".join(str(warning.message) for warning in said)
        except Exception as error:  # a broken driver: any of CUDA's errors
            gpus, failure = (), str(error)
    return Cuda(gpus, version, runtime, "" if gpus else failure.partition("\n")[0])


def _gpus() -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        node = None
        if hasattr(device, "pci_bus_id"):  # not in every release of torch
            domain, bus, slot = (getattr(device, f"pci_{part}_id") for part in _PCI_PARTS)
            node = pci_numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
        found.append(Gpu(device.name, device.total_memory, node))
    return tuple(found)


def cuda_checks(cuda: Cuda, is_offloaded: bool, is_wanted: bool) -> list[Check]:
    """The devices, or why there are none.

    Args:
        is_offloaded: this version moves activations of CUDA devices.
        is_wanted: the flags ask for offload.
    """
    facts = {"driver": cuda.driver, "runtime": cuda.runtime}
    if cuda.gpus:
        checks = [
            Check(
                f"device {index}",
                Status.OK,
                f"{gpu.name}, {format_size(gpu.memory_bytes)}",
                facts={"memory_bytes": gpu.memory_bytes, "numa_node": gpu.numa_node},
            )
            for index, gpu in enumerate(cuda.gpus)
        ]
        versions = f"CUDA {cuda.runtime}, driver {cuda.driver or 'of unknown version'}"
        checks.append(Check("CUDA", Status.OK, versions, facts=facts))
        if not is_offloaded:
            status = Status.PROBLEM if is_wanted else Status.WARNING
            value = "this version moves activations of CPU training only"
            advice = "train on the GPU with --activation-offload off"
            checks.append(Check("offload", status, value, advice))
        return checks
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


def find_direct_storage(has_gpu: bool, kvikio: str | None, proc: Path = PROC) -> DirectStorage:
    """Asks kvikio (imported only with a GPU), the kernel and cuFile's settings."""
    compatible, failure = None, ""
    if kvikio is not None and has_gpu:
        try:
            defaults = importlib.import_module("kvikio.defaults")
            ask = getattr(defaults, "is_compat_mode_preferred", None) or defaults.compat_mode
            compatible = bool(ask())
        except Exception as error:  # whatever its shared libraries raise
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    settings = Path(os.environ.get("CUFILE_ENV_PATH_JSON", CUFILE_SETTINGS))
    return DirectStorage(
        kvikio,
        compatible,
        failure,
        has_nvidia_fs=(proc / "driver/nvidia-fs").exists(),
        settings=settings if settings.is_file() else None,
        settings_text=_text(settings),
    )


def direct_storage_check(found: DirectStorage, has_gpu: bool, is_wanted: bool) -> Check:
    """Whether bytes go from device to SSD without host memory, and if not, why."""
    name = "GPUDirect"
    facts = {
        "kvikio": found.kvikio,
        "compatibility_mode": found.is_compatible_only,
        "nvidia_fs": found.has_nvidia_fs,
        "settings": None if found.settings is None else str(found.settings),
    }
    impossible = Status.PROBLEM if is_wanted else Status.INFO
    slower = Status.WARNING if is_wanted else Status.INFO
    if not has_gpu:
        advice = "use --activation-offload-io auto" if is_wanted else ""
        value = "GPUDirect Storage needs a CUDA device, and there is none"
        return Check(name, impossible, value, advice, facts)
    if found.kvikio is None:
        value = "kvikio is not installed: activations go to the SSD through host memory"
        advice = (
            "pip install kvikio-cu13 (CUDA 12: kvikio-cu12), or use --activation-offload-io auto"
        )
        return Check(name, impossible, value, advice if is_wanted else "", facts)
    if found.is_compatible_only is None:
        value = f"kvikio {found.kvikio} cannot be imported: {found.failure}"
        advice = "install the kvikio that is built for this CUDA version (kvikio-cu12, kvikio-cu13)"
        return Check(name, impossible, value, advice if is_wanted else "", facts)
    if found.is_compatible_only:
        reason, advice = _why_compatible_only()
        value = f"kvikio {found.kvikio} in compatibility mode, through host memory: {reason}"
        return Check(name, slower, value, advice, facts)
    if not found.has_nvidia_fs and not _uses_pci_p2pdma(found.settings_text):
        where = f" nor use_pci_p2pdma set in {found.settings}" if found.settings else ""
        value = (
            f"kvikio {found.kvikio} works, but cuFile goes through host memory: the kernel module "
            f"nvidia_fs is not loaded{where}"
        )
        advice = "install NVIDIA's nvidia-gds and load it on the host: modprobe nvidia-fs"
        return Check(name, slower, value, advice, facts)
    way = "kernel module nvidia_fs" if found.has_nvidia_fs else "PCI peer-to-peer"
    return Check(name, Status.OK, f"kvikio {found.kvikio}, {way}", facts=facts)


def _why_compatible_only() -> tuple[str, str]:
    """A reason that kvikio has for it, and what to do."""
    asked = os.environ.get("KVIKIO_COMPAT_MODE", "").lower()
    if asked in ("1", "true", "on", "yes"):
        return "KVIKIO_COMPAT_MODE asks for it", "unset KVIKIO_COMPAT_MODE"
    if "microsoft" in platform.release().lower():
        return "cuFile does not work in WSL", "use --activation-offload-io auto"
    if not os.access("/run/udev", os.R_OK):
        return (
            "/run/udev cannot be read",
            "in a container: docker run --volume /run/udev:/run/udev:ro",
        )
    return "it does not find libcufile.so", "install NVIDIA's libcufile for this CUDA version"


def _uses_pci_p2pdma(settings: str) -> bool:
    lines = (line for line in settings.splitlines() if not line.lstrip().startswith("//"))
    return re.search(r'"use_pci_p2pdma"\s*:\s*true', "\n".join(lines)) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
