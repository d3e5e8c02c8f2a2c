# SPDX-License-Identifier: Apache-2.0
"""The timeline of `--activation-offload-trace`: what it shows, that it nests, how it ends."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, OffloadEngine
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.config import OffloadConfig
from megatron.offload.stats import trace
from megatron.offload.stats.trace import COMPUTE, Tracer
from tests.support.full_disk import FULL_DISK, needs_full_disk, one_warning_about
from tests.support.models import settle
from tests.support.waiting import wait_until

LAYER = Scope(0, 1, "decoder.7", "mlp")


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a file that was closed."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def tracks(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The spans of each track, by the track's name."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of one track may lie within each other or apart; a viewer drops what overlaps."""
    open_until: list[float] = []
    for one in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= one["ts"]:
            open_until.pop()
        end = round(one["ts"] + one["dur"], 3)
        assert not open_until or end <= open_until[-1], one
        open_until.append(end)


def run_step(
    engine: OffloadEngine, size: int = 1000, after_backward: Callable[[], None] = lambda: None
) -> None:
    """A layer forward and backward, its bytes written and read; the graph lives to the end."""
    x = torch.randn(size, requires_grad=True)
    with engine.step():
        with engine.forward(LAYER) as save_order:
            y = (x * 2).exp().flip(0).exp()
            engine.capture(LAYER, [y], [x])
            total = y.sum()
            del y
        settle(engine)
        with engine.backward(save_order):
            total.backward(retain_graph=True)
        after_backward()
        del total


def test_writes_reads_waits_and_memory_of_each_step_are_shown(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    engine = make_engine(io="buffered", trace_file=file)

    def wait_for_spans() -> None:  # compute has the bytes before the tracer hears of it
        tracer = engine.tracer
        assert tracer is not None
        wait_until(
            lambda: sum(one.track == "read ssd" for one in tracer._spans) == 2, "no read is noted"
        )

    for _ in range(2):
        run_step(engine, after_backward=wait_for_spans)
    engine.close()
    engine.close()
    events = load(file)
    shown = tracks(events)
    assert [one["name"] for one in shown[COMPUTE]] == ["step 1", "step 2"]
    writes, reads = shown["write ssd"], shown["read ssd"]
    assert {one["name"] for one in writes + reads} == {"decoder.7 mlp, micro-batch 1"}
    assert len(writes) >= 2 and all(one["args"]["MiB"] == 0.004 for one in writes)
    for name, spans in shown.items():
        check_nesting(spans)
        steps = shown[COMPUTE]
        for one in spans:
            inside = [s for s in steps if s["ts"] <= one["ts"] <= s["ts"] + s["dur"]]
            assert inside, f"{name}: {one}"
    counted = {e["name"] for e in events if e["ph"] == "C"}
    assert counted == {"device memory", "on its way to the tiers", "on ssd"}


def test_transfers_side_by_side_are_in_lanes_of_their_own(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.json", 0, {}, dict)
    tracer.begin_step()
    now = time.perf_counter()
    tracer.span("write ssd", "first", now, now + 3)
    tracer.span("write ssd", "beside it", now + 1, now + 2)
    tracer.span("write ssd", "after both", now + 3, now + 4)
    tracer.end_step()
    tracer.close()
    shown = tracks(load(tmp_path / "t.json"))
    assert [one["name"] for one in shown["write ssd"]] == ["first", "after both"]
    assert [one["name"] for one in shown["write ssd (2)"]] == ["beside it"]


def test_only_the_first_steps_are_traced(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "NUM_STEPS", 2)
    file = tmp_path / "trace.json"
    engine = make_engine(trace_file=file)
    for _ in range(4):
        run_step(engine)
    assert engine.tracer is not None and not engine.tracer._spans
    engine.close()
    assert [one["name"] for one in tracks(load(file))[COMPUTE]] == ["step 1", "step 2"]


def test_ranks_have_files_of_their_own(offload_config: Any, tmp_path: Path) -> None:
    config = offload_config(trace_file=tmp_path / "trace.json")
    for rank in (0, 3):
        engine = OffloadEngine(config, rank=rank)
        run_step(engine)
        engine.close()
    for name, rank in (("trace.json", 0), ("trace-rank3.json", 3)):
        assert {event["pid"] for event in load(tmp_path / name)} == {rank}


def test_what_a_run_that_died_has_written_can_be_read(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    run_step(make_engine(trace_file=file))
    events = json.loads(file.read_text() + "]")  # as the format allows viewers to
    assert tracks(events)[COMPUTE][0]["name"] == "step 1"


def test_a_place_that_cannot_be_written_is_said_before_training(
    offload_config: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/t\.json cannot be written: No such"):
        OffloadEngine(offload_config(trace_file=tmp_path / "nowhere" / "t.json"))


@needs_full_disk
def test_a_disk_that_is_full_ends_the_trace_and_not_the_training(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(trace_file=tmp_path / "trace.json")
    assert engine.tracer is not None
    engine.tracer.path = FULL_DISK
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run_step(engine)
    engine.close()
    assert "No space left on device; it ends here" in one_warning_about("trace", caplog)


def test_without_offload_there_is_nothing_to_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give --activation-offload ssd, host, tiered or"):
        OffloadConfig(trace_file=tmp_path / "t.json")
