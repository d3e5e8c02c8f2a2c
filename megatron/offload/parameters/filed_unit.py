# SPDX-License-Identifier: Apache-2.0
"""A unit of frozen parameters that are read from a saved model's files: `FiledUnit`.

Nothing is written for them: as long as their values are those of the files, these are the only copy
beside the one in memory, and they are never written to. Values that other code changes go to the
tiers like those of any other unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.copied_to_show import CopiedToShow
from megatron.offload.parameters.file_tier import FileBlock, FileTier
from megatron.offload.parameters.weight_files import SavedPiece
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.tier import Tier


class FiledUnit(CopiedToShow):
    """Frozen parameters whose values are in files.

    Args:
        of_unit: those of `ParameterUnit`.
        saved: of what each of the parameters is made, in their order.
        files: reads them.
        tiers: for what is changed or shown.
    """

    def __init__(
        self,
        *of_unit: Any,
        saved: Sequence[Sequence[SavedPiece]],
        files: FileTier,
        tiers: Sequence[Tier],
    ) -> None:
        super().__init__(*of_unit, tiers=tiers)
        self._slots = dict(self._layout.slots)
        pieces = [
            SavedPiece(tensor, slot.start_bytes + start)
            for slot, of_param in zip(self._slots.values(), saved, strict=True)
            for tensor, start in of_param
        ]
        self._origin = FileBlock(files, self.num_bytes, pieces)

    def put_away(self, copies: OnlyCopy) -> bool:
        """Frees the memory; writes the bytes only if they are not those of the files."""
        self.give_up_read()
        if self.where is Where.IN_MEMORY:
            self._take_notice()
            assert self.storage is not None
            if self.block is None and self._layout.slots == self._slots:
                with contextlib.suppress(OSError):  # of files that have changed: it is written
                    self.block = self._origin if self._origin.has(self.storage) else None
        return super().put_away(copies)

    @property
    def _needs_copy(self) -> bool:
        return self.block is self._origin

    def _values(self) -> torch.UntypedStorage:
        values = own_pages(self.num_bytes)
        self._origin.read(values)
        return values

    def _has_values(self, shown: torch.UntypedStorage) -> bool:
        return self._origin.has(shown)

    def _write_values(self, shown: torch.UntypedStorage) -> Any:
        return self._write(shown)
