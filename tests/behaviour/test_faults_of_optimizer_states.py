# SPDX-License-Identifier: Apache-2.0
"""The only copy of states: nothing is silently wrong, nothing stays on a disk, ends are sentences.

Where root may mount a file system the disk is really full or really fails.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_optimizer
from megatron.offload.errors import InterruptedStepError, LostStateError
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Layout
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.sizes import MIB
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.window import Window
from megatron.offload.tiers import ssd
from megatron.offload.tiers.drive import Health
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.io_threads import IoThreads
from tests.behaviour.test_optimizer_states_stay_bit_identical import OPTIMIZERS, Trained, same
from tests.support.mounts import MountedDisk, flip_a_bit, mounted_ext4
from tests.support.training import moving
from tests.support.waiting import SOON_S

pytestmark = pytest.mark.timeout(240)

ADAMW = OPTIMIZERS["adamw"]
SMALL = {"window_bytes": 0}  # all buckets move in every step
EIO = f"[Errno {errno.EIO}] {os.strerror(errno.EIO)}"


def states_of(trained: Trained) -> OptimizerStates:
    assert trained.handle is not None and trained.handle.states is not None
    return trained.handle.states


def drive_of(trained: Trained) -> Any:
    return states_of(trained).tiers[0].drives[0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def one_away(trained: Trained) -> Bucket:
    states_of(trained).wait_for_writes()
    return next(one for one in states_of(trained).buckets if one.where is Where.ON_TIER)


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    """Makes a training with its states in a directory; ends it after the test."""
    made: list[Trained] = []

    def make(directory: Any = tmp_path, **settings: Any) -> Trained:
        made.append(Trained(ADAMW, directory=directory, **(SMALL | settings)))
        return made[-1]

    yield make
    for one in made:
        if one.handle is not None:
            one.handle.close(restore=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[MountedDisk]:
    with mounted_ext4(tmp_path, 16 * MIB) as mounted:
        yield mounted


# -- Space ----------------------------------------------------------------------------------------


def large_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(MIB)) for _ in range(8)]


def test_a_disk_that_is_too_small_is_found_before_the_first_step(disk: MountedDisk) -> None:
    optimizer = torch.optim.AdamW(large_params())
    with pytest.raises(ConfigurationError) as raised:
        offload_optimizer(optimizer, disk.path, bucket_bytes=8 * MIB)
    message = str(raised.value)
    assert message.startswith(f"optimizer states: {disk.path} cannot hold the optimizer states (")
    assert "needed 72.04 MiB, free " in message and "another disk with directory" in message
    assert "activation" not in message
    assert "step" not in optimizer.__dict__, "the optimizer is as it was"


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({"mode": "host", "host_budget": 16 * MIB}, "host_budget allows 16 MiB"),
        ({"mode": "ssd", "ssd_budget_bytes": 16 * MIB}, "ssd_budget_bytes allows 16 MiB"),
        (
            {"mode": "tiered", "host_budget": 16 * MIB, "ssd_budget_bytes": 15 * MIB},
            "host_budget allows 16 MiB and ssd_budget_bytes allows 15 MiB",
        ),
    ],
)
def test_budgets_that_are_too_small_are_found_before_the_first_step(
    settings: dict[str, Any], places: str, tmp_path: Path
) -> None:
    directory = None if settings["mode"] == "host" else tmp_path
    with pytest.raises(ConfigurationError) as raised:
        offload_optimizer(
            torch.optim.AdamW(large_params()), directory, window_bytes=MIB, **settings
        )
    expected = f"optimizer states: 64 MiB of them do not fit: {places}, and window_bytes 1 MiB"
    assert str(raised.value).startswith(expected)


def test_nothing_grows_once_training_has_begun(
    disk: MountedDisk, offloaded: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    expected = Trained(ADAMW).train(6)
    trained = offloaded(disk.path)
    size = drive_of(trained).file.size_bytes
    disk.fill()
    assert same(trained.train(6).result, expected.result)
    assert drive_of(trained).file.size_bytes == size
    assert drive_of(trained).health is Health.GOOD and not warnings_of(caplog)


def test_buckets_of_any_sizes_fit_what_was_reserved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 20000, (60,), generator=generator).tolist()
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = torch.optim.Adam(params, amsgrad=True)
    settings = {"bucket_bytes": 150000, "window_bytes": 700000}
    with offload_optimizer(optimizer, tmp_path, **settings) as handle:
        assert handle.states is not None
        (drive,) = handle.states.tiers[0].drives  # type: ignore[attr-defined]
        size = drive.file.size_bytes
        for step in range(8):
            for index, param in enumerate(params):
                param.grad = None if (index + step) % 5 == 0 else torch.ones_like(param)
            optimizer.step()
        assert drive.file.size_bytes == size


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        functools.partial(torch.optim.AdamW, amsgrad=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
    ids=["adamw", "amsgrad", "momentum", "adagrad"],
)
def test_buckets_are_as_large_as_was_asked_for(
    make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(24)]
    optimizer = make(params)
    asked, each_bytes = 12 * 64 * 64 * 4, params[0].nbytes
    with offload_optimizer(optimizer, tmp_path, bucket_bytes=asked, window_bytes=0) as handle:
        assert handle.states is not None
        expected = handle.states.expected_bytes
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        sizes = [bucket.num_bytes for bucket in handle.states.buckets]
        assert sizes == [asked] * (handle.states.num_bytes // asked)
        assert expected == handle.states.num_bytes and expected % (24 * each_bytes) == 0


def test_checksums_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigurationError) as raised:
        offload_optimizer(torch.optim.AdamW(large_params()), tmp_path)
    assert str(raised.value) == (
        "optimizer states: a checksum of all that is written, which is the only copy, needs "
        "xxhash, which is not installed; pip install xxhash"
    )


# -- Writes that fail -----------------------------------------------------------------------------


@pytest.fixture
def break_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on every write to files in a directory fails."""

    def break_now(directory: Path, code: int = errno.EIO) -> None:
        write = UnlinkedFile.write

        def failing(self: UnlinkedFile, body: memoryview, offset: int) -> None:
            if self.directory == directory:
                raise OSError(code, os.strerror(code))
            write(self, body, offset)

        monkeypatch.setattr(UnlinkedFile, "write", failing)

    return break_now


