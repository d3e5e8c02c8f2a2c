# SPDX-License-Identifier: Apache-2.0
"""A unit of frozen parameters that a tier has in few bits each: `EncodedUnit`.

Note [The same values everywhere]
The unit rounds its parameters once, when it takes them over, to values that the codec keeps exactly
(`weight_codec.py`). From then on the codec changes nothing: whether the unit is in memory, on a
drive, or stays because no tier has room for it, layers compute with the same values, those of a
model whose weights were rounded in memory. If other code changes a parameter, the new values are
rounded as well, with a warning.

Note [Shown from a copy]
Other code sees the parameters of a unit on a tier without bringing them to memory: the tier maps
its block. Encoded bytes are no tensor's, so the unit writes its values beside them, as they are.
On a drive the copy stays until the values change: a script that saves its adapters every few steps
asks for the whole model each time, and writes it once.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.moving.storage import Ended, Where
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.parameters.unit_encoding import UnitEncoding
from megatron.offload.parameters.weight_codec import WeightCodec
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.transfer import Transfer

logger = logging.getLogger(__name__)


class EncodedUnit(ParameterUnit):
    """Frozen parameters in one storage; a tier has them in few bits each.

    Args:
        codec: of its matrices.

    The others are those of `ParameterUnit`.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[torch.nn.Parameter],
        device: Device,
        parts: Mapping[torch.Tensor, Part] | None = None,
        touched: Callable[[], bool] | None = None,
        ended: Ended | None = None,
        *,
        codec: WeightCodec,
    ) -> None:
        self._codec = codec
        self._encoding: UnitEncoding | None = None
        self._read: torch.UntypedStorage | None = None  # encoded bytes, or those that are coming
        self._shown: Any = None  # a block: Note [Shown from a copy]
        super().__init__(name, params, device, parts, touched, ended)

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
        self._shown = None
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
        assert self._memory is not None and self._read is not None
        self._device.use_after(self._read, events)
        storage = self._memory.for_read()
        assert storage is not None
        self._device.use_after(storage, [self._device.restored_is_free()])
        self.encoding.decode(self._read, storage)
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

    @torch.inference_mode(False)
    def show(self) -> bool:
        """See `ParameterUnit.show`; where no tier has room for the values, it brings them."""
        if self.where is Where.ON_TIER and self._shown is None and not self._write_shown():
            self.bring()
        return super().show()

    def _write_shown(self) -> bool:
        """Note [Shown from a copy]; False: no tier has room.

        Raises:
            OSError: the encoded bytes could not be read.
        """
        values = own_pages(self.num_bytes)
        self.encoding.decode(self._encoded_on_host(), values)
        started = self.block.tier.begin_write(values)
        if started is None:
            return False
        block, transfer = started
        transfer.wait()
        block.tier.wait_for_writes()  # a queued write would overwrite changes of what is shown
        self._shown = block
        return True

    def _encoded_on_host(self) -> torch.UntypedStorage:
        """The encoded bytes on the tier, compared with their checksums."""
        encoded = own_pages(self.encoding.num_bytes)
        self.block.tier.view(self.block)
        self.block.tier.copy_view(self.block, encoded)
        return encoded

    def view(self) -> torch.UntypedStorage:
        """The bytes where they are, on the tier or in memory; changes of them stay.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        if self.where is Where.ON_TIER:
            assert self._shown is not None
            try:
                shown: torch.UntypedStorage = self._shown.tier.view(self._shown)
            except BaseException:  # the copy is lost, and the encoded bytes are not
                self._shown = None
                raise
            return shown
        return super().view()

    def copy_of_view(self) -> torch.UntypedStorage:
        """What `view` shows of bytes on a tier, in memory of its own on the host.

        Raises:
            OSError: it could not be read.
            torch.OutOfMemoryError: the host has no memory for it.
        """
        assert self.where is Where.ON_TIER, self.where
        copied = own_pages(self.num_bytes)
        self._shown.tier.copy_view(self._shown, copied)
        return copied

    def renew(self) -> None:
        """Makes changes of the bytes that `view` shows part of the block on the tier.

        Raises:
            OSError: the tier could not take them.
        """
        if self.where is not Where.ON_TIER or self._shown is None:
            return
        shown = self.copy_of_view()
        if not self.encoding.agrees(self._encoded_on_host(), shown):
            started = self.block.tier.begin_write(self.encoding.encode(shown))
            if started is None:
                raise OSError(errno.ENOSPC, "no tier has room for what was changed")
            block, transfer = started
            transfer.wait()
            self.block, self._shown = block, None
            self._warn_of_rounding()
        elif not isinstance(self._shown.tier, SsdTier):  # memory is for what computes
            self._shown = None

    @torch.inference_mode(False)  # as in `ParameterUnit`
    def _take_memory(self, values: Sequence[torch.Tensor]) -> None:
        super()._take_memory(values)
        is_first, self._shown = self._encoding is None, None
        self._encoding = UnitEncoding(self._layout, self._codec)
        if is_first:  # else `note_change` is called, and warns
            self._round()
