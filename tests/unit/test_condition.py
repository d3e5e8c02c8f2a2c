# SPDX-License-Identifier: Apache-2.0
"""A condition that the main thread waits for: no interrupt leaves its lock in another state."""

from __future__ import annotations

import threading

import pytest

from megatron.offload.machine.condition import Condition
from tests.support.interrupts import Interrupt, moments_of
from tests.support.waiting import SOON_S, wait_until


class Stopped(BaseException):
    """What a signal's handler raises."""


def is_free(condition: Condition) -> bool:
    """Whether another thread can take its lock, and gives it back."""
    taken = []

    def take() -> None:
        if condition.acquire(timeout=1):
            taken.append(True)
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)


def test_an_interrupt_at_any_moment_of_a_wait_comes_out_and_gives_the_lock_back() -> None:
    condition = Condition()

    def wait() -> None:
        with condition:
            condition.wait(0.001)

    moments = moments_of(wait)
    assert len(moments) >= 8
    for moment in moments:
        with pytest.raises(Stopped), Interrupt(moment, 1, Stopped) as interrupt:
            wait()
        assert interrupt.has_come
        assert is_free(condition), moment
        assert not condition._waiters, moment  # type: ignore[attr-defined]


def test_a_wait_ends_with_a_notice_or_with_its_time() -> None:
    condition, told = Condition(), []

    def wait() -> None:
        with condition:
            told.append(condition.wait(SOON_S))

    with condition:
        assert not condition.wait(0.001)
        assert not condition.wait(-1)
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: bool(condition._waiters), "it does not wait")  # type: ignore[attr-defined]
    with condition:
        condition.notify()
    thread.join(SOON_S)
    assert told == [True]
