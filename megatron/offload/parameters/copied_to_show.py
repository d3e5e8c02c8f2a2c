# SPDX-License-Identifier: Apache-2.0
"""A unit whose block on a tier cannot be mapped as its parameters: `CopiedToShow`.

Note [Shown from a copy]
Other code sees the parameters of a unit on a tier without bringing them to memory: the tier maps
its block. Encoded bytes are no tensor's, and a saved model's file is not to be changed. So the unit
writes its values beside them, as they are, and shows these. On a drive the copy stays until the
values change: a script that saves its adapters every few steps asks for the whole model each time,
and writes it once.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.errors import PARAMETERS_PREFIX
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.sizes import format_size
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier

logger = logging.getLogger(__name__)


class CopiedToShow(ParameterUnit):
    """A unit that is shown from a copy: Note [Shown from a copy].

    Args:
        of_unit: those of `ParameterUnit`.
        tiers: that a copy may be written to.
    """

    def __init__(
        self,
        *of_unit: Any,
        tiers: Sequence[Tier],
    ) -> None:
        self._tiers = list(tiers)
        self._copy: Any = None  # a block with the values
        self._has_warned = False
        super().__init__(*of_unit)

    # -- What a kind of unit says -----------------------------------------------------------------

    def _values(self) -> torch.UntypedStorage:
        """The values that the block stands for, in host memory. Raises OSError."""
        raise NotImplementedError

    def _has_values(self, shown: torch.UntypedStorage) -> bool:
        """Whether the block stands for these values. Raises OSError."""
        raise NotImplementedError

    def _write_values(self, shown: torch.UntypedStorage) -> Any:
        """A new block for these values; None: no tier has room. Raises OSError."""
        raise NotImplementedError

    @property
    def _needs_copy(self) -> bool:
        """Whether the block on the tier cannot be mapped."""
        return True

    # -- Shown ------------------------------------------------------------------------------------

    def note_change(self) -> None:
        """The bytes in memory were changed: neither block nor copy are theirs any more."""
        super().note_change()
        self._copy = None

    @torch.inference_mode(False)
    def show(self) -> bool:
        """See `ParameterUnit.show`; where no tier has room for the values, it brings them."""
        self.take_back()  # else a write may end between two looks at where the bytes are
        if self._is_copied_to_show and self._copy is None:
            self._copy = self._write(self._values())
            if self._copy is None:
                self._warn_without_room()
                self.bring()
        return super().show()

    def _warn_without_room(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%sno tier has room for those of %s in full size (%s), in which a saved or copied "
            "model shows them, so they come to memory; make room on the disk, or raise the budget",
            PARAMETERS_PREFIX,
            self.name,
            format_size(self.num_bytes),
        )

    @property
    def _is_copied_to_show(self) -> bool:
        return self.where is Where.ON_TIER and self._needs_copy

    def _write(self, storage: torch.UntypedStorage) -> Any:
        """A block with these bytes, written; None: no tier has room. Raises OSError."""
        for tier in self._tiers:
            started = tier.begin_write(storage)
            if started is not None:
                block, transfer = started
                transfer.wait()
                block.tier.wait_for_writes()  # else changes of what is shown would be overwritten
                return block
        return None

    @property
    def _shown_block(self) -> Any:
        if not self._needs_copy:
            return super()._shown_block
        if self._copy is None:  # another thread has given up a read meanwhile
            raise OSError("there is no copy to show")
        return self._copy

    def renew(self) -> None:
        """Makes changes of the bytes that `view` shows part of the block on the tier.

        Raises:
            OSError: the tier could not take them.
        """
        if not self._is_copied_to_show:
            super().renew()
            return
        if self._copy is None:
            return
        shown = self.copy_of_view()
        if not self._has_values(shown):
            block = self._write_values(shown)
            if block is None:
                raise OSError(errno.ENOSPC, "no tier has room for what was changed")
            self.block, self._copy = block, None
        elif not isinstance(self._copy.tier, SsdTier):  # memory is for what computes
            self._copy = None

    @torch.inference_mode(False)  # as in `ParameterUnit`
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        super()._take_memory(values)
        self._copy = None
