# SPDX-License-Identifier: Apache-2.0
"""One table of promises, and each of them asked of all streams of bytes.

A promise is a test with `@promise`. The table in docs/architecture.md is made of them: run this
file as a program to print it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import io
import json
import mmap
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer
from megatron.offload.errors import ConfigurationError, OffloadError, StorageError
from megatron.offload.sizes import format_size
from megatron.offload.tiers import mapped
from megatron.offload.tiers.drive import Health
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.ssd import SsdTier
from tests.support.interrupts import Interrupt, moments_of
from tests.support.streams import (
    ACTIVATIONS,
    FROZEN,
    GRADIENTS,
    LAYERS,
    PARAMETERS,
    STATES,
    STREAMS,
    Faults,
    Training,
    assert_same,
    without_offload,
)
from tests.support.waiting import SOON_S, wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_compute_thread")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"

# By fault: what is promised, and for each stream why the promise is not kept, or "".
_PROMISES: dict[str, tuple[str, dict[str, str]]] = {}


def promise(
    fault: str, what: str = "", **not_kept: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Asks a test of all streams, and has a row for it in the table.

    Args:
        fault: of the row; tests may share one.
        what: is promised, in the row's first test.
        not_kept: why a stream fails the test, by its last word; the table says it too.
    """

    def asked_of_all(test: Callable[..., None]) -> Callable[..., None]:
        _, cells = _PROMISES.setdefault(fault, (what, dict.fromkeys(STREAMS, "")))
        params = []
        for stream in STREAMS:
            reason = not_kept.get(stream.split()[-1], "")
            cells[stream] = cells[stream] or reason
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            params.append(pytest.param(stream, marks=marks, id=stream.split()[-1]))
        return pytest.mark.parametrize("stream", params)(test)

    return asked_of_all


def table() -> str:
    """The promises as the docs have them."""
    lines = [
        "| what happens | what each stream promises | " + " | ".join(STREAMS) + " |",
        "|---|---|" + "---|" * len(STREAMS),
    ]
    for fault, (what, cells) in _PROMISES.items():
        kept = [f"no: {cells[one]}" if cells[one] else "yes" for one in STREAMS]
        lines.append(f"| {fault} | {what} | {' | '.join(kept)} |")
    return "\n".join(lines) + "\n"


