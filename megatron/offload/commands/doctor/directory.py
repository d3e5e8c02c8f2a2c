# SPDX-License-Identifier: Apache-2.0
"""A directory's part of `doctor`: what it lies on, what its file system can do, how fast it is.

`directory_checks` writes for a few seconds into a file without a name; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.offload.commands.doctor.check import Check, Status, in_words
from megatron.offload.commands.doctor.machine import file_size_limit_bytes
from megatron.offload.commands.progress import progress
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.mounts import (
    BlockDevice,
    FileSystemKind,
    Mount,
    block_devices,
    num_numa_nodes,
)
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.io_threads import usual_num_threads
from megatron.offload.tiers.probe import (
    BLOCK_BYTES,
    DEPTHS,
    SAMPLE_BYTES,
    Bandwidth,
    has_fallocate,
    measure_bandwidth,
)

_SLOW_BYTES_PER_S = 0.5e9  # every SATA SSD comes near it; hard disks and cheap volumes do not
_CLEARLY_FASTER = 1.15
_MIN_SAMPLE_BYTES = 64 * MIB
_ANOTHER_DISK = "give a directory on a local SSD with --activation-offload-dir"


def directory_checks(
    directory: Path,
    mount: Mount | None,
    *,
    io: str,
    threads: int | None,
    gpu_nodes: Sequence[int | None],
    measures_bandwidth: bool,
) -> list[Check]:
    """Checks a directory and the disk beneath it; one line where it cannot be used at all.

    Args:
        mount: what it is on; None if unknown.
        io, threads: as in `OffloadConfig`.
        gpu_nodes: NUMA node of each GPU.
    """
    try:
        file = UnlinkedFile(directory, "buffered")
    except ConfigurationError as error:
        return [Check("directory", Status.PROBLEM, *in_words(error))]
    except OSError as error:  # a directory above it is closed to us
        value = f"{directory} cannot be opened ({error.strerror})"
        return [Check("directory", Status.PROBLEM, value, _ANOTHER_DISK)]
    with contextlib.ExitStack() as files:
        files.callback(file.close)
        devices = block_devices(mount) if mount else ()
        checks = [_file_system_check(mount), *map(_device_check, devices)]
        checks.append(_numa_check(devices, gpu_nodes))
        if threads is None:
            threads = usual_num_threads(max(len(devices), 1))
            if len(devices) > 1:
                value = f"{threads}, for {len(devices)} disks (--activation-offload-threads)"
                checks.append(Check("I/O threads", Status.OK, value, facts={"threads": threads}))
        try:
            direct = UnlinkedFile(directory, "direct")
        except ConfigurationError as error:
            checks.append(_no_direct_check(error, io))
        else:
            files.callback(direct.close)
            checks.append(_direct_check(direct, io))
            file = file if io == "buffered" else direct
        disk = os.statvfs(directory)
        free_bytes, total_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        space = f"{format_size(free_bytes)} free of {format_size(total_bytes)}"
        checks.append(Check("space", Status.OK, space, facts={"free_bytes": free_bytes}))
        if mount is not None and mount.kind is FileSystemKind.MEMORY:
            checks.append(Check("bandwidth", Status.INFO, "not measured: this is memory"))
            return checks
        checks.append(_fallocate_check(file))
        if measures_bandwidth:
            checks += _measure(file, free_bytes, threads)
        else:
            checks.append(Check("bandwidth", Status.INFO, "not measured: --no-bandwidth"))
    return checks


def _file_system_check(mount: Mount | None) -> Check:
    name = "file system"
    if mount is None:
        return Check(name, Status.INFO, "unknown: /proc/self/mountinfo does not show it")
    facts = {"type": mount.file_system, "mount_point": str(mount.mount_point)}
    value = f"{mount.file_system}, mounted at {mount.mount_point}"
    if "/" in mount.source or ":" in mount.source:  # else it only repeats the type
        value += f" from {mount.source}"
    if mount.copies_on_write:
        value += (
            ": copies on write, so what is written over takes new space, and a file that has its "
            "space already may find the disk full; what it cannot write stays in memory"
        )
        advice = "keep some of the disk free, or give a directory on ext4 or XFS"
        return Check(name, Status.INFO, value, advice, facts)
    if mount.kind is FileSystemKind.LOCAL:
        return Check(name, Status.OK, value, facts=facts)
    reason, advice = {
        FileSystemKind.MEMORY: (
            "this is host memory, not a disk",
            f"{_ANOTHER_DISK}; for host memory there is --activation-offload host",
        ),
        FileSystemKind.NETWORK: (
            "a network or user-space file system is slower than a local SSD, and others use it",
            _ANOTHER_DISK,
        ),
        FileSystemKind.OVERLAY: (
            "a container's own file system; its disk cannot be seen from here",
            "mount a directory of a local SSD into the container (docker run --volume) and give "
            "it with --activation-offload-dir",
        ),
    }[mount.kind]
    return Check(name, Status.WARNING, f"{value}: {reason}", advice, facts)


def _device_check(device: BlockDevice) -> Check:
    facts = {"name": device.name, "model": device.model, "rotational": device.is_rotational}
    value = f"{device.name}, {device.model}" if device.model else device.name
    if device.is_virtual:
        value += ": a virtual disk; what lies beneath it cannot be seen from here"
        return Check("drive", Status.INFO, value, facts=facts)
    if device.is_rotational:
        value += ": reports itself as a hard disk (rotational)"
        return Check("drive", Status.WARNING, value, _ANOTHER_DISK, facts)
    kind = "SSD" if device.is_rotational is False else "of unknown kind"
    return Check("drive", Status.OK, f"{value}, {kind}", facts=facts)


def _numa_check(devices: Sequence[BlockDevice], gpu_nodes: Sequence[int | None]) -> Check:
    drives = sorted({node for device in devices if (node := device.numa_node) is not None})
    gpus = sorted({node for node in gpu_nodes if node is not None})
    num_nodes = num_numa_nodes()
    facts = {"num_nodes": num_nodes, "drive_nodes": drives, "gpu_nodes": gpus}
    if num_nodes == 1:
        return Check("NUMA", Status.OK, "one node: everything is near", facts=facts)
    value = f"{num_nodes} nodes; {_on_nodes('drive', drives)}"
    if gpu_nodes:
        value += f"; {_on_nodes('GPU', gpus)}"
    if drives and gpus and not set(drives) & set(gpus):
        advice = "choose a drive on the GPU's node: bytes between nodes share a slower link"
        return Check("NUMA", Status.WARNING, value, advice, facts)
    return Check("NUMA", Status.INFO, value, facts=facts)


def _on_nodes(what: str, nodes: Sequence[int]) -> str:
    return f"{what} on node {', '.join(map(str, nodes))}" if nodes else f"{what} on unknown node"


def _direct_check(file: UnlinkedFile, io: str) -> Check:
    memory, offset = file.alignment.memory, file.alignment.offset
    facts = {"memory_alignment_bytes": memory, "offset_alignment_bytes": offset}
    value = f"works; memory aligned to {format_size(memory)}, file offsets to {format_size(offset)}"
    if io == "buffered":
        value = "works, but --activation-offload-io buffered does not use it"
    return Check("direct I/O", Status.OK, value, facts=facts)


def _no_direct_check(error: ConfigurationError, io: str) -> Check:
    value, _ = in_words(error)
    if io == "buffered":
        return Check("direct I/O", Status.INFO, f"{value}; not asked for either")
    if io == "direct":
        advice = f"{_ANOTHER_DISK}, or --activation-offload-io auto"
        return Check("direct I/O", Status.PROBLEM, value, advice)
    value += "; buffered I/O works, but copies every byte through the page cache"
    return Check("direct I/O", Status.WARNING, value, _ANOTHER_DISK)


def _fallocate_check(file: UnlinkedFile) -> Check:
    name = "preallocation"
    if has_fallocate(file):
        return Check(name, Status.OK, "works (fallocate)")
    value = "no fallocate: the C library reserves space by writing to every block, which is slow"
    return Check(name, Status.WARNING, value, _ANOTHER_DISK)


def _measure(file: UnlinkedFile, free_bytes: int, threads: int) -> list[Check]:
    """Write and read bandwidth, or why they could not be measured."""
    name = "bandwidth"
    limit_bytes = file_size_limit_bytes()
    sample_bytes = min(SAMPLE_BYTES, free_bytes // 2, limit_bytes or SAMPLE_BYTES)
    if sample_bytes < _MIN_SAMPLE_BYTES:
        value = f"not measured: a test file may have only {format_size(sample_bytes)} here"
        return [Check(name, Status.WARNING, value, "free some space, or raise ulimit -f")]
    try:
        with progress(1 + 2 * len(DEPTHS), str(file.directory)) as advance:
            measured = measure_bandwidth(file, sample_bytes, advance=advance)
    except OSError as error:
        value = f"not measured: {error.strerror or error}"
        return [Check(name, Status.WARNING, value, f"check the disk, or {_ANOTHER_DISK}")]
    return [
        _bandwidth_check("write", measured, threads, lambda one: one.write_bytes_per_s),
        _bandwidth_check("read", measured, threads, lambda one: one.read_bytes_per_s),
    ]


def _bandwidth_check(
    direction: str, measured: list[Bandwidth], threads: int, rate: Callable[[Bandwidth], float]
) -> Check:
    name, best = f"{direction} speed", max(map(rate, measured))
    rates = " / ".join(f"{rate(one) / 1e9:.2f}" for one in measured)
    depths = " / ".join(str(one.depth) for one in measured)
    value = f"{rates} GB/s at queue depth {depths} ({format_size(BLOCK_BYTES)} blocks)"
    facts = {f"{direction}_bytes_per_s": {str(one.depth): rate(one) for one in measured}}
    if best < _SLOW_BYTES_PER_S:
        value += "; slower than an SSD, so training may wait for it"
        return Check(name, Status.WARNING, value, _ANOTHER_DISK, facts)
    return Check(name, Status.OK, value + _thread_hint(measured, threads, rate), facts=facts)


def _thread_hint(
    measured: list[Bandwidth], threads: int, rate: Callable[[Bandwidth], float]
) -> str:
    """Whether more threads than asked for would pay."""
    now = max((rate(one) for one in measured if one.depth <= threads), default=0.0)
    for one in measured:
        if one.depth > threads and now and rate(one) > _CLEARLY_FASTER * now:
            return f"; --activation-offload-threads {one.depth} would use more of it"
    return ""
