# SPDX-License-Identifier: Apache-2.0
"""Model states' part of `doctor`: whether --optimizer-state-* can work here, and for how many.

`directory.py` checks disks and file systems of activations' directories; here is what only states
need: room for every parameter, checksums, and a rate that a step can bear.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron.offload.commands.doctor.check import Check, Section, Status, in_words
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import states_config_from_args
from megatron.offload.machine.memory_limit import MemoryLimit
from megatron.offload.sizes import MIB, format_size
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.space import SAMPLE_BYTES, drive_rates
from megatron.offload.tiers.checksum import load_checksum
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.host_budget import host_budget_bytes
from megatron.offload.tiers.purpose import STATES

_BYTES, _BYTES_WITH_MAIN_WEIGHTS = 8, 12  # of a parameter: Adam's two states in fp32, and with it
_SLOW_BYTES_PER_S = 0.5e9


def states_sections(
    args: argparse.Namespace, limit: MemoryLimit, *, measures_bandwidth: bool
) -> list[Section]:
    """One section, or none where no flag of model states is given.

    Args:
        args: parsed flags of `OffloadConfig` and of `StatesConfig`.
    """
    mode = args.optimizer_state_offload
    if mode == "off" and not args.optimizer_state_dir:
        return []
    assumed = "ssd" if mode == "off" else mode
    args = argparse.Namespace(**{**vars(args), "optimizer_state_offload": assumed})
    try:
        config = states_config_from_args(args)
    except ConfigurationError as error:
        return [_section([Check("states", Status.PROBLEM, *in_words(error))])]
    value = f"{STATES.flag('offload')} {config.mode}; no flag contradicts another"
    if mode == "off":
        value = "off (the default); checked as ssd, since a directory is given"
    checks = [Check("states", Status.OK if mode != "off" else Status.INFO, value)]
    if config.uses_ssd:
        checks += [_checksum_check(), *_space_checks(config)]
        if measures_bandwidth and not any(one.status is Status.PROBLEM for one in checks):
            checks += [_rate_check(one, config) for one in config.directories]
    if config.uses_host:
        checks.append(_host_check(config, limit))
    return [_section(checks)]


def _section(checks: list[Check]) -> Section:
    return Section("Optimizer states", checks)


def _checksum_check() -> Check:
    try:
        load_checksum(STATES)
    except ConfigurationError as error:
        return Check("checksums", Status.PROBLEM, *in_words(error))
    return Check("checksums", Status.OK, "xxhash is installed; all states have them on an SSD")


def _space_checks(config: StatesConfig) -> list[Check]:
    """Each directory can be used, and for how many parameters all together have room."""
    free: dict[int, int] = {}  # by file system
    for directory in config.directories:
        try:
            UnlinkedFile(directory, config.io, STATES).close()
        except ConfigurationError as error:
            return [Check("state directory", Status.PROBLEM, *in_words(error))]
        disk = os.statvfs(directory)
        free[os.stat(directory).st_dev] = disk.f_bavail * disk.f_frsize
    free_bytes = sum(free.values())
    budget = config.ssd_budget_bytes
    facts = {"free_bytes": free_bytes, "budget_bytes": budget}
    value = f"{format_size(free_bytes)} free: enough for {_parameters(free_bytes)}"
    if budget is not None:
        value += f"; {STATES.flag('ssd-budget')} {format_size(budget)}: {_parameters(budget)}"
        if budget > free_bytes:
            advice = f"free some space, lower {STATES.flag('ssd-budget')}, or give another disk"
            return [Check("state space", Status.PROBLEM, value, advice, facts)]
    if free_bytes < config.bucket_bytes:
        advice = f"free some space, or give another disk with {STATES.flag('dir')}"
        return [Check("state space", Status.PROBLEM, value, advice, facts)]
    return [Check("state space", Status.OK, value, facts=facts)]


def _parameters(num_bytes: int) -> str:
    """For how many parameters these bytes are, all ranks of the machine together."""
    with_main_weights, without = num_bytes // _BYTES_WITH_MAIN_WEIGHTS, num_bytes // _BYTES
    return (
        f"{without / 1e9:.3g} G parameters in fp32, {with_main_weights / 1e9:.3g} G in bf16 with "
        "main weights"
    )


def _rate_check(directory: Path, config: StatesConfig) -> Check:
    """How long a step's states take on a drive, beside what the step computes."""
    name = "state rate"
    try:
        write, read = drive_rates(directory, config, SAMPLE_BYTES)
    except OSError as error:
        value = f"{directory}: not measured: {error.strerror or error}"
        return Check(name, Status.WARNING, value, "free some space, or check the disk")
    if config.write_bytes_per_s is not None:
        write = min(write, config.write_bytes_per_s / len(config.directories))
    seconds = 1e9 * _BYTES_WITH_MAIN_WEIGHTS * (1 / write + 1 / read)
    value = (
        f"{directory}: {write / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read: a step of 1 G "
        f"parameters with main weights takes {seconds:.3g} s here, behind backward and forward"
    )
    facts = {"write_bytes_per_s": write, "read_bytes_per_s": read}
    if min(write, read) < _SLOW_BYTES_PER_S:
        advice = f"give a directory on a local SSD with {STATES.flag('dir')}, or several"
        return Check(name, Status.WARNING, value, advice, facts)
    return Check(name, Status.OK, value, facts=facts)


def _host_check(config: StatesConfig, limit: MemoryLimit) -> Check:
    name = "state host budget"
    try:
        num_bytes = host_budget_bytes(config.host_budget, 1, limit, STATES)
    except ConfigurationError as error:
        return Check(name, Status.PROBLEM, *in_words(error))
    value = f"{format_size(num_bytes)}: enough for {_parameters(num_bytes)}"
    facts = {"budget_bytes": num_bytes}
    if num_bytes > limit.available_bytes:
        advice = f"end other programs, or lower {STATES.flag('host-budget')}"
        return Check(name, Status.WARNING, value, advice, facts)
    if num_bytes < MIB:
        return Check(name, Status.WARNING, value, f"give a {STATES.flag('host-budget')}", facts)
    return Check(name, Status.OK, value, facts=facts)