def test_states_stay_in_memory_when_no_tier_takes_them(
    disk: MountedDisk,
    offloaded: Callable[..., Trained],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = Trained(ADAMW).train(8)
    trained = offloaded(disk.path)
    trained.train(3)
    states_of(trained).wait_for_writes()
    disk.refuse_writes()
    assert same(trained.train(5).result, expected.result)
    assert drive_of(trained).health is Health.FAILED
    assert states_of(trained).memory_bytes == states_of(trained).num_bytes
    of_drive, of_memory = warnings_of(caplog)
    assert of_drive.startswith(f"optimizer states: {disk.path}: a write failed (")
    assert "nothing is lost" in of_drive and "check the disk" in of_drive
    assert of_memory.startswith("optimizer states: no tier takes ")
    assert "KiB of 120 KiB (" in of_memory
    assert "they stay in memory beside the window of 0 B" in of_memory


def test_what_one_drive_refuses_goes_to_another(
    offloaded: Callable[..., Trained],
    tmp_path: Path,
    break_writes: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All goes to the first drive that takes it.
    monkeypatch.setattr(ssd, "stripe", lambda size, lanes, _: [size] + [0] * (len(lanes) - 1))
    expected = Trained(ADAMW).train(8)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    trained = offloaded(folders)
    trained.train(3)
    states_of(trained).wait_for_writes()
    break_writes(folders[0])
    assert same(trained.train(5).result, expected.result)
    trained.train(1)  # what failed last was in memory until then
    states_of(trained).wait_for_writes()
    assert states_of(trained).memory_bytes == 0
    (warning,) = warnings_of(caplog)
    assert f"{folders[0]}: a write failed ({EIO})" in warning


def test_what_the_drive_refuses_goes_to_host_memory(
    offloaded: Callable[..., Trained],
    tmp_path: Path,
    break_writes: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = Trained(ADAMW).train(8)
    trained = offloaded(mode="tiered", host_budget=MIB)
    break_writes(tmp_path)
    assert same(trained.train(8).result, expected.result)
    states_of(trained).conceal()
    assert states_of(trained).memory_bytes == 0
    assert len(warnings_of(caplog)) == 1


# -- Reads that fail ------------------------------------------------------------------------------


@pytest.fixture
def break_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The next reads of files fail."""

    def break_next(number: int) -> None:
        preadv, left = os.preadv, [number]

        def failing(*arguments: Any) -> int:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", failing)

    return break_next


def assert_over(trained: Trained) -> None:
    """Nobody goes on with what a step that ended in its middle has left, nor saves it."""
    for go_on in (trained.optimizer.step, trained.optimizer.state_dict):
        with pytest.raises(InterruptedStepError, match="some parameters may be updated and"):
            go_on()


def assert_goes_on_from(saved: Any, trained: Trained, expected: Trained) -> None:
    """Loads a checkpoint of the steps that `expected` has taken, and both take the same ones."""
    with torch.no_grad():
        for param, value in zip(trained.model.parameters(), saved[1], strict=True):
            param.copy_(value)
    trained.optimizer.load_state_dict(saved[2])
    trained.optimizer.zero_grad()
    for one in (trained, expected):
        one._generator.manual_seed(9)
        one.losses.clear()
    assert same(trained.train(3).result, expected.train(3).result)


def test_a_read_that_fails_once_changes_nothing(
    offloaded: Callable[..., Trained],
    break_reads: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = Trained(ADAMW).train(6)
    trained = offloaded()
    trained.train(3)
    states_of(trained).wait_for_writes()
    break_reads(1)
    assert same(trained.train(3).result, expected.result)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"optimizer states: a read failed ({EIO} (file in ")
    assert warning.endswith("); trying once more")


def test_a_state_that_cannot_be_read_ends_training_and_names_place_and_checkpoint(
    offloaded: Callable[..., Trained], tmp_path: Path, break_reads: Callable[[int], None]
) -> None:
    trained = offloaded()
    trained.train(3)
    states_of(trained).checkpoint = "checkpoints/iter_0000003"
    states_of(trained).wait_for_writes()
    break_reads(1 << 30)
    with pytest.raises(LostStateError) as raised:
        trained.train(1)
    message = str(raised.value)
    assert message.startswith("optimizer states: those of ")
    for part in (f"file in {tmp_path}, offset ", EIO, "resume from checkpoints/iter_0000003"):
        assert part in message, message
    assert "parameters, " in message and "\n" not in message


def test_parameters_are_named_as_the_optimizer_names_them(
    tmp_path: Path, break_reads: Callable[[int], None]
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.named_parameters())
    handle = offload_optimizer(optimizer, tmp_path, window_bytes=0, bucket_bytes=1)
    try:
        for _ in range(2):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        assert handle.states is not None
        handle.states.wait_for_writes()
        break_reads(1 << 30)
        with pytest.raises(LostStateError, match=r"those of parameter (weight|bias) "):
            optimizer.step()
    finally:
        handle.close(restore=False)


def damage(trained: Trained, bucket: Bucket | None = None) -> None:
    """One bucket that is away, in the file."""
    away = one_away(trained)
    (extent,) = (bucket or away).block.extents
    flip_a_bit(extent, 5)


def test_a_flipped_bit_ends_training(offloaded: Callable[..., Trained]) -> None:
    trained = offloaded()
    trained.train(3)
    damage(trained)
    with pytest.raises(LostStateError, match="checksum mismatch"):
        trained.train(1)


@pytest.mark.parametrize("number", [0, -1], ids=["before an update", "in mid step"])
def test_a_lost_state_is_replaced_by_a_checkpoint(
    number: int, offloaded: Callable[..., Trained]
) -> None:
    """In the same process, which has the others in memory or on the tier."""
    expected = Trained(ADAMW).train(3)
    trained = offloaded()
    trained.train(3)
    saved = trained.result
    trained.train(1)  # goes down: the next one begins with the first bucket
    damage(trained, states_of(trained).buckets[number])
    with pytest.raises(LostStateError):
        trained.train(1)
    groups = saved[2]["param_groups"]
    with pytest.raises(ValueError, match="parameter group"):
        trained.optimizer.load_state_dict({**saved[2], "param_groups": groups * 2})
    with pytest.raises((LostStateError, InterruptedStepError)):  # it has replaced nothing
        trained.optimizer.state_dict()
    assert_goes_on_from(saved, trained, expected)
    assert trained.handle is not None
    trained.handle.close()


def test_a_file_that_ends_early_ends_training(offloaded: Callable[..., Trained]) -> None:
    trained = offloaded()
    trained.train(3)
    states_of(trained).wait_for_writes()
    os.ftruncate(drive_of(trained).file.fd, 4096)
    with pytest.raises(LostStateError, match="short read: got ") as raised:
        trained.train(1)
    assert "resume from the last checkpoint" in str(raised.value)


def test_a_lost_state_in_mid_step_leaves_nothing_to_go_on_from(
    offloaded: Callable[..., Trained],
) -> None:
    trained = offloaded()
    trained.train(4)  # goes down: the next one begins with the first bucket
    states_of(trained).wait_for_writes()
    last = states_of(trained).buckets[-1].block.extents[0]
    os.ftruncate(drive_of(trained).file.fd, last.offset)
    with pytest.raises(LostStateError):
        trained.train(1)
    assert_over(trained)


def test_what_is_not_lost_is_back_in_memory_after_close(tmp_path: Path) -> None:
    expected = Trained(ADAMW).train(3).result[2]["state"]
    trained = Trained(ADAMW, directory=tmp_path, **SMALL).train(3)
    damage(trained)
    handle = trained.handle
    with pytest.raises(LostStateError):
        handle.close()
    found = [state["exp_avg"] for state in trained.optimizer.state.values()]
    back = [i for i, one in enumerate(found) if one.device.type == "cpu"]
    assert 0 < len(back) < len(found)
    assert all(torch.equal(found[index], expected[index]["exp_avg"]) for index in back)
    assert not [t for t in threading.enumerate() if str(tmp_path) in t.name]


def test_any_other_error_at_the_end_costs_no_more_than_its_bucket(
    offloaded: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Trained(ADAMW).train(3).result[2]["state"]
    trained = offloaded().train(3)
    first, restore = states_of(trained).buckets[0], OptimizerStates._restore

    def fail(states: OptimizerStates, bucket: Bucket) -> None:
        if bucket is first:
            raise RuntimeError("the first bucket")
        restore(states, bucket)

    monkeypatch.setattr(OptimizerStates, "_restore", fail)
    with pytest.raises(RuntimeError, match="the first bucket"):
        trained.handle.close()
    for index, (param, state) in enumerate(trained.optimizer.state.items()):
        if not any(param is one for one in first.params):
            assert same(state, expected[index])


def test_an_interrupt_while_states_leave_for_the_first_time_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, store, num_stored = Trained(ADAMW).train(3), Layout.store, 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_stored
        num_stored += 1
        if num_stored == 3:
            raise KeyboardInterrupt
        return store(*args)

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(Layout, "store", interrupted)
        offload_optimizer(begun.optimizer, tmp_path, bucket_bytes=30000, window_bytes=0)
    assert not [t for t in threading.enumerate() if str(tmp_path) in t.name]
    assert same(begun.train(2).result, Trained(ADAMW).train(5).result)


def test_an_error_in_mid_opening_leaves_the_optimizer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Trained(ADAMW).train(3)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(OptimizerOffload, "_prefetch_half_way", fail)
    with pytest.raises(MemoryError):
        offload_optimizer(begun.optimizer, tmp_path, bucket_bytes=30000, window_bytes=0)
    assert not {"step", "load_state_dict", "__getstate__"} & vars(begun.optimizer).keys()
    assert not [t for t in threading.enumerate() if str(tmp_path) in t.name]
    assert same(begun.train(2).result, Trained(ADAMW).train(5).result)


# -- A step that ends in its middle ---------------------------------------------------------------


class InterruptedAdamW(torch.optim.AdamW):
    """Its step is interrupted once, when a given parameter's turn has come."""

    interrupts_at: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        if any(param is type(self).interrupts_at for param in params):
            type(self).interrupts_at = None
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(lambda params: InterruptedAdamW(params), directory=tmp_path, **SMALL)
    yield trained
    if trained.handle is not None:
        trained.handle.close()


def test_after_an_interrupted_step_nobody_goes_on(interrupted: Trained) -> None:
    interrupted.train(4)
    InterruptedAdamW.interrupts_at = list(interrupted.model.parameters())[6]
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(1)
    assert_over(interrupted)


def test_after_an_interrupted_step_a_checkpoint_can_be_loaded(interrupted: Trained) -> None:
    expected = Trained(lambda params: InterruptedAdamW(params)).train(3)
    interrupted.train(3)
    saved = interrupted.result
    InterruptedAdamW.interrupts_at = list(interrupted.model.parameters())[6]
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(1)
    assert_goes_on_from(saved, interrupted, expected)


def test_a_step_that_fails_before_its_first_update_can_be_taken_again(
    offloaded: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Trained(ADAMW).train(4)
    trained = offloaded()
    trained.train(3)
    bring = Window.bring

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(Window, "bring", bring)
        raise KeyboardInterrupt

    step = trained.optimizer.step

    def twice() -> None:
        monkeypatch.setattr(Window, "bring", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
        step()

    monkeypatch.setattr(trained.optimizer, "step", twice)
    trained.train(1)
    monkeypatch.setattr(trained.optimizer, "step", step)
    assert same(trained.result, expected.result)


def test_a_step_whose_first_parameters_do_not_come_can_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def train(*, breaks: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        door = "parameters states" if breaks else ""
        whole = {"layers": [torch.nn.Sequential]}
        with moving(door, model, optimizer, tmp_path, parameters=whole):
            for step in range(3):
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                if breaks and step:
                    with monkeypatch.context() as patch:
                        patch.setattr(ParameterUnit, "bring", broken)
                        with pytest.raises(LostStateError, match=r"^parameters: those of unit"):
                            optimizer.step()
                    assert optimizer.state_dict()["state"]
                optimizer.step()
                optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    assert all(map(torch.equal, train(breaks=True), train(breaks=False)))


# -- Threads, ends, others ------------------------------------------------------------------------


def test_an_io_thread_that_dies_loses_nothing(
    offloaded: Callable[..., Trained],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = Trained(ADAMW).train(6)
    trained = offloaded()
    trained.train(3)
    states_of(trained).wait_for_writes()
    preadv, left = os.preadv, [2]

    def dying_read(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise SystemExit  # ends the thread
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", dying_read)
    assert same(trained.train(3).result, expected.result)
    died, *again = warnings_of(caplog)
    assert died.startswith("optimizer states: an I/O thread died (SystemExit(")
    most = 1 if torch.get_default_device().type == "cpu" else 2  # reads side by side
    assert 1 <= len(again) <= most
    for one in again:
        assert "the I/O thread that carried it out died" in one and "trying once more" in one


def test_without_io_threads_states_stay_in_memory_and_those_away_are_lost(
    offloaded: Callable[..., Trained],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = offloaded()
    trained.train(2)
    states_of(trained).wait_for_writes()

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    def end(*_: object) -> int:
        raise SystemExit

    monkeypatch.setattr(IoThreads, "_start_thread", refuse)
    monkeypatch.setattr(os, "preadv", end)
    with pytest.raises(LostStateError, match="died") as raised:
        for _ in range(8):
            trained.train(1)
    assert "there is no other copy, so training stops" in str(raised.value)


def test_states_that_wait_to_be_written_are_back_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Trained(ADAMW).train(3)
    trained = Trained(ADAMW, directory=tmp_path, write_bytes_per_s=200e3, **SMALL).train(2)
    states = states_of(trained)
    states.wait_for_writes()
    write, begun, go_on = UnlinkedFile.write, itertools.count(1), threading.Event()

    def hold_the_last(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        if next(begun) == len(states.buckets):
            assert go_on.wait(SOON_S)
        write(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, "write", hold_the_last)
    trained.train(1)
    assert any(one.where is Where.WRITING for one in states_of(trained).buckets)
    go_on.set()
    trained.handle.close()
    assert same(trained.result, expected.result)
    assert not [t for t in threading.enumerate() if str(tmp_path) in t.name]
