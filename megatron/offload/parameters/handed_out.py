# SPDX-License-Identifier: Apache-2.0
"""What other code holds of the memory of a unit that was shown to it: `HandedOut`.

Note [Views that others hold]
What a script makes of a parameter between passes (`p.data`, `p.detach()`, `p.view(-1)`, an array of
NumPy, `state_dict()`) is a view of the unit's memory, if the values are there. Autograd saves such
views too: those of a penalty on `p.flatten()`, whose backward pass comes when layers have computed.
Without its memory such a view would read zeros, and what is written to it would be lost, without a
word. So the unit stays in memory while other code holds a view of what it was shown there, and is
written when it leaves, for NumPy's writes leave no trace: `ParameterUnit.hide` counts what was
shown in memory as changed. What is shown on a tier has memory of its own: such a view keeps what
the parameters were, and what is written to it once they are in memory is lost. A view that is held
over a step is told of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload.errors import PARAMETERS_PREFIX

logger = logging.getLogger(__name__)


class HandedOut:
    """Which views of a unit's memory other code holds.

    Args:
        storage: the unit's memory, which the unit alone holds so far.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._num_own = _num_users(storage)
        self._is_whole = False  # whether others have views of the unit's own storage
        self._parts: list[StorageWeakRef] = []  # storages of their own over the same memory
        self._mapped: list[StorageWeakRef] = []  # over what a tier has
        self._since = -1  # the last backward pass of the unit when it was first handed out

    def add(self, views: Sequence[torch.Tensor], last_backward: int, *, is_on_tier: bool) -> None:
        """Other code gets these views.

        Args:
            views: of the unit's memory, or of what a tier has.
            last_backward: autograd's number of the last backward pass that came to the unit.
            is_on_tier: which of both.
        """
        self._parts, self._mapped = _alive(self._parts), _alive(self._mapped)
        if not (self._is_whole or self._parts or self._mapped):
            self._since = last_backward
        for view in views:
            storage = view.untyped_storage()
            if is_on_tier:
                self._mapped.append(StorageWeakRef(storage))
            elif storage._cdata != self._storage._cdata:
                self._parts.append(StorageWeakRef(storage))
            elif view.device.type != "cpu":  # else it has no elements
                self._is_whole = True

    @property
    def is_held(self) -> bool:
        """Whether other code holds one; the parameters do not show the memory.

        Of a device's memory a graph of the unit's layers counts as such too, as long as it lives.
        """
        self.look()
        return self._is_whole or bool(self._parts)

    def look(self) -> None:
        """Forgets what is no longer held; the parameters do not show the memory."""
        self._parts, self._mapped = _alive(self._parts), _alive(self._mapped)
        self._is_whole = self._is_whole and _num_users(self._storage) > self._num_own

    def warns(self, name: str, last_backward: int) -> bool:
        """Says so if one is held since before a backward pass that has ended: by no graph.

        Args:
            name: of the unit.
            last_backward: autograd's number of the last backward pass that came to the unit.

        Returns:
            Whether it has said so.
        """
        if last_backward == self._since or torch._C._current_graph_task_id() != -1:
            return False
        if self.is_held:
            then = "so they stay in memory as long as it does"
        elif self._mapped:
            then = "which does not show what training changes; what it writes there is lost"
        else:
            return False
        logger.warning(
            "%sother code holds a view of those of %s since before a step (p.data, p.detach(), an "
            "array of NumPy, state_dict()), %s; let it keep a clone",
            PARAMETERS_PREFIX,
            name,
            then,
        )
        return True


def _alive(storages: Sequence[StorageWeakRef]) -> list[StorageWeakRef]:
    return [one for one in storages if not one.expired()]


def _num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and other objects hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))
