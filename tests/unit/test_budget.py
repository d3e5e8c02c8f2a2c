# SPDX-License-Identifier: Apache-2.0
"""What bounds a tier: bytes on their way, bytes a second, space."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from megatron.offload.tiers.budget import ByteBudget, RateLimit, SpaceBudget
from tests.support.waiting import SOON_S


class Holder:
    """What bytes are taken for."""


def acquire(budget: ByteBudget, holder: Holder, num_bytes: int) -> threading.Thread:
    thread = threading.Thread(target=budget.acquire, args=(holder, num_bytes), daemon=True)
    thread.start()
    return thread


def test_bytes_over_the_budget_wait_until_enough_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_LOOK_S", "_COLLECTS_AFTER_S"):
        monkeypatch.setattr(f"megatron.offload.tiers.budget.{name}", 10 * SOON_S)  # it is woken
    budget = ByteBudget(100)
    first, second, third = Holder(), Holder(), Holder()
    budget.acquire(first, 60)
    budget.acquire(second, 40)
    waiting = acquire(budget, third, 50)
    waiting.join(timeout=0.1)
    assert waiting.is_alive() and budget.taken_bytes == 100
    budget.release(second)
    waiting.join(timeout=0.1)
    assert waiting.is_alive() and budget.taken_bytes == 60
    budget.release(first)
    waiting.join(timeout=SOON_S)
    assert not waiting.is_alive() and budget.taken_bytes == 50


def test_what_does_not_fit_at_once_is_not_taken() -> None:
    budget = ByteBudget(100)
    first, second = Holder(), Holder()
    assert budget.try_acquire(first, 60) and not budget.try_acquire(second, 50)
    assert budget.taken_bytes == 60
    budget.release(second)
    assert budget.taken_bytes == 60
    budget.release(first)
    assert budget.try_acquire(first, 500) and not budget.try_acquire(second, 1)
    assert budget.taken_bytes == 500


def test_more_than_the_whole_budget_is_let_through_alone() -> None:
    budget = ByteBudget(100)
    first, second = Holder(), Holder()
    large = acquire(budget, first, 500)
    large.join(timeout=SOON_S)
    assert not large.is_alive() and budget.taken_bytes == 500
    small = acquire(budget, second, 1)
    small.join(timeout=0.1)
    assert small.is_alive()
    budget.release(first)
    small.join(timeout=SOON_S)
    assert not small.is_alive()


def test_who_waits_until_nothing_is_taken_learns_whether_it_came_to_that() -> None:
    budget, holder = ByteBudget(100), Holder()
    budget.acquire(holder, 60)
    assert not budget.wait_until_free(timeout_s=0.01)
    budget.release(holder)
    assert budget.wait_until_free(timeout_s=0.01)


def test_a_holder_that_dies_takes_nothing_any_more_also_for_one_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.offload.tiers.budget._COLLECTS_AFTER_S", 10 * SOON_S)
    budget, holder, other = ByteBudget(100), Holder(), Holder()
    budget.acquire(holder, 60)
    waiting = acquire(budget, other, 50)
    waiting.join(timeout=0.01)
    assert waiting.is_alive()
    del holder
    waiting.join(timeout=SOON_S)
    assert not waiting.is_alive() and budget.taken_bytes == 50


def test_a_holder_that_only_a_cycle_keeps_is_collected_for_one_who_waits() -> None:
    budget, other = ByteBudget(100), Holder()
    holder: Any = Holder()
    holder.itself = holder
    budget.acquire(holder, 60)
    gc.disable()
    try:
        del holder
        waiting = acquire(budget, other, 50)
        waiting.join(timeout=SOON_S)
        assert not waiting.is_alive() and budget.taken_bytes == 50
    finally:
        gc.enable()


def test_what_was_charged_must_be_paid_before_the_next_transfer() -> None:
    limit = RateLimit(bytes_per_s=1000)
    assert limit.delay_s() == 0
    limit.charge(10**6)
    assert limit.delay_s() == pytest.approx(1000, abs=100)
    limit.charge(10**6)
    assert limit.delay_s() == pytest.approx(2000, abs=100)


def test_time_in_which_nothing_was_moved_pays_for_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.offload.tiers.budget.time.monotonic", lambda: 10**6)
    limit = RateLimit(bytes_per_s=1000)
    limit.charge(5000)
    assert limit.delay_s() == 5


def test_space_is_granted_in_whole_granules_while_there_is_some() -> None:
    space = SpaceBudget(10_000)
    assert space.take(6_000, 100) == 6_000
    assert space.take(6_000, 3_000) == 3_000
    assert space.take(6_000, 3_000) == 0
    assert space.take(6_000, 100) == 1_000
    space.give_back(6_000)
    assert space.take(10_000, 100) == 6_000


def test_without_a_limit_all_is_granted() -> None:
    space = SpaceBudget(None)
    assert space.take(1 << 60, 4096) == 1 << 60
    space.give_back(1 << 60)
    assert space.take(1 << 60, 4096) == 1 << 60
