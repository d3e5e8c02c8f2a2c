# SPDX-License-Identifier: Apache-2.0
"""What a directory lies on, from made-up mountinfo and sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.machine.mounts import (
    FileSystemKind,
    Mount,
    block_devices,
    mount_of,
    num_disks,
    num_numa_nodes,
    parse_mountinfo,
    pci_numa_node,
)

MOUNTINFO = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,discard
23 22 0:21 / /proc rw shared:2 master:1 - proc proc rw
24 22 9:0 / /mnt/fast\040disk rw,noatime - xfs /dev/md0 rw
25 22 0:50 /vol /mnt/far rw - nfs4 server:/export rw,vers=4.2
26 22 0:51 / /mnt rw - tmpfs tmpfs rw
27 24 0:52 / /mnt/fast\040disk rw - overlay overlay rw,upperdir=/u
nonsense
28 22 0:53 / /half - ext4
"""


def mount(device_number="259:2", file_system="ext4", source="/dev/nvme0n1p2"):
    return Mount(device_number, "/", Path("/"), file_system, source, ())


def add_device(sys, number, path, **files):
    """A block device in a made-up sysfs; file names with `__` for `/`."""
    directory = sys / "devices" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        file = directory / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (sys / "dev/block").mkdir(parents=True, exist_ok=True)
    (sys / "dev/block" / number).symlink_to(directory)
    return directory


def add_nvme(sys, index, number, node):
    controller = f"pci0000:00/0000:0{index}:00.0/nvme/nvme{index}"
    disk = add_device(sys, number, f"{controller}/nvme{index}n1", queue__rotational="0")
    (disk / "device").symlink_to(disk.parent)
    (disk / "device/model").write_text(f"Fast SSD {index}   \n")
    (disk.parents[2] / "numa_node").write_text(f"{node}\n")
    return disk


def test_lines_that_cannot_be_read_are_left_out():
    mounts = parse_mountinfo(MOUNTINFO)
    assert [found.file_system for found in mounts] == [
        "ext4", "proc", "xfs", "nfs4", "tmpfs", "overlay",
    ]  # fmt: skip
    assert mounts[2].mount_point == Path("/mnt/fast disk")
    assert mounts[3].root == "/vol" and mounts[3].source == "server:/export"
    assert mounts[0].options == ("rw", "relatime", "rw", "discard")


@pytest.mark.parametrize(
    ("directory", "file_system"),
    [
        ("/var/lib", "ext4"),
        ("/mnt/other", "tmpfs"),
        ("/mnt/farther", "tmpfs"),
        ("/mnt/far/below", "nfs4"),
        ("/mnt/fast disk", "overlay"),  # mounted over the other
    ],
)
def test_a_directory_is_on_the_deepest_and_latest_mount(directory, file_system):
    found = mount_of(Path(directory), parse_mountinfo(MOUNTINFO))
    assert found is not None and found.file_system == file_system


def test_without_mounts_there_is_none():
    assert mount_of(Path("/home"), []) is None


@pytest.mark.parametrize(
    ("file_system", "kind"),
    [
        ("ext4", FileSystemKind.LOCAL),
        ("zfs", FileSystemKind.LOCAL),
        ("nfs4", FileSystemKind.NETWORK),
        ("fuse.sshfs", FileSystemKind.NETWORK),
        ("lustre", FileSystemKind.NETWORK),
        ("overlay", FileSystemKind.OVERLAY),
        ("tmpfs", FileSystemKind.MEMORY),
    ],
)
def test_kinds_of_file_systems(file_system, kind):
    assert mount(file_system=file_system).kind is kind


def test_a_partition_leads_to_its_disk(tmp_path):
    disk = add_nvme(tmp_path, 1, "259:0", node=1)
    add_device(tmp_path, "259:2", disk.relative_to(tmp_path / "devices") / "p2", partition="2")
    (found,) = block_devices(mount(), tmp_path)
    assert (found.name, found.model, found.numa_node) == ("nvme1n1", "Fast SSD 1", 1)
    assert found.is_rotational is False and not found.is_virtual


def test_a_volume_leads_to_all_its_disks(tmp_path):
    first, second = add_nvme(tmp_path, 1, "259:0", 0), add_nvme(tmp_path, 2, "259:1", -1)
    raid = add_device(tmp_path, "9:0", "virtual/block/md0")
    volume = add_device(tmp_path, "253:0", "virtual/block/dm-0")
    for above, below in ((raid, first), (raid, second), (volume, raid)):
        (above / "slaves").mkdir(exist_ok=True)
        (above / "slaves" / below.name).symlink_to(below)
    found = block_devices(mount("253:0"), tmp_path)
    assert [(disk.name, disk.numa_node) for disk in found] == [("nvme1n1", 0), ("nvme2n1", None)]
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "22 1 259:0 / / rw - ext4 /dev/nvme1n1 rw\n24 22 253:0 / /raid rw - xfs /dev/dm-0 rw\n"
    )
    assert num_disks(Path("/raid/runs"), mountinfo, tmp_path) == 2
    assert num_disks(Path("/runs"), mountinfo, tmp_path) == 1


def test_what_is_on_no_known_disk_counts_as_one(tmp_path):
    assert num_disks(Path("/runs"), tmp_path / "missing", tmp_path) == 1
    (tmp_path / "mountinfo").write_text("22 1 0:51 / / rw - tmpfs tmpfs rw\n")
    assert num_disks(Path("/runs"), tmp_path / "mountinfo", tmp_path) == 1


def test_a_drive_with_several_paths_takes_its_node_from_a_controller(tmp_path):
    disk = add_device(tmp_path, "259:2", "virtual/nvme-subsystem/nvme-subsys0/nvme0n1")
    (disk / "device").symlink_to(disk.parent)
    (disk.parent / "nvme0").mkdir()
    (disk.parent / "nvme0/numa_node").write_text("1\n")
    (found,) = block_devices(mount(), tmp_path)
    assert found.numa_node == 1 and not found.is_virtual


@pytest.mark.parametrize(
    "path", ["pci0000:00/0000:00:02.0/virtio1/block/vda", "vbd-1/block/xvda", "virtual/block/loop0"]
)
def test_virtual_disks_are_told_apart(tmp_path, path):
    add_device(tmp_path, "259:2", path, queue__rotational="1")
    (found,) = block_devices(mount(), tmp_path)
    assert found.is_virtual and found.model is None


def test_a_file_system_without_a_device_has_none(tmp_path):
    assert block_devices(mount("0:50", "nfs4", "server:/export"), tmp_path) == ()
    assert block_devices(mount("0:51", "btrfs", "/dev/not/there"), tmp_path) == ()


def test_numa_nodes(tmp_path):
    assert num_numa_nodes(tmp_path) == 1
    for name in ("node0", "node1", "online"):
        (tmp_path / "devices/system/node" / name).mkdir(parents=True)
    assert num_numa_nodes(tmp_path) == 2
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert pci_numa_node("0000:3B:00.0", tmp_path) == 1
    assert pci_numa_node("0000:00:00.0", tmp_path) is None


def test_this_machine_can_be_read(tmp_path):
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    found = mount_of(tmp_path.resolve(), mounts)
    assert found is not None
    block_devices(found)
