# SPDX-License-Identifier: Apache-2.0
"""A saved storage: who may take its bytes in which state, and what happens to its transfers."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.activations.saved.record import SavedStorage, Span, State
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.tiers.transfer import Transfer
from tests.support.waiting import SOON_S

NUM_BYTES = 4096


class FakeTransfer:
    """Notes what is asked of it; its `wait` raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.is_done = True
        self._error = error

    def done(self) -> bool:
        return self.is_done

    def cancel(self) -> bool:
        self.calls.append("cancel")
        return True

    def abandon(self) -> None:
        self.calls.append("abandon")

    def wait_until_done(self) -> None:
        self.calls.append("wait until done")

    def wait(self) -> None:
        self.calls.append("wait")
        if self._error is not None:
            raise self._error


def new_storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(NUM_BYTES)


@pytest.fixture
def written() -> SavedStorage:
    """A record whose bytes only the tier has."""
    record = SavedStorage(new_storage(), Scope(), 0)
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    record.end_write(failed=False)
    assert record.state is State.ON_TIER
    return record


# -- Writing ------------------------------------------------------------------------------------


def test_a_write_that_ends_well_lets_the_memory_go() -> None:
    storage = new_storage()
    weak = storage._weak_ref()
    record = SavedStorage(storage, Scope(), 0)
    del storage
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    assert not torch.UntypedStorage._expired(weak)
    record.end_write(failed=False)
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)
    assert record.cancel_write() is None and record.block == "block"


def test_a_write_that_fails_leaves_the_bytes_and_gives_the_block_back() -> None:
    storage = new_storage()
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    record.end_write(failed=True)
    assert record.state is State.IN_MEMORY and record.block is None
    assert record.cancel_write() is storage


def test_bytes_taken_back_in_mid_write_stay_when_the_write_ends() -> None:
    storage, transfer = new_storage(), FakeTransfer()
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    record.begin_write("block", transfer)
    assert record.cancel_write() is storage and transfer.calls == ["cancel"]
    assert record.block is None, "nobody will read what is being written"
    record.end_write(failed=False)
    assert record.state is State.IN_MEMORY and record.cancel_write() is storage


def test_bytes_needed_before_their_write_began_are_not_written() -> None:
    storage, transfer = new_storage(), FakeTransfer()
    record = SavedStorage(storage, Scope(), 0)
    assert record.queue_write() is storage and record.memory_to_write() is storage
    assert record.cancel_write() is storage and record.memory_to_write() is None
    record.begin_write("block", transfer)  # they were taken back in between
    assert transfer.calls == ["cancel"] and record.block is None
    record.end_write(failed=False)
    assert record.state is State.IN_MEMORY and record.cancel_write() is storage


@pytest.mark.parametrize("num_bytes", [0, 2 * NUM_BYTES])
def test_a_storage_that_was_resized_before_its_write_began_is_not_written(num_bytes: int) -> None:
    storage = new_storage()
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    storage.resize_(num_bytes)
    assert record.memory_to_write() is None and record.state is State.IN_MEMORY
    assert record.cancel_write() is storage


def test_bytes_that_no_tier_takes_stay_in_memory() -> None:
    storage = new_storage()
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    record.keep_in_memory()
    assert record.state is State.IN_MEMORY and record.memory_to_write() is None
    assert record.cancel_write() is storage


def test_a_write_that_nobody_took_back_goes_on() -> None:
    transfer = FakeTransfer()
    record = SavedStorage(new_storage(), Scope(), 0)
    record.queue_write()
    record.begin_write("block", transfer)
    assert record.state is State.WRITING and record.block == "block" and not transfer.calls


def test_the_begin_of_a_write_and_taking_back_exclude_each_other() -> None:
    record = SavedStorage(new_storage(), Scope(), 0)
    record.queue_write()
    thread = threading.Thread(
        target=record.begin_write, args=("block", FakeTransfer()), daemon=True
    )
    with record._lock:  # as if the other one were at work
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and record.state is State.QUEUED
    thread.join(timeout=SOON_S)
    assert record.state is State.WRITING


def test_a_storage_that_was_resized_while_it_was_written_stays_in_memory() -> None:
    storage = new_storage()
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    storage.resize_(0)
    record.end_write(failed=False)
    assert record.cancel_write() is storage and record.block is None


@pytest.mark.parametrize("call", ["end_write", "cancel_write"])
def test_the_end_of_a_write_and_taking_back_exclude_each_other(call: str) -> None:
    record = SavedStorage(new_storage(), Scope(), 0)
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    arguments = (False,) if call == "end_write" else ()
    thread = threading.Thread(target=getattr(record, call), args=arguments, daemon=True)
    with record._lock:  # as if the other one were at work
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and record.state is State.WRITING
    thread.join(timeout=SOON_S)
    assert record.state is not State.WRITING


