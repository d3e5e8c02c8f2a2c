# SPDX-License-Identifier: Apache-2.0
"""How much host memory a rank may take for tiers: `host_budget_bytes`, `pinned_pool_bytes`.

Called when the tiers are opened, and before training to find a budget that the machine cannot
hold. The ranks of a machine share its memory without talking about it: each takes an equal part.
`PROMISED` has the tiers of this process, which share that part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import MemoryLimit
from megatron.offload.sizes import GIB, format_size
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose

_DEFAULT_POOL_BYTES = 2 * GIB  # the activations of a layer or two
_POOL_PART = 16  # the pools of all ranks take at most this part (1/16) of the memory
_DEFAULT_FRACTION = 0.5  # of what is available: the trainer, its data and other ranks grow too


class TakesHostMemory(Protocol):
    """A tier in host memory."""

    purpose: Purpose
    limit_bytes: int | None

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it has allocated so far."""
        ...


class Promises:
    """The tiers in host memory that this process has open."""

    def __init__(self) -> None:
        self._tiers: list[TakesHostMemory] = []
        # Protects the list. Held for microseconds.
        self._lock = threading.Lock()

    def add(self, tier: TakesHostMemory) -> None:
        """A tier is open and may take as much as its limit."""
        with self._lock:
            self._tiers.append(tier)

    def discard(self, tier: TakesHostMemory) -> None:
        """A tier is closed."""
        with self._lock:
            self._tiers = [one for one in self._tiers if one is not tier]

    def tiers(self) -> list[TakesHostMemory]:
        """The tiers that are open."""
        with self._lock:
            return list(self._tiers)


PROMISED = Promises()


def host_budget_bytes(
    asked: int | float | None,
    num_local_ranks: int,
    limit: MemoryLimit,
    purpose: Purpose = ACTIVATIONS,
) -> int:
    """Bytes of host memory for one rank.

    Args:
        asked: bytes for each rank; or a fraction (0.0 to 1.0) of the limit, for all ranks of the
            machine together; None: half of what is available now and not promised to other tiers
            of this process, for all ranks together.
        num_local_ranks: processes that share the memory, at least 1.
        limit: of the machine or of the container.
        purpose: what it is for, in sentences.

    Raises:
        ConfigurationError: the ranks together would take more than the limit, or this rank with its
            other tiers; or `asked` is negative or a fraction above 1.
    """
    others = PROMISED.tiers()
    if asked is None:
        promised = sum((one.limit_bytes or 0) - one.capacity_bytes for one in others)
        left_bytes = max(limit.available_bytes - promised * num_local_ranks, 0)
        return int(left_bytes * _DEFAULT_FRACTION) // num_local_ranks
    if asked < 0 or (isinstance(asked, float) and asked > 1):
        raise purpose.refusal(
            f"{purpose.flag('host-budget')} is neither a size nor a fraction; expected bytes or "
            f"a number from 0.0 to 1.0, got {asked}; write for example 16GiB or 0.4"
        )
    if isinstance(asked, float):
        asked = int(limit.total_bytes * asked) // num_local_ranks
    together = asked * num_local_ranks
    if together > limit.total_bytes:
        raise purpose.refusal(
            f"{purpose.flag('host-budget')} asks for more host memory than there is; expected "
            f"at most {format_size(limit.total_bytes)} ({limit.source}) for all ranks of this "
            f"machine, got {num_local_ranks} x {format_size(asked)} = {format_size(together)}; "
            "give a smaller size, or a fraction of the memory, for example 0.4"
        )
    if others and together + _sum(others) * num_local_ranks > limit.total_bytes:
        names = " and ".join(dict.fromkeys(one.purpose.bytes_name for one in others))
        raise purpose.refusal(
            f"{purpose.flag('host-budget')} asks for more host memory than {names} have left; "
            f"expected at most {format_size(limit.total_bytes)} ({limit.source}) for all streams "
            f"and ranks of this machine, got {num_local_ranks} x ({format_size(asked)} and "
            f"{format_size(_sum(others))} of {names}); give smaller budgets, so that together they "
            "fit, or close() the handle whose budget is not needed"
        )
    return asked


def _sum(tiers: Iterable[TakesHostMemory]) -> int:
    return sum(one.limit_bytes or 0 for one in tiers)


def pinned_pool_bytes(asked: int | None, num_local_ranks: int, limit: MemoryLimit) -> int:
    """Bytes of page-locked memory for one rank, on the way from its device to SSDs.

    Args:
        asked: bytes for each rank; None: 2 GiB, or what keeps all ranks of the machine together
            within a sixteenth of the limit.
        num_local_ranks: processes that share the memory, at least 1.
        limit: of the machine or of the container.

    Raises:
        ConfigurationError: the ranks together would take more than the limit.
    """
    if asked is None:
        return min(_DEFAULT_POOL_BYTES, limit.total_bytes // _POOL_PART // num_local_ranks)
    together = asked * num_local_ranks
    if together > limit.total_bytes:
        raise ConfigurationError(
            f"--activation-offload-pinned asks for more host memory than there is; expected at "
            f"most {format_size(limit.total_bytes)} ({limit.source}) for all ranks of this "
            f"machine, got {num_local_ranks} x {format_size(asked)} = {format_size(together)}; "
            "give a smaller size, or 0 for none"
        )
    return asked
