# SPDX-License-Identifier: Apache-2.0
"""Whether given flags can work on this machine, found before training: `examine`.

The command `megatron-offload doctor` calls it. The flags and their budgets are checked here, the
rest in `directory.py`, `machine.py` and `gpu.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.doctor.check import Check, Diagnosis, Section, Status, in_words
from megatron.offload.commands.doctor.directory import directory_checks
from megatron.offload.commands.doctor.gpu import Cuda, cuda_checks, direct_storage_check, find_cuda
from megatron.offload.commands.doctor.machine import (
    allocator_check,
    file_size_limit_bytes,
    installed_versions,
    memory_checks,
    version_checks,
)
from megatron.offload.commands.doctor.parameters import parameters_sections
from megatron.offload.commands.doctor.produced import produced_check
from megatron.offload.commands.doctor.states import states_sections
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import MemoryLimit, memory_limit
from megatron.offload.machine.mounts import Mount, block_devices, mount_of, read_mountinfo
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.sizes import format_size
from megatron.offload.tiers.checksum import load_checksum
from megatron.offload.tiers.gds_status import gds_status
from megatron.offload.tiers.host_budget import host_budget_bytes


@dataclass(frozen=True)
class Flags:
    """The offload flags that were given, also those that `OffloadConfig` refuses.

    Args:
        is_chosen: a directory was given; else the current one is looked at.
    """

    mode: str
    directories: tuple[Path, ...]
    is_chosen: bool
    io: str
    threads: int | None
    ssd_budget_bytes: int | None
    host_budget: int | float | None

    @property
    def uses_disk(self) -> bool:
        """Whether directories matter: not for `host` alone."""
        return self.is_chosen or self.mode not in ("host", "auto")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Flags:
        """Reads the flags; with a directory, `off` (the default) is taken for `ssd`."""
        directories, mode = args.activation_offload_dir, args.activation_offload
        return cls(
            mode="ssd" if mode == "off" and directories else mode,
            directories=tuple(dict.fromkeys(directories)) or (Path.cwd(),),
            is_chosen=bool(directories),
            io=args.activation_offload_io,
            threads=args.activation_offload_threads,
            ssd_budget_bytes=args.activation_offload_ssd_budget,
            host_budget=args.activation_offload_host_budget,
        )


def examine(
    args: argparse.Namespace,
    *,
    supported_megatron: Sequence[str],
    measures_bandwidth: bool = True,
    needs_megatron: bool = True,
    not_looked_at: Sequence[str] = (),
) -> Diagnosis:
    """Checks the machine, and measures each directory's bandwidth for a few seconds.

    Args:
        args: parsed flags of `add_offload_arguments`.
        supported_megatron: versions of megatron-core that the hooks fit.
        needs_megatron: whether it matters that none of them is installed.
        not_looked_at: flags of the launch command that are not ours.
    """
    flags = Flags.from_args(args)
    limit, cuda, installed = memory_limit(), find_cuda(), installed_versions()
    has_gpu = bool(cuda.gpus)
    given = [_flags_check(args, flags)]
    if not_looked_at:
        given.append(Check("not looked at", Status.INFO, ", ".join(not_looked_at)))
    sections = [Section("Flags", given)]
    if flags.uses_disk:
        sections += _disk_sections(flags, cuda, measures_bandwidth)
    states = states_sections(args, limit, measures_bandwidth=measures_bandwidth)
    sections += states
    streaming = parameters_sections(args)
    sections += streaming
    memory = [*memory_checks(limit, has_gpu), *_host_budget_checks(flags, limit)]
    gpu = [*cuda_checks(cuda), direct_storage_check(gds_status(has_gpu), flags.io == "gds")]
    if has_gpu:
        measured = [check for section in sections for check in section.checks]
        produced = produced_check(cuda.gpus[0], measured)
        gpu += [] if produced is None else [produced]
    sections += [
        Section("Memory", [*memory, allocator_check(has_gpu)]),
        Section("GPU", gpu),
        Section(
            "Versions",
            version_checks(installed, supported_megatron, needs_megatron=needs_megatron),
        ),
    ]
    if flags.mode == "off" and not states and not streaming:
        step = "begin with --activation-offload ssd --activation-offload-dir DIR"
        return Diagnosis(sections, "activation offload", step)
    return Diagnosis(sections)


def _flags_check(args: argparse.Namespace, flags: Flags) -> Check:
    """Whether the flags contradict each other."""
    assumed = argparse.Namespace(**{**vars(args), "activation_offload": flags.mode})
    facts = {"mode": flags.mode, "directories": [str(path) for path in flags.directories]}
    name = "flags"
    try:
        config = OffloadConfig.from_args(assumed)
        if config.verify == "checksum":
            load_checksum()
        if config.plans:
            check_libraries("--activation-offload auto")
    except ConfigurationError as error:
        return Check(name, Status.PROBLEM, *in_words(error), facts=facts)
    if flags.mode == "off":
        value = "offload is off (the default); this is what the machine could do"
        return Check(name, Status.INFO, value, facts=facts)
    if args.activation_offload == "off":
        value = "offload is off (the default); checked as ssd, since a directory is given"
        return Check(name, Status.INFO, value, facts=facts)
    return Check(
        name,
        Status.OK,
        f"--activation-offload {flags.mode}; no flag contradicts another",
        facts=facts,
    )


def _disk_sections(flags: Flags, cuda: Cuda, measures_bandwidth: bool) -> list[Section]:
    """Each directory, and what concerns all of them together."""
    sections, names = [], []
    for directory in flags.directories:
        mount = _mount_of(directory)
        checks = directory_checks(
            directory,
            mount,
            io=flags.io,
            threads=flags.threads,
            gpu_nodes=[gpu.numa_node for gpu in cuda.gpus],
            measures_bandwidth=measures_bandwidth,
        )
        title = f"Directory {directory}"
        if not flags.is_chosen:
            title += " (the current one, as no --activation-offload-dir is given)"
            checks = [_without_blame(check) for check in checks]
        sections.append(Section(title, checks))
        if mount is not None and os.path.isdir(directory):
            names += [device.name for device in block_devices(mount)]
    together = []
    if flags.ssd_budget_bytes is not None:
        together += _ssd_budget_checks(flags.ssd_budget_bytes, flags.directories)
    shared = sorted({name for name in names if names.count(name) > 1})
    if shared:
        value = f"several directories are on {', '.join(shared)}; striping gains nothing there"
        together.append(Check("striping", Status.WARNING, value, "give one directory per drive"))
    if not flags.is_chosen:
        together = [_without_blame(check) for check in together]
    return [*sections, Section("All directories", together)] if together else sections


def _without_blame(check: Check) -> Check:
    """The user did not choose the current directory, so it cannot make the flags wrong."""
    if check.status is Status.PROBLEM:
        return dataclasses.replace(check, status=Status.WARNING)
    return check


def _ssd_budget_checks(budget_bytes: int, directories: Sequence[Path]) -> list[Check]:
    """Against the free space of every file system, and against the largest file allowed.

    Each directory gets an equal part of the budget, allocated before training.
    """
    name = "SSD budget"
    part_bytes = budget_bytes // len(directories)
    wanted_bytes: dict[int, int] = {}  # of one rank, by the file system's number
    free_bytes: dict[int, int] = {}
    for directory in filter(os.path.isdir, directories):
        disk, number = os.statvfs(directory), os.stat(directory).st_dev
        wanted_bytes[number] = wanted_bytes.get(number, 0) + part_bytes
        free_bytes[number] = disk.f_bavail * disk.f_frsize
    if not free_bytes:
        return []
    num_ranks = min(free_bytes[disk] // max(wanted_bytes[disk], 1) for disk in free_bytes)
    facts = {"budget_bytes": budget_bytes, "free_bytes": sum(free_bytes.values())}
    value = f"{format_size(budget_bytes)} for each rank, {format_size(facts['free_bytes'])} free"
    if len(directories) > 1:
        value += f", an equal part ({format_size(part_bytes)}) in each directory"
    if num_ranks == 0:
        value += ": not enough"
        advice = "free some space, lower --activation-offload-ssd-budget, or give another disk"
        return [Check(name, Status.PROBLEM, value, advice, facts)]
    limit_bytes = file_size_limit_bytes()
    if limit_bytes is not None and part_bytes > limit_bytes:
        value += f", but a file may have at most {format_size(limit_bytes)} (ulimit -f)"
        return [Check(name, Status.PROBLEM, value, "ulimit -f unlimited, or a lower budget", facts)]
    value += f": enough for {num_ranks} rank{'' if num_ranks == 1 else 's'} on this machine"
    return [Check(name, Status.OK, value, facts=facts)]


def _host_budget_checks(flags: Flags, limit: MemoryLimit) -> list[Check]:
    """Whether the host tier's memory is there."""
    name = "host budget"
    host_alone = flags.mode == "auto" and not flags.is_chosen
    if flags.host_budget is None and flags.mode not in ("host", "tiered") and not host_alone:
        return []
    try:
        budget_bytes = host_budget_bytes(flags.host_budget, 1, limit)
    except ConfigurationError as error:
        return [Check(name, Status.PROBLEM, *in_words(error))]
    facts = {"budget_bytes": budget_bytes}
    if flags.host_budget is None:
        value = f"{format_size(budget_bytes)} for all ranks together: half of what is available"
        return [Check(name, Status.OK, value, facts=facts)]
    share = "all ranks together" if isinstance(flags.host_budget, float) else "each rank"
    value = f"{format_size(budget_bytes)} for {share}"
    if budget_bytes > limit.available_bytes:
        value += f", but only {format_size(limit.available_bytes)} are available now"
        advice = "end other programs, or lower --activation-offload-host-budget"
        return [Check(name, Status.WARNING, value, advice, facts)]
    return [Check(name, Status.OK, value, facts=facts)]


def _mount_of(directory: Path) -> Mount | None:
    try:
        return mount_of(directory.resolve(), read_mountinfo())
    except OSError:
        return None
