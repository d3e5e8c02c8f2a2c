# SPDX-License-Identifier: Apache-2.0
"""When writes begin: a layer's at its end and together, an operation's when the next one saves."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch

from megatron.offload import OffloadEngine, Scope
from megatron.offload.activations.saved.record import SavedStorage, State
from tests.support.models import settle, ssd
from tests.support.waiting import SOON_S

QUEUED, ON_TIER = State.QUEUED, State.ON_TIER


@pytest.fixture
def records(engine, monkeypatch):
    """All records of the engine, in the order in which they were made."""
    add, made = engine.cache.add, []

    def noted(*arguments):
        made.append(add(*arguments))
        return made[-1]

    monkeypatch.setattr(engine.cache, "add", noted)
    yield made
    made.clear()


def states(engine, records):
    settle(engine)
    return [record.state for record in records]


def leaf():
    return torch.randn(1000, requires_grad=True)


# -- A layer ------------------------------------------------------------------------------------


def test_a_layer_is_handed_over_at_its_end_and_in_one_go(engine, monkeypatch, records):
    submit, submitted = engine.dispatcher.submit, []
    monkeypatch.setattr(
        engine.dispatcher, "submit", lambda *work: (submitted.append(work), submit(*work))
    )
    x = leaf()
    with engine.step():
        y = x.softmax(0).softmax(0).softmax(0)
        engine.capture(Scope(), [y], [x])
        assert len(submitted) == 1
        assert states(engine, records) == [ON_TIER] * 3
        packed = engine.hooks.pack(torch.randn(1000))  # after a layer, and outside of one
        assert states(engine, records) == [ON_TIER] * 4
        del packed


def test_what_a_layer_saved_before_an_error_is_written(engine, monkeypatch, records):
    take = engine.hooks.take

    def fail_later(*arguments):
        if records:
            raise ArithmeticError
        return take(*arguments)

    monkeypatch.setattr(engine.hooks, "take", fail_later)
    x = leaf()
    with engine.step():
        y = x.softmax(0).softmax(0)
        with pytest.raises(ArithmeticError):
            engine.capture(Scope(), [y], [x])
        assert states(engine, records) == [ON_TIER]


def softmax_twice(engine, batch):
    """A layer of two operations, captured one after the other; what there was to see in between."""
    x = leaf()
    middle = x.softmax(0)
    engine.capture(Scope(), [middle], [x], batch=batch)
    yield middle
    result = middle.softmax(0)
    engine.capture(Scope(), [result], [x], captured=[middle.grad_fn], batch=batch)
    yield result


def test_operations_of_a_layer_that_saved_little_are_handed_over_together(engine, records):
    with engine.step():
        batch, kept = engine.new_batch(), []
        for number, result in enumerate(softmax_twice(engine, batch), start=1):
            kept.append(result)
            assert states(engine, records) == [QUEUED] * number
        batch.submit()
        assert states(engine, records) == [ON_TIER] * 2
        kept.clear()


def test_within_a_layer_enough_is_handed_over_before_its_end(engine, records, monkeypatch):
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 8000)
    with engine.step():
        kept = []
        for expected, result in zip(
            ([QUEUED], [ON_TIER] * 2), softmax_twice(engine, engine.new_batch()), strict=True
        ):
            kept.append(result)
            assert states(engine, records) == expected
        kept.clear()


def test_a_part_waits_no_longer_than_all_that_it_is_part_of_would(engine, records, monkeypatch):
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 8000)
    x = leaf()
    with engine.step():
        with engine.saved_tensors_hooks():
            part = (torch.randn(4096, requires_grad=True) * 1)[:500]
            product = part * part
            assert states(engine, records) == [QUEUED]
            result = x.softmax(0)
            assert states(engine, records) == [ON_TIER, QUEUED]
        del part, product, result


# -- Operations ---------------------------------------------------------------------------------


def test_in_a_context_an_operation_is_handed_over_when_the_next_one_saves(
    engine, records, monkeypatch
):
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 1)
    x, y = leaf(), leaf()
    with engine.step():
        with engine.saved_tensors_hooks():
            product = (x * 2) * (y * 2)  # saves both
            assert states(engine, records) == [QUEUED] * 2
            result = product.softmax(0)
            assert states(engine, records) == [ON_TIER, ON_TIER, QUEUED]
        assert states(engine, records) == [ON_TIER] * 3
        result.softmax(0)
        assert len(records) == 3, "the context has ended"


def test_in_a_context_operations_that_save_little_are_handed_over_together(
    engine, records, monkeypatch
):
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 8000)
    x = leaf()
    with engine.step():
        with engine.saved_tensors_hooks():
            result = x.softmax(0)
            for expected in ([QUEUED] * 2, [ON_TIER] * 2 + [QUEUED], [ON_TIER] * 2 + [QUEUED] * 2):
                result = result.softmax(0)
                assert states(engine, records) == expected
        assert states(engine, records) == [ON_TIER] * 4
        del result


def test_in_a_context_what_is_saved_again_does_not_count_again(engine, records, monkeypatch):
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 8000)
    x = leaf()
    with engine.step():
        with engine.saved_tensors_hooks():
            once = x.softmax(0)
            result = (once * once).softmax(0)  # the product saves it twice more
            assert states(engine, records) == [QUEUED] * 2
        del once, result


def test_threads_hand_over_what_they_saved_themselves(engine, monkeypatch, records):
    entered, go_on = threading.Event(), threading.Event()
    add, x = engine.cache.add, leaf()

    def noted(*arguments):
        record = add(*arguments)
        if threading.current_thread() is layer:
            entered.set()
            assert go_on.wait(10)
        elif not go_on.is_set():  # the layer of the other thread ends while this one saves
            go_on.set()
            layer.join(10)
        return record

    def compute():
        y = leaf().softmax(0)
        kept.append(y)
        engine.capture(Scope(), [y], [])

    monkeypatch.setattr(engine.cache, "add", noted)
    kept, layer = [], threading.Thread(target=compute, daemon=True)
    with engine.step():
        layer.start()
        assert entered.wait(10)
        with engine.saved_tensors_hooks():
            kept.append(x.softmax(0))
            assert not layer.is_alive()
            assert states(engine, records) == [ON_TIER, QUEUED]
        kept.append(engine.hooks.pack(torch.randn(1000)))
        assert states(engine, records) == [ON_TIER] * 3
        kept.clear()


# -- The end ------------------------------------------------------------------------------------


def call(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_step_ends_when_all_of_it_has_been_started(engine, monkeypatch):
    monkeypatch.setattr(ssd(engine), "begin_write", lambda *_: None)
    hold = threading.Event()
    kept = []

    def step():
        with engine.step():
            engine.dispatcher.submit(lambda: hold.wait(10))
            kept.append(engine.hooks.pack(torch.randn(1000)))

    thread = call(step)
    thread.join(timeout=0.2)
    assert thread.is_alive()
    hold.set()
    thread.join(timeout=SOON_S)
    assert engine.statistics.rejected_bytes == 4000
    kept.clear()


def test_closing_starts_what_was_handed_over_before_the_tiers_close(offload_config, caplog):
    engine = OffloadEngine(offload_config(io="buffered"))
    fd, hold = ssd(engine).drives[0].file.fd, threading.Event()
    engine.dispatcher.submit(lambda: hold.wait(10))
    with caplog.at_level(logging.WARNING):
        packed = engine.hooks.pack(torch.ones(1000))
        closing = call(engine.close)
        closing.join(timeout=0.2)
        assert closing.is_alive() and os.fstat(fd)
        hold.set()
        closing.join(timeout=SOON_S)
        assert not closing.is_alive() and not caplog.records
        assert packed.saved.state is not QUEUED


def test_bytes_count_as_in_flight_until_their_record_has_let_them_go(engine, monkeypatch):
    end_write, in_flight = SavedStorage.end_write, []

    def noted(record, failed):
        in_flight.append(engine.writer.bytes_in_flight)
        end_write(record, failed)

    monkeypatch.setattr(SavedStorage, "end_write", noted)
    with engine.step():
        packed = engine.hooks.pack(torch.randn(1000))
        settle(engine)
        del packed
    assert in_flight == [4000]
