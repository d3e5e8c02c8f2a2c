# SPDX-License-Identifier: Apache-2.0
"""From device memory to SSD without host memory: `GdsTier`, on NVIDIA's GPUDirect Storage (GDS).

An `SsdTier` whose files take device memory, through kvikio, which is imported only when a tier is
opened. If GPUDirect itself does not work, kvikio copies through host memory (compatibility mode):
slower, never wrong, and the log says so; `gds_status.py` finds out why.

kvikio does not know torch's streams, so the I/O thread waits for an event before kvikio uses the
memory: see Note [Who waits for whom] in `device.py`. Bytes that were read need no event: they are
in place when kvikio returns. Before each GPUDirect transfer kvikio also waits for the default
stream, and its Python interface cannot turn that off.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError
from megatron.offload.tiers.access import Access, View, check_size
from megatron.offload.tiers.direct_io import Alignment, Cut
from megatron.offload.tiers.drive import FILE_BLOCK_BYTES
from megatron.offload.tiers.file import DriveFile, UnlinkedFile
from megatron.offload.tiers.gds_status import gds_status, import_kvikio
from megatron.offload.tiers.ssd import SsdTier, threads_of
from megatron.offload.tiers.staging import PIECE_BYTES

logger = logging.getLogger(__name__)


class DeviceMemory:
    """A range of device memory, as kvikio takes it. Its holder keeps the memory's owner alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }

    def __len__(self) -> int:
        return self.num_bytes

    def without_first(self, num_bytes: int) -> DeviceMemory:
        """The range from `num_bytes` on."""
        return DeviceMemory(self.address + num_bytes, self.num_bytes - num_bytes)


class GdsFile:
    """An unlinked file that kvikio reads and writes straight from device memory; a `DriveFile`.

    Raises:
        ConfigurationError: the directory cannot work, or kvikio cannot open a file in it.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.kind = kind
        # Memory may start at any address; kvikio is fast if offsets are multiples of a GPU page.
        self.alignment = Alignment(memory=1, offset=FILE_BLOCK_BYTES)
        self.size_bytes = 0
        self._owner = UnlinkedFile(directory)
        try:
            kvikio, _, _ = import_kvikio()
            # Reading and writing; the modes with "w" would truncate.
            self._file = kvikio.CuFile(f"/proc/self/fd/{self._owner.fd}", "r+")
        except (RuntimeError, OSError) as error:
            self._owner.close()
            raise ConfigurationError(
                f"kvikio cannot open a file in {directory} ({error}); choose a directory on a "
                "local SSD, or use --activation-offload-io auto"
            ) from None

    @property
    def fd(self) -> int:
        """The file's descriptor, for mapping the file."""
        return self._owner.fd

    def grow(self, num_bytes: int) -> None:
        """Allocates `num_bytes` more. Raises OSError and stays as it was."""
        self._owner.grow(num_bytes)
        self.size_bytes = self._owner.size_bytes

    def write(self, body: DeviceMemory, offset: int) -> None:
        """Writes all of `body` at `offset`. Raises OSError."""
        self._move(self._file.pwrite, body, offset, "the drive took")

    def read(self, body: DeviceMemory, offset: int) -> None:
        """Fills all of `body` from `offset`. Raises OSError, also when the file ends early."""
        self._move(self._file.pread, body, offset, "short read: got")

    def read_cached(self, body: memoryview, offset: int) -> None:
        """Fills all of `body` with what a mapping of the file shows. Raises OSError."""
        self._owner.read_cached(body, offset)

    def sync(self, offset: int, num_bytes: int) -> None:
        """Writes changes through a mapping to the disk. Raises OSError if that fails."""
        self._owner.sync(offset, num_bytes)

    def close(self) -> None:
        """Closes the file, which frees its space."""
        self._file.close()
        self._owner.close()

    def _move(self, begin: Callable[..., Any], body: DeviceMemory, offset: int, short: str) -> None:
        """Calls kvikio until the whole body has moved."""
        done = 0
        while done < body.num_bytes:
            try:
                count = begin(body.without_first(done), file_offset=offset + done).get()
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error)) from None
            if count == 0:
                raise OSError(errno.EIO, f"{short} {done} of {body.num_bytes} bytes")
            done += count


class GdsTier(SsdTier):
    """A tier that moves device memory to SSDs and back, if possible without host memory.

    Takes the arguments of `SsdTier`.

    It sets two of kvikio's process-wide defaults: at least as many threads as this tier has I/O
    threads (kvikio starts with 1), and reads past the page cache in compatibility mode.

    Args:
        device: where the storages are.
        num_threads: as for `SsdTier`.
        verify: must be False: checksums are computed in host memory.

    Raises:
        ConfigurationError: no CUDA device, no kvikio, or a directory that cannot hold its file.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        device: Device,
        num_threads: int | None = None,
        verify: bool = False,
        **options: Any,
    ) -> None:
        assert not verify  # the configuration refuses it
        status = gds_status(has_gpu=device.device.type == "cuda")
        if not status.available:
            raise ConfigurationError(str(status))
        level = logging.INFO if status.is_gpudirect else logging.WARNING
        logger.log(level, "activation offload: %s", status)
        each_num_threads = threads_of(directories, num_threads)
        self._kind = "GPUDirect" if status.is_gpudirect else "kvikio through host memory"
        _set_defaults(sum(each_num_threads))
        super().__init__(directories, num_threads=num_threads, device=device, **options)

    def _open_file(self, directory: Path, io: str) -> DriveFile:
        return GdsFile(directory, self._kind)

    def _open_access(self, alignment: Alignment, num_threads: int) -> Access:
        return _FromDevice(self._device)


class _FromDevice:
    """The drive works on the device's own memory. See `Access` for the methods."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def for_writing(self, source: torch.UntypedStorage, after: Any) -> View:
        return _DeviceView(source, self._device, after)

    def for_reading(
        self, cut: Cut, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, View]:
        assert into is None, "a storage on a device would have to wait for its last user"
        target = self._device.new_restored(cut.num_bytes)
        return target, _DeviceView(target, self._device, self._device.restored_is_free())

    def trim(self) -> None:
        """Does nothing: the device allocates what a read fills."""


class _DeviceView:
    """See `View`. kvikio takes any address and size, so all is body; reads are not divided.

    Args:
        storage: on the device.
        device: that it is on.
        after: the event after which the drive may use the memory.
    """

    piece_bytes = PIECE_BYTES

    def __init__(self, storage: torch.UntypedStorage, device: Device, after: Any) -> None:
        self.cut = Cut(storage.nbytes(), b"", storage.nbytes(), b"")
        self.events: list[Any] = []
        self._storage = storage
        self._device = device
        self._after = after

    # The I/O thread waits in these two methods, outside of what is timed as the drive's.

    def pieces_to_write(self, start: int, num_bytes: int) -> Generator[DeviceMemory, None, None]:
        self._device.wait_for_event(self._after)
        self.check()
        yield DeviceMemory(self._storage.data_ptr() + start, num_bytes)

    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[DeviceMemory, None, None]:
        self._device.wait_for_event(self._after)
        yield DeviceMemory(self._storage.data_ptr() + start, num_bytes)

    def memory(self, start: int, num_bytes: int) -> None:
        return None

    def check(self) -> None:
        check_size(self._storage, self.cut.num_bytes)


def _set_defaults(num_threads: int) -> None:
    _, defaults, _ = import_kvikio()
    defaults.set("num_threads", max(defaults.get("num_threads"), num_threads))
    defaults.set("auto_direct_io_read", True)
