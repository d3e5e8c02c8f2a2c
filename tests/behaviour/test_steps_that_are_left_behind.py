# SPDX-License-Identifier: Apache-2.0
"""Steps and passes that an interrupt left before their context began, and that Python ends late.

A traceback that a notebook keeps, or a cycle, keeps such a context too; it ends with them, maybe in
the middle of another step, and in any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.offload import OffloadEngine
from megatron.offload.activations.saved.scope import Scope


def test_a_step_that_ends_late_is_not_the_end_of_the_next_one(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, ended = engine._end_step, []

    def end_step() -> None:
        ended.append(engine.statistics)
        right()

    monkeypatch.setattr(engine, "_end_step", end_step)
    left = engine.step()
    left.__enter__()
    with engine.step():
        with engine.forward(Scope()) as order:
            left.gen.close()  # type: ignore[attr-defined]
            assert not ended
            statistics = engine.statistics
            assert engine.save_order is order
            with engine.saved_tensors_hooks():
                x = torch.randn(64, 64, requires_grad=True)
                y = (x.exp() * x).sum()
        engine.wait_for_writes()
        with engine.backward(order):
            y.backward()
        assert statistics is engine.statistics
    assert len(ended) == 1
    assert engine.statistics.offloaded_bytes > 0
    assert engine.statistics.tier_used_bytes == 0


def test_a_pass_that_ends_late_takes_no_place_from_another(engine: OffloadEngine) -> None:
    left, layer = (
        engine.forward(Scope(micro_batch=7)),
        engine.within(Scope(micro_batch=7, layer="a")),
    )
    left.__enter__()
    layer.__enter__()
    scope = Scope(micro_batch=1)
    with engine.forward(scope) as order:
        for one in (layer, left):
            one.gen.close()  # type: ignore[attr-defined]
        assert engine.save_order is order
        assert engine.scope == scope


def test_a_step_that_python_ends_in_the_thread_of_transfers_does_not_hold_it(
    make_engine: Callable[..., OffloadEngine],
) -> None:
    engine = make_engine(io="buffered")
    left = engine.step()
    left.__enter__()
    engine.dispatcher.submit(left.gen.close)  # type: ignore[attr-defined]
    engine.dispatcher.drain()
    assert engine.wait_for_writes(30)
