# SPDX-License-Identifier: Apache-2.0
"""What is in an optimizer's state in place of a tensor that is away: `StandIn`, without bytes.

Nobody may take it for the tensor: who asks for more than its shape and type gets an error. What
were made of it, as a meta tensor is made of a meta tensor, would be put in its place and lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch

from megatron.offload.errors import STATES_PREFIX, OffloadError
from megatron.offload.states.layout import Slot

_T = TypeVar("_T", bound=torch.Tensor)


class StandIn(torch.Tensor):
    """Stands for the tensor that `slot` is for. Made by `stand_in`."""

    slot: Slot

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        return f"StandIn({tuple(self.shape)}, dtype={self.dtype}, on a tier)"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raises OffloadError."""
        raise _refusal("a copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises OffloadError."""
        raise _refusal("a copy, or to be saved,")

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises OffloadError, whatever is to be done with it."""
        raise _refusal(str(func))


def stand_in(slot: Slot) -> StandIn:
    """A tensor on the device `meta`, of a slot's shape and type."""
    made = without_bytes(StandIn, slot.shape, slot.stride, slot.dtype, torch.device("meta"))
    made.slot = slot
    return made


def is_stand_in(value: Any, slot: Slot | None) -> bool:
    """Whether a value of an optimizer's state stands for a tensor that is elsewhere.

    Args:
        value: of any type.
        slot: of the tensor that belongs there, if there is one.

    Raises:
        OffloadError: it stands for another one, or has no bytes of its own and stands for none.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return False
    if not isinstance(value, StandIn) or value.slot is not slot:
        raise OffloadError(
            f"{STATES_PREFIX}a tensor without values, or what stands for another state that is on "
            "a tier, was put in the place of one; call `optimizer.state_dict()`, or expose() of "
            "the handle's `states`, before moving states: until the next step all are there"
        )
    return True


def without_bytes(
    kind: type[_T],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> _T:
    """A tensor of a type whose `__torch_dispatch__` answers all that is asked of it."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made: _T = make(kind, shape, strides=stride, dtype=dtype, device=device)
    return made


def _refusal(what: str) -> OffloadError:
    return OffloadError(
        f"{STATES_PREFIX}{what} was asked for of a state that is on a tier and not in memory; call "
        "`optimizer.state_dict()`, or expose() of the handle's `states`, before: until the next "
        "step all are there"
    )
