# SPDX-License-Identifier: Apache-2.0
"""A signal whose handler raises, at any moment of a step: what SIGTERM or Ctrl-C does.

A step is interrupted at each moment at which a handler can run within the package, one by one.
Behind it the step is taken again, or a checkpoint is loaded where a sentence asks for that; the
bits are those of a training without signals, and nothing waits for ever.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from megatron.offload.errors import OffloadError
from megatron.offload.machine.autocast import autocast_depth
from megatron.offload.tiers.file import UnlinkedFile
from tests.support.interrupts import Interrupt, Moment, Raising, moments_of
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

ONE_IN = 3  # of the moments; 1 takes all of them, in five to ten minutes
NUM_ROUNDS = 125  # of each stream, with a signal of the system
MOST = 10  # times as many, where signals come too late
NOT_INTERRUPTED = "did not come there"


class Stopped(BaseException):
    """What the handler raises, as that of Ctrl-C does."""


class StoppedError(Exception):
    """What a handler of SIGTERM raises where it is written so."""


class Signal(Raising):
    """SIGALRM after so many seconds; its handler raises.

    Args:
        after_s: seconds from when it is entered; it does not come after the exit.
        kind: what the handler raises.
    """

    def __init__(self, after_s: float, kind: type[BaseException]) -> None:
        super().__init__(kind)
        self._after_s = after_s

    def __enter__(self) -> Signal:
        super().__enter__()
        self._before = signal.signal(signal.SIGALRM, self._stop)
        signal.setitimer(signal.ITIMER_REAL, self._after_s)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, self._before)
            super().__exit__()

    def _stop(self, _: int, __: FrameType | None) -> None:
        self.has_come = True
        raise self._kind


def steps_taken(training: Training) -> set[float]:
    """By each parameter's state, as a checkpoint has it."""
    states = training.optimizer.state_dict()["state"].values()
    return {state["step"].item() for state in states}


def take_again(training: Training, is_in_update: bool) -> str:
    """Goes on behind a signal; what was done. A half step is never gone on from.

    Raises:
        OffloadError: a sentence says that it cannot go on.
    """
    if not is_in_update:
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


def moments_of_a_step(training: Training, saved: dict[str, Any]) -> list[tuple[bool, Moment, int]]:
    """Whether it is in the passes, each moment of several steps, how often a step came to it.

    Threads are not as far in each step, so that one alone does not come to all.
    """
    found: dict[tuple[bool, Moment], int] = {}
    for _ in range(3):
        training.load(saved)
        for in_passes, work in (
            (True, lambda: training.passes(2)),
            (False, training.optimizer.step),
        ):
            for moment, count in moments_of(work).items():
                found.setdefault((in_passes, moment), count)
    return [(in_passes, moment, count) for (in_passes, moment), count in found.items()]


def interrupted_step(training: Training, interrupt: Interrupt | Signal, *, in_passes: bool) -> str:
    """A step that ends at a moment, and what a script does behind it; says what that was."""
    is_in_update, was_stopped = False, False
    no_signal = contextlib.nullcontext()
    try:
        with interrupt if in_passes else no_signal:
            training.passes(2)
        is_in_update = True
        with no_signal if in_passes else interrupt:
            training.optimizer.step()
    except (Stopped, StoppedError):
        was_stopped = True
    except RuntimeError as error:  # of CPython, whose Thread.start() was stopped
        if not isinstance(error.__context__, Stopped | StoppedError):
            raise
        was_stopped = True
    torch.set_grad_enabled(True)  # torch's no_grad() may have been stopped in its middle
    if was_stopped:
        return take_again(training, is_in_update)
    assert not interrupt.has_come or interrupt.was_dropped, "it was swallowed"
    return "in a finalizer" if interrupt.has_come else NOT_INTERRUPTED