@pytest.fixture
def opened() -> Iterator[Callable[..., Training]]:
    """Makes trainings, and closes them after the test."""
    made: list[Training] = []

    def make(*args: Any, **settings: Any) -> Training:
        made.append(Training(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close(restore=False)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def assert_is_sentence(error: BaseException) -> None:
    text = str(error)
    assert isinstance(error, OffloadError) and ": " in text and "; " in text, text


# -- Memory -------------------------------------------------------------------------------------


@promise(
    "memory runs out while bytes come back",
    "what was read ahead is given up and the read is tried again; if there is still no memory, "
    "torch's `OutOfMemoryError`; the disk is not blamed",
)
@pytest.mark.parametrize("times", [1, -1], ids=["once", "for ever"])
def test_without_memory_for_a_read_the_disk_is_not_blamed(
    stream: str,
    times: int,
    opened: Callable[..., Training],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    begin_read, left = SsdTier.begin_read, [times]

    def refuse(tier: SsdTier, *args: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return begin_read(tier, *args, **named)

    monkeypatch.setattr(SsdTier, "begin_read", refuse)
    if times == 1:
        training.train(1)
        assert_same(training.outcome(), without_offload(stream, 0, 1))
    else:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            training.train(1)
    assert left[0] in (0, -2) or left[0] < -1
    assert "disk" not in caplog.text


@promise("memory runs out while bytes come back")
def test_where_the_host_refuses_memory_the_disk_is_not_blamed(
    stream: str,
    opened: Callable[..., Training],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()

    def refuse(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    refusing = SimpleNamespace(**{**vars(mmap), "mmap": refuse})
    monkeypatch.setattr(mapped, "mmap", refusing)
    try:
        training.train(1)
    except torch.OutOfMemoryError:
        assert stream in (STATES, GRADIENTS, FROZEN)  # other streams take no new pages
    else:
        assert_same(training.outcome(), without_offload(stream, 0, 1))
    assert "disk" not in caplog.text


# -- Drives -------------------------------------------------------------------------------------


@promise(
    "a write fails",
    "the bytes stay in memory, one warning, and training goes on with the same bits",
)
def test_a_failed_write_changes_no_bit(
    stream: str,
    opened: Callable[..., Training],
    faults: Faults,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if stream == FROZEN:  # written once, when it is offloaded
        faults.fail("write", number=errno.EIO)
    training = opened(stream, tmp_path).train(0)
    faults.fail("write", number=errno.EIO)
    training.train(1, 2)
    assert faults.num_failed
    training.settle()
    assert all(drive.health is Health.FAILED for drive in training.drives)
    said = [one for one in caplog.messages if "a write failed" in one]
    assert len(said) == 1 and "nothing is lost" in said[0]
    assert_same(training.outcome(), without_offload(stream, 0, 1, 2))


@promise(
    "a disk is full, also where a write finds that out",
    "it is full and not broken: one warning, what does not fit stays in memory, and when there is "
    "room again in its file it is written there",
)
def test_a_full_disk_is_not_a_broken_one(
    stream: str,
    opened: Callable[..., Training],
    faults: Faults,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if stream == FROZEN:  # written once, when it is offloaded
        faults.fail("write", number=errno.ENOSPC)
    training = opened(stream, tmp_path).train(0)
    training.settle()
    faults.fail("write", number=errno.ENOSPC)
    training.train(1, 2)
    training.settle()
    assert faults.num_failed
    assert all(drive.health is Health.FULL for drive in training.drives)
    said = [one for one in caplog.messages if "is full" in one]
    assert len(said) == 1 and "nothing is lost" in said[0] and "a write failed" not in caplog.text
    faults.end()
    before = training.written_bytes
    training.train(3)
    training.settle()
    assert training.written_bytes > before
    assert_same(training.outcome(), without_offload(stream, 0, 1, 2, 3))


@promise(
    "a read fails once",
    "it is tried again, or a `StorageError` ends the step, which can be taken again; same bits",
)
def test_a_read_that_fails_once_costs_a_step_at_most(
    stream: str, opened: Callable[..., Training], faults: Faults, tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    faults.fail("read", number=errno.EIO, times=1)
    try:
        training.step(1)
    except StorageError as error:
        assert stream == ACTIVATIONS
        assert_is_sentence(error)
        training.step(1)
    assert faults.num_failed == 1
    training.train(2)
    assert_same(training.outcome(), without_offload(stream, 0, 1, 2))


@promise("a read fails once")
def test_a_read_for_a_checkpoint_that_fails_once_changes_nothing(
    stream: str, opened: Callable[..., Training], faults: Faults, tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.evaluate()  # sends away what the optimizer's step has left in memory
    faults.fail("read_cached", number=errno.EIO, times=1)
    assert_same(training.outcome(), without_offload(stream, 0))
    faults.fail("read_cached", number=errno.EIO, times=1)
    training.train(1)
    assert_same(training.outcome(), without_offload(stream, 0, 1))


@promise(
    "reads fail for ever",
    "a `StorageError` that names the place ends the step, and `close(restore=False)` still ends",
)
def test_reads_that_fail_for_ever_end_in_a_sentence(
    stream: str, opened: Callable[..., Training], faults: Faults, tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    faults.fail("read", "read_cached", number=errno.EIO)
    with pytest.raises(StorageError, match="resume from the last checkpoint") as raised:
        training.train(1, 2)
    assert_is_sentence(raised.value)
    assert str(tmp_path) in str(raised.value)
    training.close(restore=False)


@promise("reads fail for ever")
def test_a_checkpoint_that_cannot_be_read_is_a_sentence(
    stream: str, opened: Callable[..., Training], faults: Faults, tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.evaluate()  # sends away what the optimizer's step has left in memory
    faults.fail("read", "read_cached", number=errno.EIO)
    if stream in (ACTIVATIONS, GRADIENTS):  # which have nothing that a checkpoint shows
        assert_same(training.outcome(), without_offload(stream, 0))
        return
    for _ in range(2):
        with pytest.raises(StorageError) as raised:
            training.outcome()
        assert_is_sentence(raised.value)
    with pytest.raises(StorageError):
        training.close()


# -- Steps --------------------------------------------------------------------------------------


class Cut(Exception):
    """Raised by a model in the middle of a step."""


def cut(*_: Any) -> None:
    raise Cut


def cut_backward(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(cut)


@promise(
    "an error cuts a forward or backward pass",
    "the step can be taken again, with the same bits",
)
@pytest.mark.parametrize("where", [cut, cut_backward], ids=["forward", "backward"])
def test_after_a_cut_pass_the_step_is_taken_again(
    stream: str,
    where: Callable[..., None],
    opened: Callable[..., Training],
    tmp_path: Path,
) -> None:
    training = opened(stream, tmp_path).train(0)
    for block in (training.model.blocks[1], training.model.blocks[LAYERS - 1]):
        hook = block.register_forward_hook(where)
        with pytest.raises(Cut):
            training.passes(1)
        hook.remove()
    training.train(1, 2)
    assert_same(training.outcome(), without_offload(stream, 0, 1, 2))


@promise(
    "Ctrl-C anywhere in our code",
    "training goes on with the same bits, or a sentence says why it does not; from a checkpoint "
    "it goes on in either case",
)
@pytest.mark.parametrize("part", ["passes", "step"])
def test_after_ctrl_c_training_goes_on(
    stream: str, part: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0, 1)
    if part == "step":
        training.passes(2)
    work = (lambda: training.passes(2)) if part == "passes" else training.optimizer.step
    moments = [(m, n + 1) for m, times in moments_of(work).items() for n in range(times)]
    if part == "passes":
        training.optimizer.step()
    saved = training.checkpoint()
    expected = without_offload(stream, 0, 1, 2, 3)
    if len(moments) < 10:  # there is nothing of ours in it
        return
    for moment, number in random.Random(34).sample(moments, 10):
        training.load(saved)
        if part == "step":
            training.passes(3)
        was_interrupted = False
        try:
            with Interrupt(moment, number, KeyboardInterrupt):
                training.passes(3) if part == "passes" else training.optimizer.step()
        except KeyboardInterrupt:
            was_interrupted = True
        if part == "passes" or not was_interrupted:
            try:
                if part == "passes":
                    training.step(3)
                assert_same(training.outcome(), expected, losses=False)
                continue
            except OffloadError as error:
                assert_is_sentence(error)
        training.load(saved)
        training.step(3)
        found = training.outcome()
        try:
            assert_same(found, expected, losses=False)
        except AssertionError as error:
            raise AssertionError(f"interrupted at {moment}") from error


# -- Copies and checkpoints ---------------------------------------------------------------------


@promise(
    "`copy.deepcopy` of model and optimizer",
    "the copies are whole and have nothing to do with the tier; training goes on",
)
def test_copies_are_whole(stream: str, opened: Callable[..., Training], tmp_path: Path) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    model, optimizer = copy.deepcopy(training.model), copy.deepcopy(training.optimizer)
    expected = without_offload(stream, 0)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, expected[f"{number} {key}"]), (number, key)
    training.train(1)
    model(torch.randn(4, 64)).backward()
    assert_same(training.outcome(), without_offload(stream, 0, 1))


@promise(
    "`torch.save` of the model, of its `state_dict` and of the optimizer's",
    "what is saved is what is saved without offload; training goes on",
)
def test_what_is_saved_is_whole(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    file = io.BytesIO()
    states = training.optimizer.state_dict()
    torch.save((training.model, training.model.state_dict(), states), file)
    file.seek(0)
    model, weights, states = torch.load(file, weights_only=False)
    expected = without_offload(stream, 0)
    for found in (model.state_dict(), weights):
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name
    for number, state in states["state"].items():
        for key, value in state.items():
            assert torch.equal(value, expected[f"{number} {key}"]), (number, key)
    training.train(1)
    assert_same(training.outcome(), without_offload(stream, 0, 1))


# -- Handles, threads and processes -------------------------------------------------------------


def what_is_open() -> tuple[set[threading.Thread], int]:
    """Threads, and files of the process."""
    gc.collect()
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@promise(
    "a handle is dropped without `close()`",
    "its model goes on; when model and optimizer are dropped too, memory, files and threads go",
)
def test_what_is_dropped_leaves_nothing_open(stream: str, tmp_path: Path) -> None:
    Training(stream, tmp_path).train(0).close()  # what the first one imports and keeps
    threads, num_files = what_is_open()
    for _ in range(2):
        Training(stream, tmp_path).train(0)

    def is_gone() -> bool:
        now, num_files_now = what_is_open()
        return now <= threads and num_files_now <= num_files

    wait_until(is_gone, "threads or files of a dropped handle are left")


@promise("a handle is dropped without `close()`")
def test_a_model_whose_handle_is_dropped_goes_on(stream: str, tmp_path: Path) -> None:
    training = Training(stream, tmp_path).train(0)
    training.handle = None
    gc.collect()
    training.train(1)
    assert_same(training.outcome(), without_offload(stream, 0, 1))


@promise("two models train in two threads", "they never meet: each has the bits that it has alone")
def test_two_models_in_two_threads_never_meet(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    steps = range(3)
    trainings = [opened(stream, tmp_path, seed=seed) for seed in range(2)]
    together = threading.Barrier(len(trainings), timeout=SOON_S)
    errors: list[BaseException] = []

    def train(training: Training) -> None:
        try:
            for step in steps:
                together.wait()
                training.step(step)
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=train, args=(one,)) for one in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for seed, training in enumerate(trainings):
        assert_same(training.outcome(), without_offload(stream, *steps, seed=seed))


def in_child(work: Callable[[], str]) -> str:
    """What a forked child process says; "hangs" if it does not end soon."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(SOON_S))
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    ready, _, _ = select.select([read_end], [], [], SOON_S)
    said = os.read(read_end, 1 << 16).decode() if ready else ""
    if not said:
        os.kill(pid, signal.SIGKILL)
    os.close(read_end)
    os.waitpid(pid, 0)
    return said or "hangs"


@promise(
    "a forked child process uses it",
    "the child gets a sentence with the number of the process that trains, or the right bits; the "
    "parent goes on with its own",
)
@pytest.mark.parametrize("what", ["step", "state_dict", "close"])
def test_a_forked_child_hears_whose_it_is(
    stream: str, what: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    expected = without_offload(stream, 0, 1)

    def work() -> str:
        if what == "close":
            training.close()
            training.handle = None
        if what != "state_dict":
            training.step(1)
        assert_same(training.outcome(), expected if what != "state_dict" else one_step)
        return "right bits"

    one_step = without_offload(stream, 0)
    said = in_child(work)
    is_ours = str(os.getpid()) in said and "OffloadError: " in said
    # torch refuses a child's backward pass where the parent has had one in a thread of autograd's.
    is_torchs = what != "state_dict" and "autograd's threading" in said
    assert said == "right bits" or is_ours or is_torchs, said
    training.train(1)
    assert_same(training.outcome(), expected)


@promise("a forked child process uses it")
def test_what_a_child_changes_is_its_own(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    training = opened(stream, tmp_path).train(0)
    shown = [*training.model.state_dict().values()]
    states = training.optimizer.state_dict()["state"].values()
    shown += [one for state in states for one in state.values()]

    def change() -> str:
        for tensor in shown:
            tensor.zero_()
        return "changed"

    assert in_child(change) == "changed"
    training.train(1)
    assert_same(training.outcome(), without_offload(stream, 0, 1))


# -- What is counted ----------------------------------------------------------------------------


@promise(
    "drives wear", "what is written counts in the life of its drive, whichever stream reports that"
)
def test_all_that_is_written_wears_the_drive(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    training = opened(stream, tmp_path)
    training.settle()
    with contextlib.ExitStack() as handles:
        states, before = training.handle, training.written_bytes
        if stream != STATES:
            states = offload_optimizer(training.optimizer, tmp_path, window_bytes=0)
            handles.enter_context(states)
        training.train(0, 1, 2)
        training.settle()
        states.states.wait_for_writes()
        written = training.written_bytes - before
        if stream != STATES:
            written += states.statistics["written_bytes"]
        expected = f"{format_size(written)} in this run to the drive of {tmp_path}"
        assert expected in states.report()


@promise("compute waits for a read", "`statistics` of the handle count the seconds as `stall_s`")
def test_waits_are_counted(
    stream: str,
    opened: Callable[..., Training],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    read = UnlinkedFile.read
    name = "gradient_stall_s" if stream == GRADIENTS else "stall_s"
    before = training.handle.statistics[name] if stream != ACTIVATIONS else 0.0

    def slow(file: UnlinkedFile, *args: Any) -> None:
        time.sleep(0.05)
        read(file, *args)

    monkeypatch.setattr(UnlinkedFile, "read", slow)
    training.train(1)
    assert training.handle.statistics[name] - before > 0.02


@promise("compute waits for a read")
def test_a_profile_shows_where_compute_waits(
    stream: str, opened: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened(stream, tmp_path).train(0)
    training.settle()
    read, compute_waits, ranges = UnlinkedFile.read, threading.Event(), set()

    def gated(file: UnlinkedFile, *args: Any) -> None:
        compute_waits.wait(5)
        compute_waits.set()  # a test that fails does not take that long again
        read(file, *args)

    def in_range(name: str) -> contextlib.AbstractContextManager[None]:
        ranges.add(name)
        compute_waits.set()
        return contextlib.nullcontext()

    monkeypatch.setattr(UnlinkedFile, "read", gated)
    monkeypatch.setattr(torch.profiler, "record_function", in_range)
    training.train(1)
    names = {ACTIVATIONS: "activation offload: wait for a read", FROZEN: "wait for parameters"}
    beside = {"wait for parameters"} if stream == GRADIENTS else set()
    assert ranges == {names.get(stream, f"wait for {stream}")} | beside


@promise(
    "a timeline is asked for (`--activation-offload-trace`)",
    "it has tracks for the stream's reads and writes",
)
def test_the_timeline_has_its_tracks(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    if stream == ACTIVATIONS:
        training = opened(stream, tmp_path, trace_file=path)
    else:
        training = opened(stream, tmp_path)
        activations = offload_activations(
            training.model, tmp_path, min_bytes=1, trace_file=path, mode="ssd"
        )
    training.train(0, 1, 2)
    training.close()
    if stream != ACTIVATIONS:
        activations.close()
    events = json.loads(path.read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    name = {ACTIVATIONS: "ssd", FROZEN: PARAMETERS}.get(stream, stream)
    expected = {f"write {name}", f"read {name}"}
    if stream == FROZEN:
        expected.discard(f"write {name}")  # written before the timeline begins
    assert expected <= {re.sub(r" \(\d+\)$", "", one) for one in tracks}


# -- Budgets ------------------------------------------------------------------------------------


@promise(
    "several streams have budgets of host memory",
    "those of a process know of each other: together more than there is are refused in a sentence",
)
def test_budgets_of_host_memory_know_of_each_other(
    stream: str, opened: Callable[..., Training], tmp_path: Path
) -> None:
    other = PARAMETERS if stream != PARAMETERS else STATES
    opened(other, tmp_path, mode="tiered", host_budget=0.6)
    with pytest.raises(ConfigurationError, match="host_budget") as raised:
        opened(stream, tmp_path, mode="tiered", host_budget=0.6).train(0)
    assert_is_sentence(raised.value)
    assert other in str(raised.value)


def test_the_table_in_the_docs_is_made_of_these_tests() -> None:
    assert table() in PAGE.read_text(), (
        "python -m tests.behaviour.test_every_stream_alike prints it"
    )


if __name__ == "__main__":
    print(table(), end="")
