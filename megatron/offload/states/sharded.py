# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a sharded tensor: `part_of`, `local_of`, and back: `as_part_of`.

States of sharded parameters (FSDP2, tensor parallelism) are DTensors. A rank moves its own part.
"""

from __future__ import annotations

import torch


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself. For its shape and type."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `part_of`, without a graph."""
    return part_of(tensor).detach()


def as_part_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor of the kind of `tensor`: a DTensor with this part, or itself."""
    if not hasattr(tensor, "_local_tensor"):
        return local
    whole: torch.Tensor = type(tensor).from_local(  # type: ignore[attr-defined]
        local,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return whole