# -- Reading ------------------------------------------------------------------------------------


def test_a_new_view_and_the_last_use_exclude_each_other(written: SavedStorage) -> None:
    views: list[SavedView] = []
    tensor = torch.empty(4)
    thread = threading.Thread(target=lambda: views.append(SavedView(written, tensor)), daemon=True)
    with written._lock:  # as if the dispatcher were at a use
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and written.num_unused_views == 0
    thread.join(timeout=SOON_S)
    assert written.num_unused_views == 1 and len(views) == 1


@pytest.mark.parametrize("end", ["waited for", "made ready", "failed"])
def test_the_end_of_a_read_and_its_uses_exclude_each_other(written: SavedStorage, end: str) -> None:
    transfer = FakeTransfer(OSError(5, "no") if end == "failed" else None)
    written.begin_read(new_storage(), transfer)

    def work() -> None:
        if end == "made ready":
            written.build_views(transfer)
            return
        with contextlib.suppress(OSError):
            written.end_read()

    thread = threading.Thread(target=work, daemon=True)
    with written._lock:  # as if the dispatcher were at a use
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and written.state is State.READING
    thread.join(timeout=SOON_S)
    assert written.state is (State.ON_TIER if end == "failed" else State.RESTORED)


def test_the_last_use_and_taking_back_exclude_each_other(written: SavedStorage) -> None:
    written.begin_read(new_storage(), FakeTransfer())
    written.end_read()
    view = SavedView(written, torch.empty(4))
    thread = threading.Thread(target=written.view_used, args=(view,), daemon=True)
    with written._lock:  # as if the read-ahead were looking
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and written.state is State.RESTORED
    thread.join(timeout=SOON_S)
    assert written.state is State.ON_TIER


def test_bytes_that_are_being_read_are_given_out_only_after_the_wait(written: SavedStorage) -> None:
    memory, transfer = new_storage(), FakeTransfer()
    written.begin_read(memory, transfer)
    assert written.state is State.READING and written.cancel_write() is None
    assert transfer.calls == []
    assert written.end_read() is memory and transfer.calls == ["wait"]
    assert written.cancel_write() is memory


def test_a_read_has_arrived_when_its_transfer_is_done(written: SavedStorage) -> None:
    assert written.has_arrived, "there is none to wait for"
    transfer = FakeTransfer()
    transfer.is_done = False
    written.begin_read(new_storage(), transfer)
    assert not written.has_arrived
    transfer.is_done = True
    assert written.has_arrived and transfer.calls == []


def test_who_waits_for_a_read_learns_of_its_error_at_the_end(written: SavedStorage) -> None:
    written.wait_for_read()  # there is none
    transfer = FakeTransfer(OSError(5, "no"))
    written.begin_read(new_storage(), transfer)
    written.wait_for_read()
    assert transfer.calls == ["wait until done"] and written.state is State.READING
    with pytest.raises(OSError, match="no"):
        written.end_read()


def test_a_failed_read_leaves_nothing_behind_and_can_be_tried_again(written: SavedStorage) -> None:
    memory = new_storage()
    weak = memory._weak_ref()
    written.begin_read(memory, FakeTransfer(OSError(5, "no")))
    del memory
    with pytest.raises(OSError, match="no"):
        written.end_read()
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)
    assert written.state is State.ON_TIER and written.block == "block"
    memory = new_storage()
    written.begin_read(memory, FakeTransfer())
    assert written.end_read() is memory


def test_restored_memory_stays_until_the_last_view_was_used(written: SavedStorage) -> None:
    views = [SavedView(written, torch.empty(4)) for _ in range(2)]
    memory = new_storage()
    weak = memory._weak_ref()
    written.begin_read(memory, FakeTransfer())
    del memory
    written.end_read()
    written.view_used(views[0])
    assert written.state is State.RESTORED and not torch.UntypedStorage._expired(weak)
    written.view_used(views[1])
    assert written.state is State.ON_TIER and torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def read(record: SavedStorage) -> torch.UntypedStorage:
    memory, transfer = new_storage(), FakeTransfer()
    record.begin_read(memory, transfer)
    record.build_views(transfer)
    return memory


def test_a_view_is_ready_after_a_read_once(written: SavedStorage) -> None:
    view = SavedView(written, torch.empty(4, 8)[1:].t())
    assert view.take_built() is None
    memory = read(written)
    tensor = view.take_built()
    assert tensor is not None and tensor.untyped_storage().data_ptr() == memory.data_ptr()
    assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((8, 3), (1, 8), 8)
    assert view.take_built() is None and written.state is State.RESTORED


