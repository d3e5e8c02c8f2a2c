# SPDX-License-Identifier: Apache-2.0
"""How much host memory each rank takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.config import OffloadConfig
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import MemoryLimit, memory_limit
from megatron.offload.sizes import GIB
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.host_budget import host_budget_bytes
from megatron.offload.tiers.open import open_host
from megatron.offload.tiers.purpose import ACTIVATIONS, STATES

MACHINE = MemoryLimit(
    total_bytes=64 * GIB,
    available_bytes=40 * GIB,
    source="physical memory",
    physical_bytes=64 * GIB,
)


@pytest.mark.parametrize(
    ("asked", "num_local_ranks", "expected_bytes"),
    [
        (8 * GIB, 1, 8 * GIB),  # bytes: for each rank
        (8 * GIB, 8, 8 * GIB),  # all of the memory, and not more
        (0, 8, 0),
        (0.5, 1, 32 * GIB),  # a fraction of the limit: for all ranks together
        (0.5, 8, 4 * GIB),
        (1.0, 2, 32 * GIB),
        (0.0, 1, 0),
        (None, 1, 20 * GIB),  # half of what is available now
        (None, 8, 20 * GIB // 8),
    ],
)
def test_bytes_are_per_rank_and_fractions_are_shared_by_the_ranks(
    asked, num_local_ranks, expected_bytes
):
    assert host_budget_bytes(asked, num_local_ranks, MACHINE) == expected_bytes


@pytest.mark.parametrize("source", ["physical memory", f"cgroup {Path('/jobs/seven')}"])
def test_ranks_that_together_ask_for_more_than_there_is_are_told_the_limit(source):
    limit = MemoryLimit(64 * GIB, 64 * GIB, source, 128 * GIB)
    with pytest.raises(ConfigurationError) as raised:
        host_budget_bytes(16 * GIB, 8, limit)
    assert str(raised.value) == (
        "activation offload: --activation-offload-host-budget asks for more host memory than "
        f"there is; expected at most 64 GiB ({source}) for all ranks of this machine, got "
        "8 x 16 GiB = 128 GiB; give a smaller size, or a fraction of the memory, for example 0.4"
    )


@pytest.mark.parametrize("asked", [-1, -0.1, 1.5, float("inf")])
def test_what_is_neither_a_size_nor_a_fraction_is_refused(asked):
    with pytest.raises(ConfigurationError, match="neither a size nor a fraction"):
        host_budget_bytes(asked, 1, MACHINE)


def test_a_default_that_others_have_used_up_is_said(caplog, monkeypatch):
    """Else nothing would move, and no line would say why."""
    limit = MemoryLimit(64 * GIB, 8 * GIB, "physical memory", 64 * GIB)
    monkeypatch.setattr("megatron.offload.tiers.open.memory_limit", lambda: limit)
    states = HostTier(8 * GIB, purpose=STATES)
    for asked, lines in ((None, 1), (0, 0)):
        caplog.clear()
        settings = OffloadConfig(mode="host", host_budget=asked)
        open_host(settings, CpuDevice(), ACTIVATIONS, 1).close()
        assert len(caplog.messages) == lines
    states.close()
    with caplog.at_level("WARNING"):
        open_host(OffloadConfig(mode="host"), CpuDevice(), ACTIVATIONS, 1).close()
    assert not caplog.messages, "they have given it back"


def test_what_is_said_names_who_has_it(caplog, monkeypatch):
    limit = MemoryLimit(64 * GIB, 8 * GIB, "physical memory", 64 * GIB)
    monkeypatch.setattr("megatron.offload.tiers.open.memory_limit", lambda: limit)
    states = HostTier(8 * GIB, purpose=STATES)
    open_host(OffloadConfig(mode="host"), CpuDevice(), ACTIVATIONS, 1).close()
    states.close()
    assert caplog.messages == [
        "activation offload: host memory takes nothing of the activations: 8 GiB of 64 GiB "
        "(physical memory) is available and promised to the optimizer states; what has no other "
        "tier stays in device memory; give --activation-offload-host-budget, and smaller budgets "
        "to what else is there"
    ]


def test_the_default_fits_on_this_machine():
    limit = memory_limit()
    assert 0 < 2 * host_budget_bytes(None, 2, limit) < limit.available_bytes
