# SPDX-License-Identifier: Apache-2.0
"""What tiers with a drive are compared with: `Fio`, on a file of its own beside the tier's.

The file is allocated and written once, as the tier's own is. fio uses direct I/O: io_uring, or
libaio where the kernel or a container forbids io_uring. `parse_sample` reads what it reports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron.offload.commands.bench.sample import Sample
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.documents import FAULTS, from_json, reason_of
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.sizes import KIB, MIB, format_size

ENGINES = ("io_uring", "libaio")
MODES = {"write": "write", "read": "read", "mixed": "rw"}
LAYOUT_BLOCK_BYTES = 4 * MIB
LAYOUT_DEPTH = 4


class FioError(RunError):
    """fio cannot be used; the message says why."""


def parse_sample(output: str) -> Sample:
    """What the only job in the output of `fio --output-format=json` moved and cost.

    Bytes are those of both directions, the time is that of the longer one. Processor time is
    (usr_cpu + sys_cpu) percent of the job's runtime.

    Raises:
        FioError: the job failed, or this is not fio's output.
    """
    try:
        # Warnings may stand before the object.
        (job,) = from_json(output[output.index("{") :])["jobs"]
        ways = [job[way] for way in ("read", "write")]
        if job["error"]:
            raise FioError(f"fio's job failed: {os.strerror(job['error'])}")
        sample = Sample(
            num_bytes=sum(way["io_bytes"] for way in ways),
            wall_s=max(way["runtime"] for way in ways) / 1000,
            cpu_s=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
        )
    except FAULTS as error:
        raise FioError(f"fio's output was not understood: {reason_of(error)}") from None
    if not sample.num_bytes or not sample.wall_s:
        raise FioError("fio moved too few bytes to measure")
    return sample


class Fio:
    """fio with a file of its own in `directory`. Frees its space when closed.

    Args:
        directory: of the tier that it is compared with.
        size_bytes: of the file; each run without `seconds` moves so much.
        huge_pages: start it with the allocator that training uses, which puts its buffers on huge
            pages. Else without, whatever this process was started with.

    Raises:
        FioError: it is not installed, or no engine works here; the message says which.
    """

    name = "fio"

    def __init__(self, directory: Path, size_bytes: int, huge_pages: bool = False) -> None:
        program = shutil.which("fio")
        if program is None:
            raise FioError("fio is not installed; apt-get install fio")
        self._program = program
        self._size_bytes = size_bytes
        self._environment = fio_environment(os.environ, huge_pages)
        self.version = self._output(["--version"]).strip()
        # Without a name: nothing is left behind however this process ends.
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._huge_pages = huge_pages
        self.huge_page_bytes = 0
        try:
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
            self.engine, self.refused = self._lay_out()
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> str:
        """Where fio's buffers are, in words."""
        allocator = "training's allocator" if self._huge_pages else "malloc"
        huge = format_size(self.huge_page_bytes) if self.huge_page_bytes else "none"
        return f"{allocator}; {huge} of its memory on transparent huge pages"

    def run(
        self, block_bytes: int, depth: int, operation: str, seconds: float | None = None
    ) -> Sample:
        """One piece: the whole file once, or over and over for `seconds`.

        Raises:
            FioError: fio failed.
        """
        arguments = self._arguments(self.engine, block_bytes, depth, operation)
        if seconds is not None:
            arguments += ["--time_based", f"--runtime={round(seconds * 1000)}ms"]
        return parse_sample(self._output(arguments))

    def close(self) -> None:
        """Frees the space of fio's file."""
        self._file.close()

    def _arguments(self, engine: str, block_bytes: int, depth: int, operation: str) -> list[str]:
        name = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return [
            *("--name=bench", f"--filename={name}", f"--size={self._size_bytes}"),
            *(f"--ioengine={engine}", f"--iodepth={depth}", f"--bs={block_bytes}", "--direct=1"),
            *(f"--rw={MODES[operation]}", "--rwmixread=50", "--output-format=json"),
            "--overwrite=1",
            # Random bytes, filled in once: as for the tier, nothing but I/O is timed.
            *("--refill_buffers=0", "--scramble_buffers=0"),
        ]

    def _lay_out(self) -> tuple[str, str | None]:
        """Writes the whole file. The engine that could, and why one before it could not."""
        reasons: list[str] = []
        for engine in ENGINES:
            arguments = self._arguments(engine, LAYOUT_BLOCK_BYTES, LAYOUT_DEPTH, "write")
            try:
                parse_sample(self._output(arguments, watched=True))
                return engine, "; ".join(reasons) or None
            except FioError as error:
                reasons.append(f"{engine}: {error}")
        raise FioError("; ".join(reasons))

    def _output(self, arguments: list[str], watched: bool = False) -> str:
        """What fio prints. If watched, notes on the way what it has on huge pages."""
        with subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                while True:
                    try:
                        output, errors = process.communicate(timeout=0.02 if watched else None)
                        break
                    except subprocess.TimeoutExpired:
                        self.huge_page_bytes = max(
                            self.huge_page_bytes, *map(huge_page_bytes, _family(process.pid))
                        )
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            lines = [*errors.splitlines(), *output.splitlines()] or ["it said nothing"]
            raise FioError(f"exit code {process.returncode}: {lines[0]}")
        return output


def huge_page_bytes(pid: int | str) -> int:
    """What a process (or "self") has on transparent huge pages; 0 if the kernel does not say."""
    try:
        text = kernel_text(Path(f"/proc/{pid}/smaps_rollup"))
    except OSError:
        return 0
    found = re.search(r"^AnonHugePages:\s*(\d+) kB", text, re.M)
    return int(found[1]) * KIB if found else 0


def _family(pid: int) -> list[int]:
    """A process and its children; fio's job is one of these, its buffers are there."""
    try:
        children = kernel_text(Path(f"/proc/{pid}/task/{pid}/children")).split()
    except OSError:
        children = []
    return [pid, *map(int, children)]


def fio_environment(environment: Mapping[str, str], huge_pages: bool) -> dict[str, str]:
    """The environment to start fio with: with training's allocator, or without any trace of it."""
    ours = allocator_environment()
    theirs = {name: value for name, value in environment.items() if name not in ours}
    return theirs | ours if huge_pages else theirs
