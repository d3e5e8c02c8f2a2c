# SPDX-License-Identifier: Apache-2.0
"""A write moves piece by piece: what overtakes it, what ends it, and what it holds meanwhile."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from megatron.offload.sizes import MIB
from megatron.offload.tiers.access import _InPlaceView
from megatron.offload.tiers.budget import RateLimit
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.io_threads import IoThreads, Piece
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.staging import PIECE_BYTES
from megatron.offload.tiers.transfer import Transfer, when_all
from tests.conftest import Gate
from tests.support.models import settle
from tests.support.simulated_device import PoisoningPool, SimulatedDevice
from tests.support.waiting import SOON_S, wait_until

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


class Work:
    """Notes its pieces as they run. A piece that is held waits until it is let go."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.running = threading.Semaphore(0)
        self._let_go = threading.Semaphore(0)

    def pieces(self, name: str, *sizes: int, held: int | None = None) -> list[Piece]:
        """A write whose pieces have these sizes."""
        return [
            Piece(size, self.note(f"{name} {number}", number == held))
            for number, size in enumerate(sizes)
        ]

    def note(self, name: str, held: bool = False) -> Callable[[], None]:
        def move() -> None:
            if held:
                self.running.release()
                assert self._let_go.acquire(timeout=SOON_S)
            self.done.append(name)

        return move

    def wait_until_held(self) -> None:
        assert self.running.acquire(timeout=SOON_S)

    def let_go(self) -> None:
        self._let_go.release()


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    """One thread."""
    threads = IoThreads(1, "test")
    yield threads
    closing = threading.Thread(target=threads.close, daemon=True)
    closing.start()
    closing.join(timeout=SOON_S)


def test_a_read_goes_before_the_rest_of_a_write_and_the_rest_before_other_writes(
    threads: IoThreads,
) -> None:
    work = Work()
    first = threads.submit_write(work.pieces("first", 1, 1, 1, held=0))
    work.wait_until_held()
    second = threads.submit_write(work.pieces("second", 1))
    read = threads.submit_read(work.note("read"))
    work.let_go()
    for transfer in (first, second, read):
        transfer.result(timeout=SOON_S)
    assert work.done == ["first 0", "read", "first 1", "first 2", "second 0"]


@pytest.mark.parametrize("verb", ["cancel", "abandon"])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_the_rest_of_an_unwanted_write_is_given_up(
    threads: IoThreads, verb: str, is_waiting: bool
) -> None:
    work = Work()
    write = threads.submit_write(work.pieces("write", 1, 1, 1, held=0))
    work.wait_until_held()
    if is_waiting:
        read = threads.submit_read(work.note("read", held=True))
        work.let_go()
        work.wait_until_held()
    num_done = len(work.done)
    assert getattr(write, verb)() in (False, None), "it has started"
    assert not write.done(), "a thread has it, or its rest is in the queue"
    work.let_go()
    with pytest.raises(CancelledError):
        write.result(timeout=SOON_S)
    assert write.cancelled()
    if is_waiting:
        read.result(timeout=SOON_S)
    assert len(work.done) == num_done + 1, "the piece, or the read, that was under way"
    write.wait_until_done()
    with pytest.raises(CancelledError):
        write.wait()


def test_a_write_that_nobody_wants_ends_before_a_read_that_waits(threads: IoThreads) -> None:
    """What it holds is free then."""
    work = Work()
    write = threads.submit_write(work.pieces("write", 1, 1, held=0))
    work.wait_until_held()
    threads.submit_read(work.note("read", held=True))
    write.cancel()
    work.let_go()
    work.wait_until_held()
    assert write.cancelled()
    work.let_go()


def test_a_write_that_nobody_wants_any_more_when_its_last_piece_runs_ends_well(
    threads: IoThreads,
) -> None:
    work = Work()
    write = threads.submit_write(work.pieces("write", 1, 1, held=1))
    work.wait_until_held()
    assert not write.cancel()
    work.let_go()
    assert write.exception(timeout=SOON_S) is None and not write.cancelled()


