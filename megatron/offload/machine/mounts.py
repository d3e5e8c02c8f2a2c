# SPDX-License-Identifier: Apache-2.0
"""What a directory lies on: its `Mount`, and the `BlockDevice`s beneath it.

`doctor` calls it, and SSD tiers, to know how many disks a directory is on. Everything comes from
`/proc/self/mountinfo` and sysfs, which are passed in as text or as a path. Never opens a device;
what the kernel does not say is None.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.machine.kernel_text import kernel_text

SYS = Path("/sys")
MOUNTINFO = Path("/proc/self/mountinfo")

_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse(blk|\..*)?|glusterfs|gpfs|lustre|ncpfs|nfs4?|orangefs|pvfs2"
    r"|smb[23]|smbfs|virtiofs|wekafs"
)
_OVERLAY = frozenset(("aufs", "overlay", "overlayfs"))
_COPIES_ON_WRITE = frozenset(("bcachefs", "btrfs", "nilfs2", "zfs"))
_MEMORY = frozenset(("devtmpfs", "hugetlbfs", "ramfs", "tmpfs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")


class FileSystemKind(enum.Enum):
    """What kind of storage a file system is on, as far as speed and space go."""

    LOCAL = "local"
    NETWORK = "network or user-space"
    OVERLAY = "overlay"
    MEMORY = "memory"


@dataclass(frozen=True)
class Mount:
    """A mounted file system: one line of `/proc/self/mountinfo`.

    Args:
        device_number: `major:minor`; an anonymous one where the file system has several devices.
        root: the directory of the file system that is mounted; `/` unless it is a bind mount.
    """

    device_number: str
    root: str
    mount_point: Path
    file_system: str
    source: str
    options: tuple[str, ...]

    @property
    def kind(self) -> FileSystemKind:
        """Whether its bytes go to a local disk."""
        if _NETWORK.fullmatch(self.file_system):
            return FileSystemKind.NETWORK
        if self.file_system in _OVERLAY:
            return FileSystemKind.OVERLAY
        return FileSystemKind.MEMORY if self.file_system in _MEMORY else FileSystemKind.LOCAL

    @property
    def copies_on_write(self) -> bool:
        """Whether new bytes of a file take new space, also where it has space already."""
        return self.file_system in _COPIES_ON_WRITE


@dataclass(frozen=True)
class BlockDevice:
    """A whole disk, never a partition, nor a volume that is made of other disks.

    Args:
        is_virtual: of a virtual machine, or a loop device. `is_rotational` says nothing then.
    """

    name: str
    model: str | None
    is_virtual: bool
    is_rotational: bool | None
    numa_node: int | None


def read_mountinfo(path: Path = MOUNTINFO) -> list[Mount]:
    """This process's mounts. Their names are bytes, which need not be UTF-8.

    Raises:
        OSError: there is no such file.
    """
    return parse_mountinfo(kernel_text(path))


def parse_mountinfo(text: str) -> list[Mount]:
    """Reads mounts in the order in which they were made; leaves out lines that make no sense."""
    mounts = []
    for line in text.split("\n"):  # names have other ends of lines and spaces in them
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) < 6 or len(right) < 2:
            continue
        mounts.append(
            Mount(
                device_number=left[2],
                root=_unescape(left[3]),
                mount_point=Path(_unescape(left[4])),
                file_system=right[0],
                source=_unescape(right[1]),
                options=(*left[5].split(","), *(right[2].split(",") if len(right) > 2 else ())),
            )
        )
    return mounts


def mount_of(directory: Path, mounts: list[Mount]) -> Mount | None:
    """The mount that `directory` (absolute, without links) is on: the deepest, then the latest."""
    found = None
    for mount in mounts:
        covers = directory.is_relative_to(mount.mount_point)
        if covers and (found is None or mount.mount_point.is_relative_to(found.mount_point)):
            found = mount
    return found


def block_devices(mount: Mount, sys: Path = SYS) -> tuple[BlockDevice, ...]:
    """The disks beneath a mount, several for RAID and LVM; none where it has no block device."""
    entry = sys / "dev/block" / mount.device_number
    if not entry.exists():
        number = _number_of(mount.source)
        entry = sys / "dev/block" / (number or "")
        if number is None or not entry.exists():
            return ()
    disks = {disk.name: disk for disk in _disks(entry.resolve())}
    return tuple(_block_device(disks[name]) for name in sorted(disks))


def num_disks(directory: Path, mountinfo: Path = MOUNTINFO, sys: Path = SYS) -> int:
    """How many disks a directory is on: 1, or the members of its RAID or volume; 1 if unknown."""
    try:
        mount = mount_of(directory.resolve(), read_mountinfo(mountinfo))
        return max(len(block_devices(mount, sys)), 1) if mount else 1
    except OSError:
        return 1


def num_numa_nodes(sys: Path = SYS) -> int:
    """Memory nodes of this machine; 1 where the kernel does not say."""
    return len(list((sys / "devices/system/node").glob("node[0-9]*"))) or 1


def pci_numa_node(address: str, sys: Path = SYS) -> int | None:
    """The memory node of a PCI device such as `0000:3b:00.0`; None: the kernel does not say."""
    return _node(sys / "bus/pci/devices" / address.lower() / "numa_node")


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def _number_of(source: str) -> str | None:
    """btrfs and others have an anonymous number; the source names a device."""
    try:
        number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
    except OSError:
        return None
    return f"{os.major(number)}:{os.minor(number)}" if number else None


def _disks(entry: Path) -> list[Path]:
    if (entry / "partition").exists():
        return _disks(entry.parent)
    slaves = sorted((entry / "slaves").glob("*"))
    return [disk for slave in slaves for disk in _disks(slave.resolve())] or [entry]


def _block_device(disk: Path) -> BlockDevice:
    model, rotational = _text(disk / "device/model"), _text(disk / "queue/rotational")
    beneath = [disk / "device", *disk.parents]
    # An NVMe drive with several paths has no PCI parent; its controllers know the node.
    nodes = [above / "numa_node" for above in beneath] + sorted(disk.glob("device/*/numa_node"))
    known = (node for node in map(_node, nodes) if node is not None)
    return BlockDevice(
        name=disk.name,
        model=model or None,
        is_virtual=disk.name.startswith("xvd")
        or disk.parent.match("virtual/block")
        or any(above.name.startswith("virtio") for above in disk.parents),
        is_rotational=None if rotational is None else rotational == "1",
        numa_node=next(known, None),
    )


def _node(path: Path) -> int | None:
    text = _text(path)
    # -1: the firmware does not say.
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return kernel_text(path).strip()
    except OSError:
        return None
