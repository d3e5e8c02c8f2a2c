# SPDX-License-Identifier: Apache-2.0
"""A signal whose handler raises, at any moment of a step: what SIGTERM or Ctrl-C does.

Behind it the step is taken again, or a checkpoint is loaded where a sentence asks for that; the
bits are those of a training without signals, and nothing waits for ever.
"""

from __future__ import annotations

import collections
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from megatron.offload.errors import OffloadError
from megatron.offload.tiers.file import UnlinkedFile
from tests.support.streams import (
    ACTIVATIONS,
    STATES,
    STREAMS,
    Training,
    assert_same,
    without_offload,
)
from tests.support.waiting import SOON_S, wait_until
from tests.support.watchdog import Watchdog

pytestmark = [pytest.mark.usefixtures("one_compute_thread")]

NUM_ROUNDS = 125  # of each stream
MOST = 10  # times as many, where signals come too late


class Stopped(BaseException):
    """What the handler raises, as that of Ctrl-C does."""


class StoppedError(Exception):
    """What a handler of SIGTERM raises where it is written so."""


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    one = Watchdog()
    yield one
    one.close()


class Signal:
    """SIGALRM after so many seconds; its handler raises.

    Args:
        kind: what it raises.

    Attributes:
        has_come: the handler has raised.
        was_dropped: within a finalizer, out of which Python lets no exception.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self.has_come = False
        self.was_dropped = False

    def __enter__(self) -> Signal:
        self._before = signal.signal(signal.SIGALRM, self._stop)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._drop
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        sys.unraisablehook = self._hook

    def _drop(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, self._kind):
            self.was_dropped = True
        else:
            self._hook(unraisable)

    def _stop(self, _: int, __: FrameType | None) -> None:
        self.has_come = True
        raise self._kind

    def comes_in(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def seconds_of(training: Training) -> tuple[float, float]:
    """Of a step's passes, and of its update, behind a load as in each round."""
    began = time.perf_counter()
    training.passes(2)
    passed = time.perf_counter()
    training.optimizer.step()
    return passed - began, time.perf_counter() - passed


def steps_taken(training: Training) -> set[float]:
    """By each parameter's state, as a checkpoint has it."""
    states = training.optimizer.state_dict()["state"].values()
    return {state["step"].item() for state in states}


def take_again(training: Training, is_in_step: bool) -> str:
    """Goes on behind a signal; what was done. A half step is never gone on from.

    Raises:
        OffloadError: a sentence says that it cannot go on.
    """
    if not is_in_step:
        training.step(2)
        return "step taken again"
    if training.stream != STATES:
        raise OffloadError("torch's own optimizer has stopped in its middle; load a checkpoint")
    taken = steps_taken(training)  # raises where the step ended in its middle
    assert taken in ({2.0}, {3.0}), f"a half step without a word: {taken}"
    if taken == {2.0}:
        training.optimizer.step()
        return "update taken again"
    return "update was done"


def interrupted_rounds(
    stream: str, num_rounds: int, seed: int, directory: Path, watchdog: Watchdog
) -> collections.Counter[str]:
    """So many rounds of one training whose signal came in time; how all of them went."""
    chosen = random.Random(seed)
    training = Training(stream, directory).train(0, 1)
    saved = training.checkpoint()
    expected = without_offload(stream, 0, 1, 2)
    training.load(saved)
    passes_s, update_s = seconds_of(training)
    found: collections.Counter[str] = collections.Counter()
    for number in range(MOST * num_rounds):
        if found.total() - found["came too late"] == num_rounds:
            break
        kind = (Stopped, StoppedError)[number % 2]
        in_passes = number % 4 < 2
        after_s = chosen.uniform(1e-5, passes_s if in_passes else update_s)
        what = (
            f"{stream}, round {number}: {kind.__name__} after {after_s * 1e3:.2f} ms of "
            f"{'passes' if in_passes else 'the update'}"
        )
        with watchdog.watch(what):
            training.load(saved)
            is_in_step, was_stopped = False, False
            with Signal(kind) as stop:
                try:
                    if in_passes:
                        stop.comes_in(after_s)
                    training.passes(2)
                    is_in_step = True
                    if not in_passes:
                        stop.comes_in(after_s)
                    training.optimizer.step()
                    stop.comes_in(0)
                except (Stopped, StoppedError):
                    was_stopped = True
                except RuntimeError as error:  # of CPython, whose Thread.start() was stopped
                    if not isinstance(error.__context__, kind) or "unlocked lock" not in str(error):
                        raise
                    was_stopped = True
            torch.set_grad_enabled(True)  # torch's no_grad() may have been stopped in its middle
            if not was_stopped:
                assert not stop.has_come or stop.was_dropped, f"{what}: it was swallowed"
                found["in a finalizer" if stop.has_come else "came too late"] += 1
            else:
                try:
                    found[take_again(training, is_in_step)] += 1
                except OffloadError as error:
                    assert ": " in str(error) and "; " in str(error), what
                    found[f"checkpoint loaded, {type(error).__name__}"] += 1
                    training.load(saved)
                    training.step(2)
            try:
                assert_same(training.outcome(), expected, losses=False)
            except AssertionError as error:
                raise AssertionError(what) from error
    with watchdog.watch(f"{stream}: close"):
        training.close()
    assert_same(training.outcome(), expected, losses=False)
    return found


def stack_of_main_thread() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame))


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("stream", STREAMS, ids=lambda name: name.split()[-1])
def test_what_a_handler_raises_is_not_taken_for_a_failed_read(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(stream, tmp_path).train(0)
    training.settle()
    waits_in = "wait_for_read" if stream == ACTIVATIONS else "only_copy.py"
    read, has_come = UnlinkedFile.read, threading.Event()
    is_first = (
        threading.Lock()
    )  # a second signal would meet the handler of before: the process's end

    def stop(*_: object) -> None:
        has_come.set()
        raise StoppedError

    def interrupts(file: UnlinkedFile, *args: Any) -> None:
        if is_first.acquire(blocking=False):
            wait_until(lambda: waits_in in stack_of_main_thread(), "nothing waits for the read")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            assert has_come.wait(SOON_S)
        read(file, *args)

    before = signal.signal(signal.SIGALRM, stop)
    monkeypatch.setattr(UnlinkedFile, "read", interrupts)
    try:
        with pytest.raises(StoppedError):
            training.step(1)
    finally:
        signal.signal(signal.SIGALRM, before)
        training.close(restore=False)


@pytest.mark.slow
@pytest.mark.timeout(900, method="thread")  # SIGALRM is the test's own
@pytest.mark.parametrize("stream", STREAMS, ids=lambda name: name.split()[-1])
def test_a_signal_at_any_moment_of_a_step(stream: str, watchdog: Watchdog, tmp_path: Path) -> None:
    found: Any = interrupted_rounds(stream, NUM_ROUNDS, 34, tmp_path, watchdog)
    print(f"{stream}: {dict(found)}")
    assert found.total() - found["came too late"] == NUM_ROUNDS
