# SPDX-License-Identifier: Apache-2.0
"""Which `Device` stands for a torch device: `open_device`. Integrations and the engine call it."""

from __future__ import annotations

import os

import torch

from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.cuda import CudaPlatform
from megatron.offload.device.device import Device
from megatron.offload.device.platform import (
    Platform,
    platform_of,
    register_platform,
    registered_kinds,
)
from megatron.offload.errors import PREFIX, ConfigurationError

register_platform("cuda", CudaPlatform())

# What the threads that train have opened in this process, for later calls: activations,
# states, parameters and gradients share its streams, and so the memory that these have freed.
_opened: dict[torch.device, AcceleratorDevice] = {}
os.register_at_fork(after_in_child=_opened.clear)  # its streams are the parent's


def open_device(device: torch.device | str, prefix: str = PREFIX) -> Device:
    """The `Device` that stands for a torch device; of an accelerator one for the whole process.

    Args:
        device: it.
        prefix: of the caller's messages.

    Raises:
        ConfigurationError: there is none for its kind; the message says what is missing.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    platform = platform_of(device.type)
    if platform is not None:
        return _shared(device, platform)
    raise ConfigurationError(
        f"{prefix}what is on a {device.type} device cannot be offloaded, only what is on "
        f"{', '.join(registered_kinds())} and cpu: {_missing(device.type)}; train on one of these, "
        "or without offload"
    )


def _shared(device: torch.device, platform: Platform) -> AcceleratorDevice:
    if device.index is None:
        index = torch.get_device_module(device).current_device()
        device = torch.device(device.type, index)
    found = _opened.get(device)
    if found is None or found.platform is not platform:  # another was registered meanwhile
        found = _opened[device] = AcceleratorDevice(device, platform)
    return found


def _missing(kind: str) -> str:
    """What a kind of device without a platform lacks, as a clause."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return f"torch has no module torch.{kind}"
    if not hasattr(module, "Stream"):
        return f"torch.{kind} has no streams"
    return f"no way is known to pin host memory for {kind}"
