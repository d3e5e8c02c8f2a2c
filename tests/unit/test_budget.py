# SPDX-License-Identifier: Apache-2.0
"""What bounds a tier: bytes on their way, bytes a second, space."""

from __future__ import annotations

import threading

import pytest

from megatron.offload.tiers.budget import ByteBudget, RateLimit, SpaceBudget
from tests.support.waiting import SOON_S


def acquire(budget: ByteBudget, num_bytes: int) -> threading.Thread:
    thread = threading.Thread(target=budget.acquire, args=(num_bytes,), daemon=True)
    thread.start()
    return thread


def test_bytes_over_the_budget_wait_until_enough_are_given_back() -> None:
    budget = ByteBudget(100)
    budget.acquire(60)
    budget.acquire(40)
    waiting = acquire(budget, 50)
    waiting.join(timeout=0.1)
    assert waiting.is_alive() and budget.taken_bytes == 100
    budget.release(40)
    waiting.join(timeout=0.1)
    assert waiting.is_alive() and budget.taken_bytes == 60
    budget.release(60)
    waiting.join(timeout=SOON_S)
    assert not waiting.is_alive() and budget.taken_bytes == 50


def test_what_does_not_fit_at_once_is_not_taken() -> None:
    budget = ByteBudget(100)
    assert budget.try_acquire(60) and not budget.try_acquire(50)
    assert budget.taken_bytes == 60
    budget.release(60)
    assert budget.try_acquire(500) and not budget.try_acquire(1)
    assert budget.taken_bytes == 500


def test_more_than_the_whole_budget_is_let_through_alone() -> None:
    budget = ByteBudget(100)
    large = acquire(budget, 500)
    large.join(timeout=SOON_S)
    assert not large.is_alive() and budget.taken_bytes == 500
    small = acquire(budget, 1)
    small.join(timeout=0.1)
    assert small.is_alive()
    budget.release(500)
    small.join(timeout=SOON_S)
    assert not small.is_alive()


def test_who_waits_until_nothing_is_taken_learns_whether_it_came_to_that() -> None:
    budget = ByteBudget(100)
    budget.acquire(60)
    assert not budget.wait_until_free(timeout_s=0.01)
    budget.release(60)
    assert budget.wait_until_free(timeout_s=0.01)


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
