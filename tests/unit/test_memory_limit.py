# SPDX-License-Identifier: Apache-2.0
"""Physical memory and the limits of control groups, from made-up /proc and cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.offload.device import cpu
from megatron.offload.machine.memory_limit import PHYSICAL, memory_limit
from megatron.offload.machine.mounts import mount_of, read_mountinfo
from megatron.offload.sizes import GIB

V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "35 1 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def make_machine(root, mountinfo=V2, cgroup="0::/job/step", total_gib=64, available_gib=60):
    files = {
        "proc/meminfo": f"MemTotal: {total_gib << 20} kB\nMemFree: {1 << 20} kB\n"
        f"MemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n",
        "proc/self/mountinfo": mountinfo,
        "proc/self/cgroup": cgroup,
    }
    for name, text in files.items():
        write(root / name, text)
    return root


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_group(root, path, **files):
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / path / f"memory.{name}", str(text))


def test_without_groups_it_is_physical_memory(tmp_path):
    make_machine(tmp_path, mountinfo="", cgroup="")
    found = memory_limit(tmp_path)
    assert found.total_bytes == found.physical_bytes == 64 * GIB
    assert found.available_bytes == 60 * GIB and found.source == PHYSICAL


def test_a_group_of_v2_limits(tmp_path):
    make_machine(tmp_path)
    cache = f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\nshmem 5"
    add_group(tmp_path, "job/step", max=16 * GIB, current=10 * GIB, stat=cache)
    found = memory_limit(tmp_path)
    assert found.total_bytes == 16 * GIB and found.physical_bytes == 64 * GIB
    assert found.available_bytes == 9 * GIB  # page cache can be dropped
    assert found.source == "cgroup /sys/fs/cgroup/job/step"


def test_a_group_above_limits_too(tmp_path):
    make_machine(tmp_path)
    add_group(tmp_path, "job/step", max="max", high=40 * GIB, current=0)
    add_group(tmp_path, "job", max=8 * GIB, current=7 * GIB)
    add_group(tmp_path, "", max="max")
    found = memory_limit(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, GIB)
    assert found.source == "cgroup /sys/fs/cgroup/job"


def test_what_is_left_can_be_tightest_elsewhere(tmp_path):
    make_machine(tmp_path)
    add_group(tmp_path, "job/step", max=16 * GIB, current=0)
    add_group(tmp_path, "job", max=32 * GIB, current=30 * GIB)
    found = memory_limit(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (16 * GIB, 2 * GIB)


def test_more_than_the_limit_in_use_leaves_nothing(tmp_path):
    make_machine(tmp_path)
    add_group(tmp_path, "job", high=GIB, current=2 * GIB)
    assert memory_limit(tmp_path).available_bytes == 0


def test_a_group_of_v1_limits_and_a_huge_number_does_not(tmp_path):
    make_machine(tmp_path, mountinfo=V1, cgroup="9:cpu:/else\n4:memory:/job/step\n0::/")
    add_group(tmp_path, "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=0)
    add_group(tmp_path, "memory/job", limit_in_bytes=12 * GIB, usage_in_bytes=6 * GIB)
    add_group(tmp_path, "memory/job", stat=f"inactive_file 1\ntotal_inactive_file {GIB}")
    found = memory_limit(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (12 * GIB, 7 * GIB)
    assert found.source == "cgroup /sys/fs/cgroup/memory/job"


@pytest.mark.parametrize(
    ("mount_root", "path"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, seen in a container
        ("/", "/../.."),  # a process moved above the container's root
        ("/docker/abc", "/somewhere/else"),
    ],
)
def test_a_container_sees_its_group_at_the_mount_point(tmp_path, mount_root, path):
    make_machine(tmp_path, mountinfo=V2.replace(" / ", f" {mount_root} ", 1), cgroup=f"0::{path}")
    add_group(tmp_path, "", max=4 * GIB, current=GIB)
    found = memory_limit(tmp_path)
    assert (found.total_bytes, found.source) == (4 * GIB, "cgroup /sys/fs/cgroup")


def test_an_old_kernel_without_available_memory_counts_free_memory(tmp_path):
    make_machine(tmp_path)
    write(tmp_path / "proc/meminfo", f"MemTotal: {4 << 20} kB\nMemFree: {1 << 20} kB")
    assert memory_limit(tmp_path).available_bytes == GIB


def test_this_machine_can_be_read():
    found = memory_limit()
    assert 0 < found.available_bytes <= found.total_bytes <= found.physical_bytes


def test_names_of_others_are_bytes(tmp_path):
    """Any user may mount something under a name that is no UTF-8, or has odd spaces in it."""
    make_machine(tmp_path)
    odd = "\ud8ff".encode("utf-8", "surrogatepass") + b"\xff" + "\u2028\u00a0\x0b\x85".encode()
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.write_bytes(b"31 1 0:27 / /home/" + odd + b" rw - fuse fuse rw\n" + mounts.read_bytes())
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/job-" + odd + b"\n")
    group = os.fsencode(tmp_path / "sys/fs/cgroup/job-") + odd
    os.makedirs(group)
    for name in (b"memory.max", b"memory.current", b"memory.stat"):
        with open(group + b"/" + name, "w") as file:
            file.write(str(16 * GIB) if name == b"memory.max" else "0")
    found = memory_limit(tmp_path)
    assert found.total_bytes == 16 * GIB and found.source.startswith("cgroup /sys/fs/cgroup/job-")
    fuse = mount_of(Path(os.fsdecode(b"/home/" + odd + b"/below")), read_mountinfo(mounts))
    assert fuse is not None and os.fsencode(fuse.mount_point) == b"/home/" + odd


def test_the_name_of_a_process_is_bytes(tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_bytes(b"Name:\tpy\xff\xfe\nVmHWM:\t    12 kB\nVmRSS:\t    8 kB\n")
    monkeypatch.setattr(cpu, "_STATUS", status)
    assert cpu._status_bytes("VmHWM") == 12 * 1024