def test_a_write_given_up_keeps_nothing_alive_and_lets_go_before_anybody_is_told() -> None:
    class Buffer:
        def use(self) -> None:
            pass

    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = Transfer(buffer.use, buffer.use)
    del buffer
    alive: list[bool] = []
    transfer.add_done_callback(lambda _: alive.append(weak() is not None))
    assert transfer.run()
    assert not transfer.cancel() and weak() is not None, "a thread may be at work on it"
    assert not transfer.run()
    assert alive == [False]


@pytest.mark.parametrize("fails", [True, False])
def test_a_write_whose_piece_fails_or_whose_thread_dies_moves_no_more(
    threads: IoThreads, fails: bool
) -> None:
    started, done = threading.Event(), []

    def piece() -> None:
        started.set()
        if fails:
            raise OSError(5, "no")
        while True:
            time.sleep(0.001)

    moves = [lambda: done.append(0), piece, lambda: done.append(2)]
    write = threads.submit_write([Piece(1, move) for move in moves])
    assert started.wait(timeout=SOON_S)
    if not fails:
        (thread,) = threads._threads
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )
    with pytest.raises(OSError, match="no" if fails else "died"):
        write.result(timeout=SOON_S)
    threads.submit_read(lambda: None).result(timeout=SOON_S)
    assert done == [0] and threads.queued_write_bytes == 0


def test_what_waits_of_a_write_counts_as_queued(threads: IoThreads) -> None:
    work = Work()
    write = threads.submit_write(work.pieces("write", 5, 3, 2, held=0))
    work.wait_until_held()
    assert threads.queued_write_bytes == 0, "a thread has it"
    read = threads.submit_read(work.note("read", held=True))
    work.let_go()
    work.wait_until_held()
    assert threads.queued_write_bytes == 5
    work.let_go()
    for transfer in (write, read):
        transfer.result(timeout=SOON_S)
    assert threads.queued_write_bytes == 0


def test_the_write_limit_holds_up_pieces_and_not_whole_writes() -> None:
    limit = RateLimit(bytes_per_s=1000)
    threads, work = IoThreads(1, "test", limit), Work()
    write = threads.submit_write(work.pieces("write", 10**9, 10**8, 1))
    threads.submit_read(work.note("read")).result(timeout=SOON_S)
    wait_until(lambda: threads.queued_write_bytes == 10**8 + 1, "the second piece does not wait")
    assert sorted(work.done) == ["read", "write 0"]
    assert 0.9 * 10**6 < limit.delay_s() < 1.05 * 10**6, "only the first piece is charged"
    limit.charge(-(10**9))
    threads.submit_read(lambda: None).result(timeout=SOON_S)  # the thread looks at the clock again
    wait_until(lambda: "write 1" in work.done, "the second piece does not run")
    assert "write 2" not in work.done
    threads.close()
    assert write.cancelled()


def test_closing_ends_a_write_after_the_piece_under_way(threads: IoThreads) -> None:
    work = Work()
    write = threads.submit_write(work.pieces("write", 1, 1, held=0))
    work.wait_until_held()
    closing = threading.Thread(target=threads.close, daemon=True)
    closing.start()
    wait_until(lambda: threads._closing, "it does not close")
    assert not write.done()
    work.let_go()
    closing.join(timeout=SOON_S)
    assert write.cancelled() and work.done == ["write 0"]


def test_a_striped_write_is_cancelled_when_a_part_was_given_up() -> None:
    part, other = Transfer(lambda: None, lambda: None), Transfer(lambda: None)
    whole = when_all([part, other])
    part.run()
    other.run()
    assert not whole.cancel() and not whole.done()
    part.run()
    assert whole.cancelled()


# -- On a drive -----------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, pieces of one page."""
    monkeypatch.setattr(_InPlaceView, "piece_bytes", PAGE)


Tiers = Callable[..., SsdTier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[Tiers]:
    """Builds tiers with buffered I/O and one thread, and closes them after the test."""
    tiers: list[SsdTier] = []

    def build(**settings: object) -> SsdTier:
        tiers.append(SsdTier([tmp_path], io="buffered", num_threads=1, **settings))  # type: ignore[arg-type]
        return tiers[-1]

    yield build
    for tier in tiers:
        tier.close()


def storage_of(num_bytes: int) -> torch.UntypedStorage:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).untyped_storage()


def tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_storages_in_place_are_written_in_pieces_and_come_back(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = UnlinkedFile.write

    def noting(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        sizes.append(len(body))
        write(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, "write", noting)
    pytest.importorskip("xxhash")
    tier = make_tier(verify=True)
    source = storage_of(2 * PIECE_BYTES + MIB)
    started = tier.begin_write(source)
    assert started is not None
    started[1].wait()
    target, transfer = tier.begin_read(started[0])
    transfer.wait()
    is_same = torch.equal(tensor_of(target), tensor_of(source))  # to show a storage takes minutes
    assert is_same
    assert sizes == [PIECE_BYTES, PIECE_BYTES, MIB]
    os.pwrite(tier.drives[0].file.fd, b"\7\7\7", PIECE_BYTES + 17)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="checksum mismatch"):
        tier.begin_read(started[0])[1].wait()


def test_space_and_memory_of_a_write_given_up_are_held_until_no_thread_touches_them(
    make_tier: Tiers, write_gate: Gate, small_pieces: None
) -> None:
    tier, source = make_tier(), storage_of(3 * PAGE)
    weak = source._weak_ref()
    started = tier.begin_write(source)
    assert started is not None
    transfer = started[1]
    write_gate.wait_for_arrival()
    del started, source
    transfer.cancel()
    assert tier.used_bytes == 3 * PAGE and not torch.UntypedStorage._expired(weak)
    write_gate.open.set()
    wait_until(transfer.done, "it does not end")
    assert transfer.cancelled() and tier.used_bytes == 0 and torch.UntypedStorage._expired(weak)
    assert tier.statistics.writes.total_bytes == PAGE and not tier.degraded
    torch.UntypedStorage._free_weak_ref(weak)


def test_a_staged_write_whose_rest_waits_leaves_its_buffer_to_the_read(
    make_tier: Tiers, write_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.offload.tiers.ssd.StagingPool", PoisoningPool)
    device = SimulatedDevice()
    tier = make_tier(device=device)  # one thread, and one more buffer
    assert tier._staging is not None
    sources = [storage_of(num * tier._staging.piece_bytes) for num in (1, 3)]
    for source in sources:
        device.queued(source)
    write_gate.open.set()
    produced = device.record_event()
    small = tier.begin_write(sources[0], produced)
    assert small is not None
    small[1].wait()
    write_gate.open.clear()
    write_gate.wait_for_arrival()
    large = tier.begin_write(sources[1], produced)
    assert large is not None
    write_gate.wait_for_arrival()
    read, transfer = tier.begin_read(small[0])
    order: list[str] = []
    for name, ended in (("write", large[1]), ("read", transfer)):
        ended.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    write_gate.open.set()
    transfer.result(timeout=SOON_S)
    large[1].result(timeout=SOON_S)
    wait_until(lambda: len(order) == 2, "somebody is not told")
    assert order == ["read", "write"]
    again, last = tier.begin_read(large[0])
    last.result(timeout=SOON_S)
    for event in [*(transfer.events or ()), *(last.events or ())]:
        device.wait_for_event(event)
    for source, target in zip(sources, (read, again), strict=True):
        is_same = torch.equal(tensor_of(target), tensor_of(source))
        assert is_same


def test_forwarding_ends_the_write_under_way(make_engine, write_gate, small_pieces):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        tensor = torch.randn(8 * PAGE // 4)
        expected = tensor.clone()
        packed = engine.hooks.pack(tensor)
        engine.dispatcher.drain()
        write_gate.wait_for_arrival()
        assert torch.equal(engine.hooks.unpack(packed), expected)
        write_gate.open.set()
        settle(engine)
    assert engine.statistics.written_bytes == PAGE
    assert engine.statistics.forwarded_bytes == 8 * PAGE
    assert engine.statistics.tier_used_bytes == 0


def test_a_graph_that_is_dropped_ends_its_write_under_way(make_engine, write_gate, small_pieces):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        packed = engine.hooks.pack(torch.randn(8 * PAGE // 4))
        engine.dispatcher.drain()
        write_gate.wait_for_arrival()
        del packed
        write_gate.open.set()
        settle(engine)
    assert engine.statistics.written_bytes == PAGE
    assert engine.statistics.tier_used_bytes == 0
