# SPDX-License-Identifier: Apache-2.0
"""Which `Device` stands for a torch device: `open_device`. Integrations and the engine call it."""

from __future__ import annotations

import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.cuda import CudaDevice
from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError


def open_device(device: torch.device | str) -> Device:
    """Makes the `Device` that stands for a torch device.

    Raises:
        ConfigurationError: there is none for its kind.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ConfigurationError(
        f"activations on a {device.type} device cannot be offloaded, only on cuda and cpu; use "
        "--activation-offload off"
    )