def test_a_view_that_was_used_is_not_made_ready(
    written: SavedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, built = [SavedView(written, torch.empty(4)) for _ in range(2)], []
    rebuild = SavedView.rebuild
    monkeypatch.setattr(
        SavedView, "rebuild", lambda view, memory: (built.append(view), rebuild(view, memory))[1]
    )
    written.view_used(views[0])
    read(written)
    assert views[0].take_built() is None and views[1].take_built() is not None
    assert built == [views[1]]


def test_views_that_died_are_not_made_ready(written: SavedStorage) -> None:
    views = [SavedView(written, torch.empty(4)) for _ in range(2)]
    del views[0]
    read(written)
    assert views[0].take_built() is not None


def test_what_was_used_and_let_go_is_not_made_ready(written: SavedStorage) -> None:
    view, other = (SavedView(written, torch.empty(4)) for _ in range(2))
    transfer = FakeTransfer()
    written.begin_read(new_storage(), transfer)
    written.end_read()
    for _ in range(2):  # as in a graph that is retained
        written.view_used(view)
    written.build_views(transfer)
    assert written.state is State.ON_TIER and not other.built


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_view_that_was_used_meanwhile_keeps_nothing(
    is_alone: bool, written: SavedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, rebuild = SavedView(written, torch.empty(4)), SavedView.rebuild
    others = [] if is_alone else [SavedView(written, torch.empty(4))]

    def use_meanwhile(self: SavedView, memory: torch.UntypedStorage) -> torch.Tensor:
        if self is view:
            written.view_used(self)
        return rebuild(self, memory)

    monkeypatch.setattr(SavedView, "rebuild", use_meanwhile)
    memory = read(written)
    weak = memory._weak_ref()
    del memory
    for other in others:
        assert other.built
        written.view_used(other)
    assert not view.built and torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_what_is_ready_and_not_taken_goes_with_the_last_use(written: SavedStorage) -> None:
    view = SavedView(written, torch.empty(4))
    memory = read(written)
    weak = memory._weak_ref()
    del memory
    assert not torch.UntypedStorage._expired(weak)
    written.view_used(view)
    assert torch.UntypedStorage._expired(weak) and written.state is State.ON_TIER
    torch.UntypedStorage._free_weak_ref(weak)


@pytest.mark.parametrize("built", [False, True])
def test_what_was_read_ahead_is_given_up_and_read_again(written: SavedStorage, built: bool) -> None:
    view = SavedView(written, torch.empty(4))
    memory, transfer = new_storage(), FakeTransfer()
    written.begin_read(memory, transfer)
    if built:
        written.build_views(transfer)
    weak = memory._weak_ref()
    del memory
    written.give_up_read()
    assert torch.UntypedStorage._expired(weak) and written.state is State.ON_TIER
    torch.UntypedStorage._free_weak_ref(weak)
    assert written.end_read() is None and view.take_built() is None
    assert view.rebuild(read(written)).shape == (4,) and written.state is State.RESTORED


def test_what_backward_has_used_a_part_of_is_not_given_up(written: SavedStorage) -> None:
    views = [SavedView(written, torch.empty(4)) for _ in range(2)]
    memory = read(written)
    written.view_used(views[0])
    written.give_up_read()
    assert written.state is State.RESTORED and written.end_read() is memory


def test_bytes_that_were_read_and_used_by_others_are_to_be_read_again(
    written: SavedStorage,
) -> None:
    view = SavedView(written, torch.empty(4))
    read(written)
    written.view_used(view)
    assert written.end_read() is None, "a thread that waited comes late"
    assert written.state is State.ON_TIER


def test_bytes_that_are_in_memory_for_good_need_no_read() -> None:
    storage = new_storage()
    assert SavedStorage(storage, Scope(), 0).end_read() is storage


def test_a_view_and_its_last_use_exclude_each_other_when_it_is_made_ready(
    written: SavedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, rebuild = SavedView(written, torch.empty(4)), SavedView.rebuild
    built, go_on = threading.Event(), threading.Event()

    def held(self: SavedView, memory: torch.UntypedStorage) -> torch.Tensor:
        tensor = rebuild(self, memory)
        built.set()
        assert go_on.wait(10)
        return tensor

    monkeypatch.setattr(SavedView, "rebuild", held)
    thread = threading.Thread(target=read, args=(written,), daemon=True)
    thread.start()
    assert built.wait(10)
    with written._lock:  # as if the view were used now
        go_on.set()
        thread.join(timeout=0.1)
        assert thread.is_alive() and not view.built
    thread.join(timeout=SOON_S)
    assert len(view.built) == 1


# -- Two reads, one after the other -------------------------------------------------------------


class LateTransfer(FakeTransfer):
    """While somebody waits for it, others are faster."""

    others: Callable[[], None] | None = None

    def wait(self) -> None:
        others, self.others = self.others, None
        if others is not None:
            others()
        super().wait()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_the_end_of_a_read_is_not_taken_for_that_of_the_next(
    written: SavedStorage, is_waited_for: bool
) -> None:
    view = SavedView(written, torch.empty(4))
    first, second = LateTransfer(), FakeTransfer()

    def use_it_and_read_it_again() -> None:
        written.build_views(first)
        written.view_used(view)
        assert written.state is State.ON_TIER
        written.begin_read(new_storage(), second)

    written.begin_read(new_storage(), first)
    if is_waited_for:
        first.others = use_it_and_read_it_again
        assert written.end_read() is None, "what was read is not there any more"
    else:
        use_it_and_read_it_again()
        written.build_views(first)
    assert written.state is State.READING and second.calls == []
    assert not view.built and written.cancel_write() is None


def test_the_error_of_a_read_does_not_end_the_next(written: SavedStorage) -> None:
    first, second = LateTransfer(OSError(5, "no")), FakeTransfer()

    def fail_and_read_it_again() -> None:
        with pytest.raises(OSError, match="no"):
            written.end_read()
        written.begin_read(memory, second)

    memory, first.others = new_storage(), fail_and_read_it_again
    written.begin_read(new_storage(), first)
    with pytest.raises(OSError, match="no"):
        written.end_read()
    assert written.state is State.READING
    assert written.end_read() is memory and second.calls == ["wait"]


def test_the_error_of_a_read_keeps_nothing_alive(written: SavedStorage) -> None:
    def fail() -> None:
        raise OSError(5, "no")

    transfer = Transfer(fail)
    transfer.run()
    written.begin_read(new_storage(), transfer)
    weak = weakref.ref(transfer)
    del transfer
    gc.disable()  # it must not need to find a circle
    try:
        with contextlib.suppress(OSError):
            written.end_read()
        assert written.state is State.ON_TIER and weak() is None
    finally:
        gc.enable()


# -- Bytes that somebody else keeps -------------------------------------------------------------


def with_bytes_on_a_tier(storage: torch.UntypedStorage) -> SavedStorage:
    record = SavedStorage(storage, Scope(), 0)
    record.queue_write()
    record.begin_write("block", FakeTransfer())
    record.end_write(failed=False)
    return record


def test_bytes_that_somebody_kept_need_no_read() -> None:
    storage = new_storage()
    record = with_bytes_on_a_tier(storage)
    taken = record.cancel_write()
    assert taken is not None and taken.data_ptr() == storage.data_ptr()
    assert record.state is State.IN_MEMORY and record.block is None


@pytest.mark.parametrize("num_bytes", [0, 2 * NUM_BYTES])
def test_bytes_that_somebody_kept_and_resized_are_read(num_bytes: int) -> None:
    storage = new_storage()
    record = with_bytes_on_a_tier(storage)
    storage.resize_(num_bytes)
    assert record.cancel_write() is None and record.state is State.ON_TIER


# -- The end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.WRITING, State.READING])
def test_a_record_that_dies_abandons_its_transfer_and_takes_no_lock(state: State) -> None:
    """Finalizers run at any moment in any thread: cancelling takes locks."""
    transfer = FakeTransfer()
    record = SavedStorage(new_storage(), Scope(), 0)
    record.queue_write()
    record.begin_write("block", transfer)
    if state is State.READING:
        record.end_write(failed=False)
        record.begin_read(new_storage(), transfer)
    lock = record._lock
    with lock:
        del record
    assert transfer.calls == ["abandon"]


def test_a_record_that_could_not_be_made_dies_without_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(AttributeError, match="nbytes"):
        SavedStorage(None, Scope(), 0)  # type: ignore[arg-type]
    gc.collect()
    assert not unraisable


def test_of_a_part_a_copy_is_written_once_it_is_gathered() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    record = SavedStorage(whole.untyped_storage(), Scope(), 0, Span(10, 20))
    record.queue_write()
    record.copy_span()
    written = record.memory_to_write()
    assert written is not None and written.tolist() == list(range(10, 30))
    assert written.data_ptr() != whole[10:].data_ptr()


def test_a_part_that_is_needed_before_it_is_gathered_is_one_of_the_storage() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    record = SavedStorage(whole.untyped_storage(), Scope(), 0, Span(10, 20))
    view = SavedView(record, whole[10:30])
    record.queue_write()
    memory = record.cancel_write()
    record.copy_span()
    assert memory is not None and memory.data_ptr() == whole.data_ptr()
    assert view.rebuild(memory).data_ptr() == whole[10:].data_ptr()
