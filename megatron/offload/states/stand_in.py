# SPDX-License-Identifier: Apache-2.0
"""What is in an optimizer's state in place of a tensor that is away: `stand_in`, without bytes.

Nobody may take it for the tensor: what would be lost with it raises an error instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from megatron.offload.errors import OffloadError
from megatron.offload.states.layout import Slot


def stand_in(slot: Slot) -> torch.Tensor:
    """A meta tensor of a slot's shape and type, which can be neither copied nor saved."""
    standing = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="meta")
    standing.__deepcopy__ = standing.__reduce_ex__ = _refuse  # type: ignore[method-assign]
    return standing


def is_stand_in(value: Any) -> bool:
    """Whether a value of an optimizer's state stands for a tensor that is elsewhere.

    Raises:
        OffloadError: somebody has changed it, which the tensor knows nothing of.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return False
    if value._version:
        raise OffloadError(
            "an optimizer state was changed while it is on a tier, where the change does not "
            "reach it; change states after `optimizer.state_dict()` and before the next step"
        )
    return True


def _refuse(*_: Any) -> NoReturn:
    raise OffloadError(
        "an optimizer state was copied or saved while it is on a tier and not in memory; take "
        "`optimizer.state_dict()`, or call it first"
    )