class InterruptedSteps:
    """Steps of one training that are interrupted, and the bits that each has to come to.

    Attributes:
        found: how the steps went.
    """

    def __init__(self, stream: str, directory: Path, watchdog: Watchdog, **settings: Any) -> None:
        gc.collect()  # of other tests, whose finalizers would be moments of a step of this one
        self.found: collections.Counter[str] = collections.Counter()
        self.training = Training(stream, directory, **settings).train(0, 1)
        self.saved = self.training.checkpoint()
        self._expected = without_offload(stream, 0, 1, 2)
        self._watchdog = watchdog

    def run(self, interrupt: Interrupt | Signal, what: str, *, in_passes: bool) -> None:
        """The third step, interrupted, and what comes behind it."""
        training = self.training
        with self._watchdog.watch(what):
            training.load(self.saved)
            try:
                try:
                    self.found[interrupted_step(training, interrupt, in_passes=in_passes)] += 1
                except OffloadError as error:
                    assert ": " in str(error) and "; " in str(error)
                    self.found[f"checkpoint loaded, {type(error).__name__}"] += 1
                    training.load(self.saved)
                    training.step(2)
                assert_same(training.outcome(), self._expected, losses=False)
                torch.ones(1, requires_grad=True).exp()  # takes hooks off whose end came half way
                hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
                assert hooks is None, f"hooks stay on the thread: {hooks}"
                assert autocast_depth() == 0, "autocast would keep its casts of weights for good"
                if training.stream == ACTIVATIONS:
                    assert training.handle.engine.wait_for_writes(SOON_S), "bytes stay in flight"
            except AssertionError as error:
                raise AssertionError(what) from error

    @property
    def num_interrupted(self) -> int:
        """Steps that were."""
        return self.found.total() - self.found[NOT_INTERRUPTED]

    def close(self) -> None:
        """Ends the offload, which keeps the bits."""
        with self._watchdog.watch("close"):
            self.training.close()
        assert_same(self.training.outcome(), self._expected, losses=False)
        print(f"{self.training.stream}: {dict(self.found)}")


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
    is_first = threading.Lock()  # a second signal would meet the handler of before: our end

    def stop(*_: object) -> None:
        has_come.set()
        raise StoppedError

    def interrupts(file: UnlinkedFile, *args: Any) -> None:
        if is_first.acquire(blocking=False):
            wait_until(lambda: waits_in in stack_of_main_thread(), "nothing waits for the read")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            # CPython sees a signal from just before its wait when that ends: behind this read.
            has_come.wait(1.0)
        read(file, *args)

    before = signal.signal(signal.SIGALRM, stop)
    monkeypatch.setattr(UnlinkedFile, "read", interrupts)
    try:
        with pytest.raises(StoppedError):
            training.step(1)
        assert has_come.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
        training.close(restore=False)


@pytest.mark.slow
@pytest.mark.timeout(900, method="thread")
@pytest.mark.parametrize(
    ("stream", "settings"),
    [*((one, {}) for one in STREAMS), (ACTIVATIONS, {"replay": "on"})],
    ids=[*(one.split()[-1] for one in STREAMS), "replay"],
)
def test_an_interrupt_at_any_moment_of_a_step(
    stream: str,
    settings: dict[str, str],
    watchdog: Watchdog,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chosen = random.Random(34)
    steps = InterruptedSteps(stream, tmp_path, watchdog, **settings)
    moments = moments_of_a_step(steps.training, steps.saved)
    for in_passes, moment, count in chosen.sample(moments, len(moments) // ONE_IN):
        number = chosen.choice([1, max(1, count // 2), count])
        kind = chosen.choice([Stopped, StoppedError])
        what = f"{kind.__name__} in {moment}, {number} of {count}"
        steps.run(Interrupt(moment, number, kind), what, in_passes=in_passes)
    steps.close()
    assert steps.num_interrupted > 100
    assert "Exception ignored" not in capfd.readouterr().err


def seconds_of(training: Training) -> tuple[float, float]:
    """Of a step's passes, and of its update, behind a load as in each round."""
    began = time.perf_counter()
    training.passes(2)
    passed = time.perf_counter()
    training.optimizer.step()
    return passed - began, time.perf_counter() - passed


@pytest.mark.rare  # its moments are not those of any run before it
@pytest.mark.timeout(900, method="thread")  # SIGALRM is the test's own
@pytest.mark.parametrize("stream", STREAMS, ids=lambda name: name.split()[-1])
def test_a_signal_at_any_moment_of_a_step(stream: str, watchdog: Watchdog, tmp_path: Path) -> None:
    chosen = random.Random(34)
    steps = InterruptedSteps(stream, tmp_path, watchdog)
    passes_s, update_s = seconds_of(steps.training.load(steps.saved))
    for number in range(MOST * NUM_ROUNDS):
        if steps.num_interrupted == NUM_ROUNDS:
            break
        kind, in_passes = (Stopped, StoppedError)[number % 2], number % 4 < 2
        after_s = chosen.uniform(1e-5, passes_s if in_passes else update_s)
        where = "passes" if in_passes else "the update"
        what = f"round {number}: {kind.__name__} after {after_s * 1e3:.2f} ms of {where}"
        steps.run(Signal(after_s, kind), what, in_passes=in_passes)
    steps.close()
    assert steps.num_interrupted == NUM_ROUNDS
