# SPDX-License-Identifier: Apache-2.0
"""When writes begin: a layer's at its end and together, an operation's when the next one saves."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.saved.record import State
from tests.models import settle


@pytest.fixture
def records(engine, monkeypatch):
    """All records of the engine, in the order in which they were made."""
    add, made = engine._cache.add, []

    def noted(*arguments):
        made.append(add(*arguments))
        return made[-1]

    monkeypatch.setattr(engine._cache, "add", noted)
    yield made
    made.clear()


def states(engine, records):
    settle(engine)
    return [record.state for record in records]


def leaf():
    return torch.randn(1000, requires_grad=True)


def test_threads_hand_over_what_they_saved_themselves(engine, monkeypatch, records):
    entered, go_on = threading.Event(), threading.Event()
    add, x = engine._cache.add, leaf()

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
        y = leaf().exp()
        kept.append(y)
        engine.capture(Scope(), [y], [])

    monkeypatch.setattr(engine._cache, "add", noted)
    kept, layer = [], threading.Thread(target=compute, daemon=True)
    with engine.step():
        layer.start()
        assert entered.wait(10)
        with engine.saved_tensors_hooks():
            y = x.exp().neg()
            assert not layer.is_alive()
            assert states(engine, records) == [State.ON_TIER, State.QUEUED]
        kept.append(engine._hooks.pack(torch.randn(1000)))
        assert states(engine, records) == [State.ON_TIER] * 3
        del y, kept
