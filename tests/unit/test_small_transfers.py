# SPDX-License-Identifier: Apache-2.0
"""Small transfers that a thread takes together: one call moves them, and each ends by itself."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload.tiers import file as file_module
from megatron.offload.tiers import io_threads
from megatron.offload.tiers.file import UnlinkedFile, Vector
from megatron.offload.tiers.io_threads import IoThreads
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Block
from megatron.offload.tiers.transfer import Transfer
from tests.support.waiting import SOON_S

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


def storage_of(value: int, num_bytes: int = PAGE) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def values_of(storage: torch.UntypedStorage) -> set[int]:
    return set(torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist())


class Held:
    """A tier with one thread, which stands at a read of nothing until it is let go."""

    def __init__(self, directory: Path) -> None:
        self.tier = SsdTier([directory], io="buffered", num_threads=1)
        self.calls: list[tuple[str, int]] = []  # of the file, with how many bytes
        self._let_go = threading.Event()
        self.hold()

    def hold(self) -> None:
        self._let_go.clear()
        self.tier.drives[0]._threads.submit_read(self._stand, float("-inf"))

    def _stand(self) -> None:
        assert self._let_go.wait(timeout=SOON_S)

    def let_go(self) -> None:
        self._let_go.set()

    def write(self, *values: int, num_bytes: int = PAGE) -> list[tuple[Block, Transfer]]:
        started = [self.tier.begin_write(storage_of(value, num_bytes)) for value in values]
        return [one for one in started if one is not None]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(tmp_path)
    for name in ("write", "read"):
        move = getattr(UnlinkedFile, name)

        def noting(
            self: UnlinkedFile, body: memoryview, offset: int, name: str = name, move: object = move
        ) -> None:
            held.calls.append((name, len(body)))
            move(self, body, offset)  # type: ignore[operator]

        monkeypatch.setattr(UnlinkedFile, name, noting)
    yield held
    held.let_go()
    held.tier.close()


def test_small_storages_are_written_and_read_with_one_call_and_come_back(held: Held) -> None:
    started = held.write(1, 2, 3)
    held.let_go()
    for _, transfer in started:
        transfer.result(timeout=SOON_S)
    held.hold()
    reads = [held.tier.begin_read(block, number) for number, (block, _) in enumerate(started)]
    held.let_go()
    for _, transfer in reads:
        transfer.result(timeout=SOON_S)
    assert [values_of(target) for target, _ in reads] == [{1}, {2}, {3}]
    assert held.calls == [("write", 3 * PAGE), ("read", 3 * PAGE)]
    statistics = held.tier.statistics
    assert statistics.writes.total_bytes == statistics.reads.total_bytes == 3 * PAGE


def test_what_lies_apart_in_the_file_comes_back_to_its_own_place(held: Held) -> None:
    started = held.write(1, 2, 3, 4)
    held.let_go()
    for _, transfer in started:
        transfer.result(timeout=SOON_S)
    held.hold()
    held.calls.clear()
    order = (3, 0, 1)
    reads = {number: held.tier.begin_read(started[number][0], number) for number in order}
    held.let_go()
    for number, (target, transfer) in reads.items():
        transfer.result(timeout=SOON_S)
        assert values_of(target) == {number + 1}
    assert held.calls == [("read", 2 * PAGE), ("read", PAGE)]


@pytest.mark.parametrize("verb", ["cancel", "abandon"])
def test_one_that_nobody_wants_is_not_written_and_the_others_are(held: Held, verb: str) -> None:
    started = held.write(1, 2, 3)
    getattr(started[1][1], verb)()
    held.let_go()
    for number in (0, 2):
        started[number][1].result(timeout=SOON_S)
    assert started[1][1].cancelled()
    assert held.calls == [("write", PAGE), ("write", PAGE)], "the one between leaves a gap"


@pytest.mark.parametrize("verb", ["write", "read"])
def test_if_one_fails_the_others_do_not(
    held: Held, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    started = held.write(1, 2, 3)
    second = started[1][0].extents[0].offset  # type: ignore[attr-defined]
    name = {"write": "pwritev", "read": "preadv"}[verb]
    call: Callable[..., int] = getattr(os, name)

    def failing(fd: int, parts: list[memoryview], offset: int, flags: int) -> int:
        if offset <= second < offset + sum(map(len, parts)):
            raise OSError(5, "no")
        return call(fd, parts, offset, flags)

    if verb == "write":
        monkeypatch.setattr(file_module.os, name, failing)
    held.let_go()
    transfers = [transfer for _, transfer in started]
    for transfer in transfers:
        transfer.exception(timeout=SOON_S)
    if verb == "read":
        monkeypatch.setattr(file_module.os, name, failing)
        held.hold()
        transfers = [held.tier.begin_read(block)[1] for block, _ in started]
        held.let_go()
    errors = [transfer.exception(timeout=SOON_S) for transfer in transfers]
    assert isinstance(errors[1], OSError) and errors[0] is None and errors[2] is None
    assert held.tier.statistics.failed_writes == (verb == "write")


def test_a_call_that_moves_less_than_all_is_continued(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(call: Callable[..., int]) -> Callable[..., int]:
        def half(fd: int, parts: list[memoryview], offset: int, flags: int) -> int:
            return call(fd, [parts[0][: -(-len(parts[0]) // 2)]], offset, flags)

        return half

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(file_module.os, name, short(getattr(os, name)))
    started = held.write(1, 2)
    held.let_go()
    for _, transfer in started:
        transfer.result(timeout=SOON_S)
    held.hold()
    reads = [held.tier.begin_read(block) for block, _ in started]
    held.let_go()
    for number, (target, transfer) in enumerate(reads):
        transfer.result(timeout=SOON_S)
        assert values_of(target) == {number + 1}


def test_no_more_are_taken_together_than_is_small(held: Held) -> None:
    third = io_threads._TOGETHER_BYTES // 3 // PAGE * PAGE
    started = held.write(1, 2, 3, 4, num_bytes=third)
    started += held.write(5, num_bytes=2 * io_threads._TOGETHER_BYTES)
    held.let_go()
    for _, transfer in started:
        transfer.result(timeout=SOON_S)
    sizes = [num_bytes for _, num_bytes in held.calls]
    assert sizes == [3 * third, third, 2 * io_threads._TOGETHER_BYTES]


def test_the_parts_of_a_vector_are_counted_from_its_first_byte() -> None:
    vector = Vector([memoryview(bytes([0, 1, 2])), memoryview(bytes([3])), memoryview(bytes([4]))])
    assert len(vector) == 5
    for done in range(6):
        left = b"".join(bytes(part) for part in vector.without_first(done))
        assert left == bytes(range(done, 5))


def test_a_thread_that_has_taken_a_job_wakes_another_for_the_next() -> None:
    threads = IoThreads(2, "test")
    try:
        for _ in range(20):  # the second may come before or after the woken thread has looked
            has_run = threading.Event()
            first = threads.submit_read(functools.partial(_wait_for, has_run))
            second = threads.submit_read(has_run.set)
            for one in (first, second):
                one.result(timeout=SOON_S)
    finally:
        threads.close()


def _wait_for(event: threading.Event) -> None:
    if not event.wait(timeout=SOON_S / 2):
        raise TimeoutError("the other job does not run")


def test_a_thread_that_dies_with_several_fails_those_that_have_not_ended(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        raise SystemExit

    monkeypatch.setattr(UnlinkedFile, "write", die)
    started = held.write(1, 2)
    held.let_go()
    for _, transfer in started:
        with pytest.raises(OSError, match="thread that carried it out died"):
            transfer.result(timeout=SOON_S)
