# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a state that is away: `StatePlaceholder`, a tensor without bytes.

Only its shape and type can be read. Operations on it raise: their result would be a meta tensor,
which would replace the real state. Moving it to a device where the state belongs returns itself,
because scripts and trainers move states there after `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from megatron.offload.errors import STATES_PREFIX, OffloadError
from megatron.offload.moving.layout import Slot
from megatron.offload.moving.placeholder import without_bytes


class StatePlaceholder(torch.Tensor):
    """Stands for the tensor of `slot`; `.to` one of `homes` returns itself."""

    slot: Slot
    homes: frozenset[torch.device]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        return f"StatePlaceholder({tuple(self.shape)}, dtype={self.dtype}, on a tier)"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raises OffloadError."""
        raise _refusal("a copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises OffloadError."""
        raise _refusal("a copy, or to be saved,")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> StatePlaceholder:
        """Returns the tensor itself for a copy to one of its homes.

        Raises:
            OffloadError: any other operation.
        """
        if func is torch.ops.aten._to_copy.default and args[0]._is_at_home_with(**(kwargs or {})):
            own: StatePlaceholder = args[0]
            return own
        raise _refusal(str(func))

    def _is_at_home_with(
        self,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        pin_memory: bool | None = None,
        **_: Any,
    ) -> bool:
        """Whether `.to` with these arguments would leave the real tensor as it is."""
        if device is None or pin_memory or dtype not in (None, self.dtype):
            return False
        if memory_format not in (None, torch.preserve_format):
            return False
        return device.type != "meta" and torch.empty(0, device=device).device in self.homes


def placeholder_for(slot: Slot, homes: Iterable[torch.device]) -> StatePlaceholder:
    """A tensor on the device `meta`, of a slot's shape and type.

    Args:
        slot: of the tensor that it stands for.
        homes: devices to which that tensor can be moved without a change: its parameter's, and
            the device in whose memory it is updated.
    """
    made = without_bytes(
        StatePlaceholder, slot.shape, slot.stride, slot.dtype, torch.device("meta")
    )
    made.slot, made.homes = slot, frozenset(homes)
    return made


def is_placeholder(value: Any, slot: Slot | None) -> bool:
    """Whether a value of an optimizer's state stands for a tensor that is away.

    Args:
        value: of any type.
        slot: of the tensor that belongs there; None: no tensor does.

    Raises:
        OffloadError: it stands for another tensor, or is a meta tensor that stands for none.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return False
    if not isinstance(value, StatePlaceholder) or value.slot is not slot:
        raise OffloadError(
            f"{STATES_PREFIX}a tensor without values, or one that stands for another state on a "
            "tier, was put in the place of a state; call `optimizer.state_dict()`, or expose() of "
            "the handle's `states`, before moving states: until the next step all are there"
        )
    return True


def _refusal(what: str) -> OffloadError:
    return OffloadError(
        f"{STATES_PREFIX}{what} was asked for of a state that is on a tier and not in memory; call "
        "`optimizer.state_dict()`, or expose() of the handle's `states`, before: until the next "
        "step all are there"
    )
