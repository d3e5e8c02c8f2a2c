# SPDX-License-Identifier: Apache-2.0
"""What is in the place of a parameter, for tests that must not touch it: `beneath`."""

from __future__ import annotations

import torch


def beneath(param: torch.Tensor) -> torch.Tensor:
    """A copy of what is in a parameter's place; it is not brought for it."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.detach().cpu().clone()
