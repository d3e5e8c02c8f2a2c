# SPDX-License-Identifier: Apache-2.0
"""What states will take on tiers, and how fast these are: known before the first step.

If neither memory nor the tiers can hold all states, the run ends before it begins, with a sentence
that names the sizes.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.offload.sizes import MIB, format_size
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.optimizer_places import usual_states_bytes
from megatron.offload.states.sharded import part_of
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.probe import measure_bandwidth
from megatron.offload.tiers.purpose import STATES
from megatron.offload.tiers.ssd import threads_of

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 128 * MIB  # moved for each measurement
_LEAST_SAMPLE_BYTES = 32 * MIB  # a smaller sample measures nothing, and moving it takes no time
_SAMPLE_S = 0.3  # most seconds of each measurement
_SLOW_BYTES_PER_S = 0.5e9  # every SATA SSD reaches about this


def expected_bytes(
    optimizer: torch.optim.Optimizer,
    moves_param: Callable[[torch.Tensor], bool] = lambda param: False,
) -> list[int]:
    """Bytes of each parameter's states that will move, in the order of the optimizer's groups.

    As `usual_states_bytes`.

    Args:
        moves_param: whether a parameter itself moves with its states.
    """
    return [
        usual_states_bytes(optimizer, group, param)
        + (part_of(param).nbytes if moves_param(param) else 0)
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def space_for(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Bytes on a drive with which the file of these states never has to grow.

    Those of all states, what rounding adds to each bucket, and one bucket more: a bucket is written
    before the space of the one that was read meanwhile is free.

    Args:
        sizes: of each parameter's states, in the order of the buckets.
        bucket_bytes: of states that move together.
    """
    total, largest = sum(sizes), max(sizes, default=0)
    # Any two neighbours together are larger than a bucket.
    num_buckets = min(2 * total // max(bucket_bytes, 1) + 1, len(sizes))
    rounding = num_buckets * mmap.PAGESIZE + len(sizes) * 3 * 64
    return total + rounding + max(bucket_bytes if num_buckets > 1 else 0, largest)


def check_budgets(config: StatesConfig, num_bytes: int, host_bytes: int) -> None:
    """Checks that budgets and the window hold all states.

    Args:
        num_bytes: of all states of this rank.
        host_bytes: of the host tier's budget; 0 without one.

    Raises:
        ConfigurationError: they do not.
    """
    if config.uses_ssd and config.ssd_budget_bytes is None:
        return
    places, room = [], config.window_bytes
    if config.uses_host:
        places.append(f"{STATES.flag('host-budget')} allows {format_size(host_bytes)}")
        room += host_bytes
    if config.uses_ssd and config.ssd_budget_bytes is not None:
        ssd = format_size(config.ssd_budget_bytes)
        places.append(f"{STATES.flag('ssd-budget')} allows {ssd}")
        room += config.ssd_budget_bytes
    if room < num_bytes:
        raise STATES.refusal(
            f"{format_size(num_bytes)} of them do not fit: {' and '.join(places)}, and "
            f"{STATES.flag('window')} {format_size(config.window_bytes)}; give more, or use "
            f"{STATES.flag('offload')} ssd without a budget"
        )


def measure_drives(config: StatesConfig, num_bytes: int) -> None:
    """Measures each drive for less than a second, and logs how long a step will move states.

    Args:
        num_bytes: of all states of this rank.
    """
    moved_bytes = max(num_bytes - config.window_bytes, 0)
    sample_bytes = min(SAMPLE_BYTES, num_bytes // len(config.directories))
    if not moved_bytes or sample_bytes < _LEAST_SAMPLE_BYTES:
        return
    try:
        rates = [drive_rates(one, config, sample_bytes) for one in config.directories]
    except OSError as error:
        logger.info("%sthe drives could not be measured (%s)", STATES.prefix, str(error))
        return
    write, read = (sum(one) for one in zip(*rates, strict=True))
    write = min(write, config.write_bytes_per_s or write)
    is_slow = min(write, read) < _SLOW_BYTES_PER_S * len(rates)
    logger.log(
        logging.WARNING if is_slow else logging.INFO,
        "%s%s, of which a step writes %s to %s and reads as much: %.2g s and %.2g s, at the "
        "%.3g and %.3g GB/s just measured%s; training waits for what forward and backward do not "
        "hide",
        STATES.prefix,
        format_size(num_bytes),
        format_size(moved_bytes),
        ", ".join(map(str, config.directories)),
        moved_bytes / write,
        moved_bytes / read,
        write / 1e9,
        read / 1e9,
        ", slower than an SSD" if is_slow else "",
    )


def drive_rates(directory: Path, config: StatesConfig, sample_bytes: int) -> tuple[float, float]:
    """Bytes a second that a directory's drive writes and reads, from as many threads as states use.

    Raises:
        OSError: the file system refused to allocate, write or read.
    """
    file = UnlinkedFile(directory, config.io, STATES)
    try:
        (num_threads,) = threads_of([directory], config.threads)
        (found,) = measure_bandwidth(file, sample_bytes, (num_threads,), _SAMPLE_S)
        return found.write_bytes_per_s, found.read_bytes_per_s
    finally:
        file.close()
