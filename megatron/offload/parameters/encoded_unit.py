# SPDX-License-Identifier: Apache-2.0
"""A unit of frozen parameters that a tier has in few bits each: `EncodedUnit`.

Note [The same values everywhere]
The unit rounds its parameters once, when it takes them over, to values that the codec keeps exactly
(`weight_codec.py`). From then on the codec changes nothing: whether the unit is in memory, on a
drive, or stays because no tier has room for it, layers compute with the same values, those of a
model whose weights were rounded in memory. If other code changes a parameter, the new values are
rounded as well, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.copied_to_show import CopiedToShow
from megatron.offload.parameters.unit_encoding import UnitEncoding
from megatron.offload.parameters.weight_codec import WeightCodec
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

logger = logging.getLogger(__name__)


class EncodedUnit(CopiedToShow):
    """Frozen parameters in one storage; a tier has them in few bits each.

    Args:
        of_unit: those of `ParameterUnit`.
        codec: of its matrices.
        tiers: for what is shown.
    """

    def __init__(
        self,
        *of_unit: Any,
        codec: WeightCodec,
        tiers: Sequence[Tier],
    ) -> None:
        self._codec = codec
        self._encoding: UnitEncoding | None = None
        self._read: torch.UntypedStorage | None = None  # encoded bytes, or those that are coming
        super().__init__(*of_unit, tiers=tiers)

    @property
    def encoding(self) -> UnitEncoding:
        """How its bytes are encoded."""
        assert self._encoding is not None
        return self._encoding

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the parameters take now."""
        if self.where is Where.READING:
            return self.encoding.num_bytes
        return super().memory_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that a write or a read of the unit moves."""
        return self.encoding.num_bytes

    def note_change(self) -> None:
        """Other code has changed the parameters: rounds them."""
        super().note_change()
        if self._round():
            self._warn_of_rounding()

    def check(self) -> None:
        """Raises OffloadError if a parameter is trained that was frozen."""
        if any(param.requires_grad for param in self.params):
            raise OffloadError(
                f"{PARAMETERS_PREFIX}those of {self.name} were frozen when they were offloaded, "
                f"and are kept as {self._codec.name}, which no optimizer can train; call close() "
                "of the handle, then offload_parameters again"
            )

    def _round(self) -> bool:
        """Makes the values in memory those that the codec keeps; returns whether any changed."""
        assert self.storage is not None
        encoded = self.encoding.encode(self.storage)
        if self.encoding.agrees(encoded, self.storage):
            return False
        self.encoding.decode(encoded, self.storage)
        return True

    def _warn_of_rounding(self) -> None:
        logger.warning(
            "%sfrozen ones of %s were changed, and their new values were rounded to %s; to keep "
            "them exactly (after merging an adapter, say), close() the handle before",
            PARAMETERS_PREFIX,
            self.name,
            self._codec.name,
        )

    def _warn_of_numbers(self) -> None:
        if not all(map(_has_numbers, self._places.views)):
            logger.warning(
                "%sa matrix of %s has an infinite value or a NaN, so all %d values that share its "
                "scale are NaN now; keep such layers without --parameter-codec",
                PARAMETERS_PREFIX,
                self.name,
                self._codec.group,
            )

    # -- Encoded ----------------------------------------------------------------------------------

    def _to_write(self, after: Any) -> tuple[torch.UntypedStorage, Any]:
        assert self.storage is not None
        encoded = self.encoding.encode(self.storage)
        return encoded, None if self._device.is_host else self._device.record_event()

    def _begin_read(self) -> Transfer:
        self._read, transfer = self.block.tier.begin_read(self.block, into=self._pages())
        return transfer

    def _pages(self) -> torch.UntypedStorage | None:
        """Memory for encoded bytes on a CPU; None: the tier allocates it."""
        return own_pages(self.encoding.num_bytes) if self._device.is_host else None

    def _arrived(self, events: Sequence[Any]) -> Sequence[Any]:
        with self._lock:  # another thread that gives up the read waits: it frees the memory
            if self._read is None:  # it was given up
                return ()
            assert self._memory is not None
            storage = self._memory.for_read()
            assert storage is not None
            self._memory.use_after(self._device, [*events, self._device.restored_is_free()])
            try:
                self.encoding.decode(self._read, storage)
            finally:  # what is read next may take the memory of what was encoded
                self._device.refill_after([self._device.current_stream()])
            return () if self._device.is_host else (self._device.record_event(),)

    def read(self) -> None:
        """Brings the bytes to memory; waits for the read if they are not there.

        Raises:
            OSError: the read failed; the tier still has what it had.
        """
        super().read()
        self._read = None

    def _forget_read(self, transfer: Transfer) -> None:
        super()._forget_read(transfer)
        if self.where is Where.ON_TIER:
            self._read = None

    # -- Shown ------------------------------------------------------------------------------------

    def _values(self) -> torch.UntypedStorage:
        values = own_pages(self.num_bytes)
        self.encoding.decode(self._encoded_on_host(), values)
        return values

    def _has_values(self, shown: torch.UntypedStorage) -> bool:
        return self.encoding.agrees(self._encoded_on_host(), shown)

    def _write_values(self, shown: torch.UntypedStorage) -> Any:
        block = self._write(self.encoding.encode(shown))
        if block is not None:
            self._warn_of_rounding()
        return block

    def _encoded_on_host(self) -> torch.UntypedStorage:
        """The encoded bytes on the tier, compared with their checksums."""
        encoded = own_pages(self.encoding.num_bytes)
        self.block.tier.view(self.block)
        self.block.tier.copy_view(self.block, encoded)
        return encoded

    @torch.inference_mode(False)  # as in `ParameterUnit`
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        super()._take_memory(values)
        is_first = self._encoding is None
        self._encoding = UnitEncoding(self._layout, self._codec)
        if is_first:  # else `note_change` is called, and warns
            self._round()
            self._warn_of_numbers()


def _has_numbers(values: torch.Tensor) -> bool:
    return bool(values.sum(dtype=torch.float64).isfinite()) or bool(values.isfinite().all())
