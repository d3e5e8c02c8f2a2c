# SPDX-License-Identifier: Apache-2.0
"""An error at the n-th read, write and allocation of space, for every n of a step and a checkpoint.

Once and for ever, in each stream. What follows is the bits of a training without faults, or a
sentence; it ends; and behind `close` nothing is open. The faults come to the methods of a tier's
file, so n counts what the tiers ask a disk for.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.errors import OffloadError
from tests.support.nth_fault import ALLOCATION, KINDS, READ, WRITE, NthFault
from tests.support.streams import (
    ACTIVATIONS,
    FROZEN,
    GRADIENTS,
    LAYERS,
    STREAMS,
    Training,
    assert_same,
    without_offload,
)
from tests.support.waiting import wait_until
from tests.support.watchdog import Watchdog

pytestmark = [pytest.mark.usefixtures("one_compute_thread")]

PARTS = "step", "save", "load"
ERRORS = {READ: [errno.EIO], WRITE: [errno.EIO, errno.ENOSPC], ALLOCATION: [errno.ENOSPC]}
MOST = 1000  # calls of one kind in a part; a part has far fewer


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> NthFault:
    return NthFault(monkeypatch)


def checkpoint_of(stream: str) -> dict[str, Any]:
    """Of the same training, in memory, behind its first step."""
    kind = stream if stream in (GRADIENTS, FROZEN) else ACTIVATIONS
    return Training(kind, None).train(0).checkpoint()


class Round:
    """A training with a fault in one part of it.

    Args:
        stream: that is offloaded.
        directory: of its tier.
        fault: that is set when the part begins.
        saved: a checkpoint, of behind the first step.

    Attributes:
        said: the sentences that it ended with.
        was_reached: whether the fault came before the part's end.
    """

    def __init__(
        self, stream: str, directory: Path, fault: NthFault, saved: dict[str, Any]
    ) -> None:
        self._stream, self._directory, self._fault, self._saved = stream, directory, fault, saved
        self.said: list[str] = []
        self.was_reached = False
        self._training = Training(stream, directory).train(0)
        self._training.settle()

    def _tries(self, work: Callable[[], object]) -> bool:
        """Whether it ends well. If not, a sentence says why."""
        try:
            work()
        except OffloadError as error:
            text = f"{type(error).__name__}: {error}"
            assert ": " in str(error) and "; " in str(error), text
            self.said.append(text)
            return False
        return True

    def run(self, part: str, begin: Callable[[], None], *, for_ever: bool) -> None:
        """Runs the part with its fault, and goes on from it.

        Args:
            part: one of `PARTS`.
            begin: sets the fault.
            for_ever: it lasts until the training has been closed.
        """
        training = self._training
        if part != "step":
            training.evaluate()  # sends away what the optimizer's step has left in memory
        begin()
        is_well = getattr(self, f"_{part}")(training)
        self.was_reached = self._fault.num_failed > 0
        if not for_ever:
            self._fault.end()
        if not is_well:
            is_well = self._tries(lambda: training.load(self._saved))
            if not is_well and not for_ever:  # the tier's own bytes are gone: a new handle
                self._close(training, restore=False)
                training = self._training = Training(self._stream, self._directory)
                training.load(self._saved)
                is_well = True
            if part == "step":
                is_well = is_well and self._tries(lambda: training.step(1))
        if part != "step":
            is_well = is_well and self._tries(lambda: training.step(1))
        if is_well and not for_ever:
            training.step(2)
        numbers = (0, 1) if for_ever else (0, 1, 2)
        expected = without_offload(self._stream, *numbers)
        if is_well:
            self._compare(training, expected)
            is_well = self._tries(training.close)
            if is_well:
                self._compare(training, expected)
        else:
            assert for_ever
        if not is_well:
            assert for_ever, self.said
            self._close(training, restore=False)

    def _compare(self, training: Training, expected: dict[str, torch.Tensor]) -> None:
        found: list[dict[str, torch.Tensor]] = []
        if self._tries(lambda: found.append(training.outcome())):
            assert_same(found[0], expected, losses=False)

    def _close(self, training: Training, *, restore: bool) -> None:
        training.close(restore=restore)

    def _step(self, training: Training) -> bool:
        for _ in range(2):  # a pass that has failed may be taken again
            if self._tries(lambda: training.passes(1)):
                return self._tries(training.optimizer.step)
        return False

    def _save(self, training: Training) -> bool:
        found: list[dict[str, Any]] = []
        if not self._tries(lambda: found.append(training.checkpoint())):
            return False
        for name, weight in found[0]["model"].items():
            assert torch.equal(weight, self._saved["model"][name]), name
        for number, state in found[0]["optimizer"]["state"].items():
            for key, value in state.items():
                assert torch.equal(value, self._saved["optimizer"]["state"][number][key]), key
        return True

    def _load(self, training: Training) -> bool:
        is_well = self._tries(lambda: training.load(self._saved))
        return is_well and self._tries(training.evaluate)  # takes over what was loaded


def what_is_open(directory: Path) -> tuple[list[str], list[str], list[str]]:
    """Threads and files of tiers, and what is in the directory."""
    threads = [one.name for one in threading.enumerate() if one.name.startswith("offload")]
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # of this listing itself
            continue
        if name.startswith(str(directory)):
            files.append(name)
    return threads, files, [*map(str, directory.iterdir())]


def assert_nothing_is_open(directory: Path) -> None:
    if any(what_is_open(directory)):
        gc.collect()  # an error's traceback may have kept what it has passed
    wait_until(lambda: not any(what_is_open(directory)), f"left open: {what_is_open(directory)}")


def run_round(
    stream: str,
    part: str,
    kind: str,
    number: int,
    code: int,
    for_ever: bool,
    fault: NthFault,
    directory: Path,
    watchdog: Watchdog,
    saved: dict[str, Any],
) -> list[str] | None:
    """One round; what it said. None: the part has fewer calls of that kind."""
    what = (
        f"{stream}, {part}: {kind} {number} fails {'for ever' if for_ever else 'once'} with "
        f"{errno.errorcode[code]}"
    )
    with watchdog.watch(what):
        try:
            one = Round(stream, directory, fault, saved)
            one.run(
                part,
                lambda: fault.begin(kind, number, code, for_ever=for_ever),
                for_ever=for_ever,
            )
        except BaseException as error:
            raise AssertionError(what) from error
        finally:
            fault.end()
        assert_nothing_is_open(directory)
    return one.said if one.was_reached else None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("stream", STREAMS, ids=lambda name: name.split()[-1])
def test_every_call_may_fail(
    stream: str, part: str, fault: NthFault, watchdog: Watchdog, tmp_path: Path
) -> None:
    saved = checkpoint_of(stream)
    for kind in KINDS:
        for code, for_ever in itertools.product(ERRORS[kind], (False, True)):
            said: dict[str, int] = {}
            for number in range(1, MOST):
                found = run_round(
                    stream, part, kind, number, code, for_ever, fault, tmp_path, watchdog, saved
                )
                if found is None:
                    break
                for one in found:
                    said[one.split(":")[0]] = said.get(one.split(":")[0], 0) + 1
            else:
                pytest.fail(f"{stream}, {part}: {kind} {MOST} still failed")
            print(
                f"{stream}, {part}: each of {number - 1} {kind}s failed "
                f"{'for ever' if for_ever else 'once'} with {errno.errorcode[code]}; {said}"
            )


@pytest.mark.parametrize("stream", STREAMS, ids=lambda name: name.split()[-1])
def test_some_calls_fail(stream: str, fault: NthFault, watchdog: Watchdog, tmp_path: Path) -> None:
    saved = checkpoint_of(stream)
    chosen = random.Random(34)
    num_failed = 0
    for part, kind in (("step", READ), ("step", WRITE), ("step", ALLOCATION), ("save", READ)):
        code = chosen.choice(ERRORS[kind])
        number, for_ever = chosen.randint(1, LAYERS), chosen.random() < 0.5
        found = run_round(
            stream, part, kind, number, code, for_ever, fault, tmp_path, watchdog, saved
        )
        num_failed += found is not None
    assert num_failed >= 2
