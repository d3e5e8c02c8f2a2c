# SPDX-License-Identifier: Apache-2.0
"""Small file systems that a test may break: `mounted_ext4`, `small_tmpfs`, `write_throttle`; and a
file of ours: `flip_a_bit`.

Each of the three is a context manager that undoes what it did however the test ends, and skips the
test, with the reason, where the process is not root or the kernel refuses. The faults are the
kernel's own: a full disk, a drive that takes no more writes, one that has lost its contents.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.offload.tiers.drive import Extent

_FILLER = "other-files"
_TIMEOUT_S = 30.0


@dataclass
class MountedDisk:
    """A mounted file system with room for little. `io` is what it is good for."""

    path: Path
    io: str
    image: Path | None = None  # the file that a loop device presents as a disk; None: no device

    @property
    def device_number(self) -> str:
        """`major:minor` of the block device."""
        number = os.stat(self.path).st_dev
        return f"{os.major(number)}:{os.minor(number)}"

    @property
    def free_bytes(self) -> int:
        """What files may still take."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def fill(self) -> None:
        """Other files take all the space that is left."""
        fd = os.open(self.path / _FILLER, os.O_RDWR | os.O_CREAT, 0o600)
        size = os.fstat(fd).st_size
        step = max(self.free_bytes, 4096)
        while step >= 4096:
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError:
                os.ftruncate(fd, size)
                step //= 2
        os.close(fd)

    def empty(self) -> None:
        """The other files go."""
        (self.path / _FILLER).unlink(missing_ok=True)

    def refuse_writes(self) -> None:
        """An internal error, as far as ext4 knows: it goes read-only on the spot, and stays so."""
        device = Path(f"/sys/dev/block/{self.device_number}").resolve().name
        trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        try:
            trigger.write_text("1")
        except OSError as error:
            pytest.skip(f"this kernel's ext4 cannot be told to fail: {error}")

    def lose_contents(self) -> None:
        """The device ends before its first block: every read from it fails."""
        assert self.image is not None
        _run("sync", "-f", str(self.path))  # else a late write makes the device longer again
        os.truncate(self.image, 0)

    def unmount(self) -> bool:
        """Unmounts, lazily if somebody still uses it; whether nobody did."""
        for _ in range(20):
            if not os.path.ismount(self.path) or _run("umount", str(self.path)) is None:
                return True
            time.sleep(0.1)
        _run("umount", "-l", str(self.path))
        return False

    def check(self) -> str:
        """What e2fsck has to say about the unmounted file system; empty if it is clean."""
        assert self.image is not None
        return _run("e2fsck", "-fn", str(self.image)) or ""


@contextlib.contextmanager
def mounted_ext4(directory: Path, num_bytes: int, *, features: str = "") -> Iterator[MountedDisk]:
    """An ext4 on a loop device, its image and its mount point in `directory`.

    Args:
        features: in place of the usual ones, as `mkfs.ext4 -O` takes them.
    """
    own = _new_directory(directory, "ext4", needs=("mkfs.ext4", "e2fsck"))
    image, path = own / "image", own / "mounted"
    path.mkdir()
    # -o loop: the device goes with the mount, whoever unmounts it.
    options = "loop,errors=remount-ro"
    disk = MountedDisk(path, io="direct", image=image)
    try:
        image.touch(0o600)
        os.truncate(image, num_bytes)
        formatting = ["-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
        formatting += ["-O", features] if features else []
        _need("mkfs.ext4", "-q", "-F", *formatting, str(image))
        _need("mount", "-t", "ext4", "-o", options, str(image), str(path))
        device = Path(f"/sys/dev/block/{disk.device_number}")
        yield disk
        disk.unmount()
        _wait_until_detached(device)
    finally:
        disk.unmount()
        shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def small_tmpfs(directory: Path, num_bytes: int) -> Iterator[MountedDisk]:
    """A tmpfs of limited size, its mount point in `directory`."""
    path = _new_directory(directory, "tmpfs")
    disk = MountedDisk(path, io="buffered")
    try:
        _need("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(path))
        yield disk
    finally:
        disk.unmount()
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def write_throttle(disk: MountedDisk, bytes_per_s: int) -> Iterator[Path]:
    """A control group whose members write to `disk` no faster; write a process id to the file."""
    controller = Path("/sys/fs/cgroup/blkio")
    if os.geteuid() != 0 or not (controller / "blkio.throttle.write_bps_device").exists():
        pytest.skip("needs root and the blkio controller of cgroup v1")
    group = controller / f"activation-offload-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        try:
            group.mkdir()
            limit = f"{disk.device_number} {bytes_per_s}"
            (group / "blkio.throttle.write_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"no control group can be made: {error}")
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(FileNotFoundError):
            for process in (group / "cgroup.procs").read_text().split():
                (controller / "cgroup.procs").write_text(process)
            group.rmdir()


def flip_a_bit(extent: Extent, at: int) -> None:
    """On the drive, through a descriptor of our own; the page cache forgets what it knew."""
    fd = os.open(f"/proc/self/fd/{extent.drive.file.fd}", os.O_RDWR)
    try:
        byte = os.pread(fd, 1, extent.offset + at)
        os.pwrite(fd, bytes([byte[0] ^ 0x40]), extent.offset + at)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _new_directory(directory: Path, kind: str, needs: tuple[str, ...] = ()) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    for command in ("mount", "umount", *needs):
        if shutil.which(command) is None:
            pytest.skip(f"needs {command}, which is not installed")
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=directory))


def _need(*command: str) -> None:
    complaint = _run(*command)
    if complaint is not None:
        pytest.skip(f"{command[0]} was refused: {complaint}")


def _run(*command: str) -> str | None:
    """What the command said if it failed; None if it went well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()


def _wait_until_detached(device: Path) -> None:
    """The kernel detaches a loop device shortly after the unmount."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (device / "loop").exists():
        assert time.monotonic() < deadline, f"{device} is still attached"
        time.sleep(0.01)
