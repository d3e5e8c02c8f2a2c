# SPDX-License-Identifier: Apache-2.0
"""Noise by which values are rounded up or down: `noise_of`, a hash of the values themselves.

Note [Noise of the values themselves]
The noise of a value is a hash of all bits of its group, of the group's place in the tensor and of
its own place in the group, mixed as MurmurHash3 ends (Appleby, public domain). So no generator
moves, and the same values give the same noise everywhere: in two runs, after a resume, on ranks
that hold copies, with a fast drive and a slow one. From step to step weights change, so values and
their noise do.
"""

from __future__ import annotations

import torch

GROUP = 128  # values that are hashed together
FIRST_FACTOR, SECOND_FACTOR = 0x85EBCA6B, 0xC2B2AE35  # of MurmurHash3's end
STRIDE = 0x9E3779B9  # 2**32 over the golden ratio: neighbours' keys are far apart

_ALL = (1 << 32) - 1


def noise_of(wide: torch.Tensor, place: int) -> torch.Tensor:
    """Numbers of [0, 1) for groups of float32 values: Note [Noise of the values themselves].

    Shape [groups, GROUP].
    """
    bits = wide.view(torch.int32)
    hashes = (bits ^ _shifted(bits, 16)) * factors_of_places(wide.device)
    places = torch.arange(place, place + len(wide), dtype=torch.int32, device=wide.device)
    of_groups = _mixed(hashes.sum(1, dtype=torch.int32) + places * _signed(STRIDE))
    mixed = _mixed(of_groups.unsqueeze(1) + keys_of_places(wide.device))
    return _shifted(mixed, 8).float().mul_(2.0**-24)


def keys_of_places(device: torch.device) -> torch.Tensor:
    """What tells the noise of a group's places apart. Shape [GROUP], int32."""
    return torch.arange(GROUP, dtype=torch.int32, device=device) * _signed(STRIDE)


def factors_of_places(device: torch.device) -> torch.Tensor:
    """What the bits at each place count in a group's hash; odd. Shape [GROUP], int32."""
    return _mixed(torch.arange(1, GROUP + 1, dtype=torch.int32, device=device)) | 1


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Of each bit all others depend. int32: torch has no products of integers without a sign."""
    bits = (bits ^ _shifted(bits, 16)) * _signed(FIRST_FACTOR)
    bits = (bits ^ _shifted(bits, 13)) * _signed(SECOND_FACTOR)
    return bits ^ _shifted(bits, 16)


def _signed(bits: int) -> int:
    """What int32 makes of 32 bits."""
    return bits - ((bits >> 31) << 32)


def _shifted(bits: torch.Tensor, number: int) -> torch.Tensor:
    """Bits of int32 shifted to the right; zeros follow, whatever the sign."""
    return (bits >> number) & (_ALL >> number)
