# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may use: `memory_limit`.

The host tier sizes its budget by it, `doctor` shows it. A container's limit (cgroup v1 or v2, its
own or that of a group above it) counts as well as physical memory; the smallest wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.machine.mounts import Mount, read_mountinfo

PHYSICAL = "physical memory"

# Files of a group: limits, usage, and the lines of memory.stat that can be given up at any time.
_V1_LIMITS = ("memory.limit_in_bytes",)
_V1_USAGE = "memory.usage_in_bytes"
_V1_CACHE = ("total_active_file", "total_inactive_file")
_V2_LIMITS = ("memory.max", "memory.high")
_V2_USAGE = "memory.current"
_V2_CACHE = ("active_file", "inactive_file")


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest limit on this process's host memory.

    Args:
        total_bytes: what this process and its neighbours under the same limit may use in all.
        available_bytes: what is left of every limit, page cache that can be dropped included.
        source: what sets `total_bytes`: `physical memory` or `cgroup <directory>`.
        physical_bytes: memory of the machine.
    """

    total_bytes: int
    available_bytes: int
    source: str
    physical_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Reads how much host memory this process may use now.

    `available_bytes` changes from moment to moment.

    Args:
        root: where `proc` and the cgroup file systems are found.

    Raises:
        OSError: there is no /proc/meminfo.
    """
    meminfo = _table(kernel_text(root / "proc/meminfo").replace(":", ""))
    physical_bytes = meminfo["MemTotal"] * 1024
    total_bytes, source = physical_bytes, PHYSICAL
    available_bytes = meminfo.get("MemAvailable", meminfo["MemFree"]) * 1024
    for group, is_v2 in _groups(root):
        limit_bytes = _limit_bytes(root, group, is_v2)
        # A group without a limit says "max" (v2) or a number near 2^63 (v1).
        if limit_bytes is None or limit_bytes >= physical_bytes:
            continue
        available_bytes = min(available_bytes, limit_bytes - _used_bytes(root, group, is_v2))
        if limit_bytes < total_bytes:
            total_bytes, source = limit_bytes, f"cgroup {group}"
    return MemoryLimit(total_bytes, max(available_bytes, 0), source, physical_bytes)


def own_memory_groups(root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """The control groups for memory that this process is in, and whether each is of v2."""
    return [(group, is_v2) for group, is_v2 in _groups(root) if _inside(root, group).is_dir()]


def _groups(root: Path) -> Iterator[tuple[Path, bool]]:
    """This process's group and all above it, of v1 and of v2, as absolute paths."""
    try:
        mounts = read_mountinfo(root / "proc/self/mountinfo")
        lines = kernel_text(root / "proc/self/cgroup").split("\n")
    except OSError:
        return
    for line in lines:
        _, _, after = line.partition(":")
        controllers, _, path = after.partition(":")
        is_v2 = not controllers
        if not path or not (is_v2 or "memory" in controllers.split(",")):
            continue
        for mount in mounts:
            is_ours = (
                mount.file_system == "cgroup2"
                if is_v2
                else mount.file_system == "cgroup" and "memory" in mount.options
            )
            if is_ours:
                group = _group_directory(mount, path)
                yield group, is_v2
                for above in group.parents:
                    if above.is_relative_to(mount.mount_point):
                        yield above, is_v2


def _group_directory(mount: Mount, path: str) -> Path:
    """Where a group is mounted. A container may see its own path or the host's."""
    group = Path(path)
    if ".." in group.parts:  # above what this container may see
        return mount.mount_point
    below = group.relative_to(mount.root) if group.is_relative_to(mount.root) else Path()
    return mount.mount_point / below


def _limit_bytes(root: Path, group: Path, is_v2: bool) -> int | None:
    names = _V2_LIMITS if is_v2 else _V1_LIMITS
    limits = [_number(_inside(root, group) / name) for name in names]
    return min((limit for limit in limits if limit is not None), default=None)


def _used_bytes(root: Path, group: Path, is_v2: bool) -> int:
    directory = _inside(root, group)
    usage = _number(directory / (_V2_USAGE if is_v2 else _V1_USAGE)) or 0
    try:
        statistics = _table(kernel_text(directory / "memory.stat"))
    except OSError:
        return usage
    return usage - sum(statistics.get(name, 0) for name in (_V2_CACHE if is_v2 else _V1_CACHE))


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _number(path: Path) -> int | None:
    try:
        text = kernel_text(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _table(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
