# SPDX-License-Identifier: Apache-2.0
"""What memory is made of, by `--activation-memory-report`: its names, sums, steps and file."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, OffloadEngine, Scope
from megatron.offload.activations import memory_report
from megatron.offload.activations.stats.memory_parts import (
    AHEAD,
    BETWEEN,
    HELD,
    KEPT,
    OUTSIDE,
    PARTS,
    RECOMPUTED,
    REPLAYED,
    REST,
    USED,
    WRITING,
    Moment,
    StepMemory,
    layer_and_part,
    load_steps,
    name_of,
)
from megatron.offload.commands.memory.command import explain_memory
from megatron.offload.config import OffloadConfig
from megatron.offload.device.cpu import CpuDevice
from tests.support.full_disk import FULL_DISK, needs_full_disk, one_warning_about
from tests.support.models import Double, settle
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import wait_until

LAYER = Scope(0, 1, "decoder.7", "mlp")
NEXT = Scope(0, 1, "decoder.8")
SIZE = 4000  # bytes of a thousand floats


class ToldDevice(CpuDevice):
    """A CPU that says of its memory what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_bytes = self.most_bytes = 100 * SIZE

    def allocated_bytes(self) -> int:
        return self.taken_bytes

    def peak_reader(self) -> Any:
        self.reset()
        return self

    def reset(self) -> None:
        self.most_bytes = self.taken_bytes

    def peak_bytes(self) -> int:
        return self.most_bytes

    def return_freed_memory(self) -> None:
        pass


@pytest.fixture
def device() -> ToldDevice:
    return ToldDevice()


@pytest.fixture
def engine(
    offload_config: Callable[..., OffloadConfig],
    device: ToldDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[OffloadEngine]:
    """One whose first step is sampled; storages of fewer than a thousand floats stay."""
    monkeypatch.setattr(memory_report, "NUM_UNSETTLED", 0)
    config = offload_config(memory_report_file=tmp_path / "m.jsonl", min_bytes=SIZE, io="buffered")
    engine = OffloadEngine(config, device)
    yield engine
    engine.close()


def leaf(size: int = 1000) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


def parts_now(engine: OffloadEngine) -> dict[str, int]:
    """What a sample has of saved activations, without what there is none of."""
    assert engine.sampler is not None
    engine.sampler.sample()
    parts = engine.sampler.moments[-1].parts
    return {name: size for name, size in parts.items() if size and name != REST}


class Sampled(Double):
    """Looks at memory while its backward has what it saved."""

    engine: OffloadEngine
    found: dict[str, int]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        Sampled.found = parts_now(Sampled.engine)
        return gradient * 2


# -- What a sample says ---------------------------------------------------------------------------


def test_what_moves_is_named_after_what_becomes_of_it(engine: OffloadEngine) -> None:
    x, hold = leaf(), threading.Event()
    Sampled.engine = engine
    with engine.step():
        with engine.forward(Scope()) as save_order:
            y: torch.Tensor = Sampled.apply(x + 1)
            engine.dispatcher.submit(lambda: hold.wait(10))
            engine.capture(LAYER, [y], [x])
            assert parts_now(engine) == {WRITING: SIZE}
            hold.set()
            settle(engine)
            assert parts_now(engine) == {}
        with engine.backward(save_order):
            engine.prefetch(save_order, opens_at_once=True)
            engine.dispatcher.drain()
            settle(engine)
            wait_until(lambda: parts_now(engine) == {AHEAD: SIZE}, "nothing was read ahead")
            y.sum().backward()
            # The thread that has read it may hold it for a moment more.
            wait_until(lambda: parts_now(engine) == {}, "memory is in use behind backward")
    assert Sampled.found == {USED: SIZE}


def test_what_was_written_and_somebody_holds_is_named(engine: OffloadEngine) -> None:
    x = leaf()
    with engine.step():
        held = x.exp()
        y = held.exp()
        engine.capture(LAYER, [y], [x])
        settle(engine)
        assert parts_now(engine) == {HELD: 2 * SIZE}
        del held
        assert parts_now(engine) == {HELD: SIZE}
        del y


def test_what_stays_is_named_after_its_layer(engine: OffloadEngine) -> None:
    x = leaf(100)
    with engine.step():
        with engine.forward(Scope()):
            y = x.exp().exp()
            engine.capture(LAYER, [y], [x])
            engine.capture(LAYER, [y], [x])  # what is counted counts once
            assert parts_now(engine) == {KEPT: 800}
            assert engine.sampler is not None
            loss = y.sin().sin()
            engine.sampler.note_outside([loss])
            assert parts_now(engine) == {KEPT: 800, OUTSIDE: 400}
            with engine.saved_tensors_hooks(), engine.within(NEXT):
                z = loss.exp()
            with engine.saved_tensors_hooks(), engine.within(Scope(layer="decoder.8.after")):
                z = z.exp()
            assert parts_now(engine) == {KEPT: 1200, OUTSIDE: 800}
        del y, loss, z
        assert parts_now(engine) == {}


def test_what_a_recomputed_layer_saves_in_backward_is_named(engine: OffloadEngine) -> None:
    x = leaf(100)
    with engine.step():
        assert engine.sampler is not None
        y = x.exp().exp()
        engine.sampler.note_recomputed(LAYER, [y])
        assert parts_now(engine) == {RECOMPUTED: 800}
        y.sum().backward()
        del y
        assert parts_now(engine) == {}


def test_the_parts_are_all_that_the_device_has_above_the_beginning(
    engine: OffloadEngine, device: ToldDevice, tmp_path: Path
) -> None:
    x = leaf(100)
    with engine.step(), engine.forward(Scope()):
        for taken_bytes in (2000, 5000, 3000):
            device.taken_bytes = 100 * SIZE + taken_bytes
            device.most_bytes = max(device.most_bytes, device.taken_bytes + 50)
            y = x.exp()
            engine.capture(LAYER, [y], [x])
            assert engine.sampler is not None
            assert engine.sampler.moments[-1].num_bytes == taken_bytes
        device.taken_bytes = 100 * SIZE - 10  # less than there was
        del y
        engine.sampler.sample()
        assert engine.sampler.moments[-1].parts[REST] == -10
    (step,) = load_steps(tmp_path / "m.jsonl")
    assert step.peak_bytes == 5050 == sum(step.peak_parts.values())
    assert step.peak.num_bytes == 5000 and step.peak_parts[BETWEEN] == 50
    assert step.peak.layers == {"decoder.7 mlp": 400} and step.peak_parts[KEPT] == 400
    assert (step.peak.phase, step.peak.where) == ("forward", "decoder.7 mlp")
    assert step.peak.time_s in [one.time_s for one in step.moments if one.num_bytes == 5000]
    times = [one.time_s for one in step.moments]
    assert times == sorted(times)


def test_names_of_places() -> None:
    names = [name_of(one) for one in (LAYER, NEXT, Scope())]
    assert names == ["decoder.7 mlp", "decoder.8", "outside of layers"]
    assert [layer_and_part(name) for name in names] == [
        ("decoder.7", "mlp"),
        ("decoder.8", ""),
        ("outside of layers", ""),
    ]


# -- Which steps, and the file --------------------------------------------------------------------


def run_step(engine: OffloadEngine) -> bool:
    """A layer forward and backward; whether memory was sampled."""
    x = leaf()
    with engine.step():
        is_sampled = engine.sampler is not None
        with engine.forward(LAYER) as save_order:
            y = (x * 2).exp().flip(0).exp()
            engine.capture(LAYER, [y], [x])
            total = y.sum()
            del y
        settle(engine)
        with engine.backward(save_order):
            total.backward()
    assert engine.sampler is None
    return is_sampled


def test_three_settled_steps_are_sampled_and_no_other(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    file = tmp_path / "m.jsonl"
    engine = make_engine(memory_report_file=file, io="buffered")
    assert [run_step(engine) for _ in range(7)] == [False] * 2 + [True] * 3 + [False] * 2
    assert engine._step.observer is None
    steps = load_steps(file)
    assert [one.step for one in steps] == [3, 4, 5]
    for one in steps:
        assert {moment.phase for moment in one.moments} == {"", "forward", "backward"}
        assert one.reusable_bytes is None and one.plan == one.profile == ""


class ReservingDevice(SimulatedDevice):
    """Says that its allocator reserves 100 bytes, of which the step took 70 at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.num_resets = 0

    def allocated_bytes(self) -> int:
        return 60

    def reusable_bytes(self) -> int:
        return 40

    def peak_reader(self) -> Any:
        return self

    def reset(self) -> None:
        self.num_resets += 1

    def peak_bytes(self) -> int:
        return 70 if self.num_resets else 99


def test_what_the_allocator_reserves_beyond_a_steps_peak_is_counted_and_written(
    offload_config: Callable[..., OffloadConfig], tmp_path: Path
) -> None:
    file = tmp_path / "m.jsonl"
    engine = OffloadEngine(offload_config(memory_report_file=file), ReservingDevice())
    try:
        for _ in range(3):
            run_step(engine)
            counted = engine.statistics
            assert (counted.reserved_bytes, counted.fragmented_bytes) == (100, 30)
        (one,) = load_steps(file)
        assert (one.reusable_bytes, one.reserved_bytes) == (40, 100)
    finally:
        engine.close()


def test_a_step_is_the_same_whether_it_is_sampled(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    def gradients(engine: OffloadEngine) -> list[torch.Tensor]:
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            x = leaf()
            with engine.step():
                with engine.forward(LAYER) as save_order:
                    y = (x * 2).exp().sin()
                    engine.capture(LAYER, [y], [x])
                settle(engine)
                with engine.backward(save_order):
                    y.sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    sampled = gradients(make_engine(memory_report_file=tmp_path / "m.jsonl"))
    assert len(load_steps(tmp_path / "m.jsonl")) == 2
    for one, other in zip(sampled, gradients(make_engine()), strict=True):
        assert torch.equal(one, other)


def test_what_replay_computes_again_is_written(
    make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    engine = make_engine(memory_report_file=tmp_path / "m.jsonl", replay="on")
    for _ in range(3):
        with engine.step(), engine.saved_tensors_hooks():
            x, weight = leaf(1000), leaf(1000)
            (torch.sin(x * weight) * x.cumsum(0)).sum().backward()
    (step,) = load_steps(tmp_path / "m.jsonl")
    assert step.replayed_bytes == engine.statistics.replayed_bytes > 0
    assert step.unreplayed == engine.statistics.unreplayed_by_operation != {}


def test_what_is_replayed_is_named(
    offload_config: Callable[..., OffloadConfig],
    device: ToldDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`silu` saves what it was given; backward computes its result of that again."""
    monkeypatch.setattr(memory_report, "NUM_UNSETTLED", 0)
    settings = {"memory_report_file": tmp_path / "m.jsonl", "min_bytes": SIZE, "io": "buffered"}
    engine = OffloadEngine(offload_config(replay="on", **settings), device)
    x = leaf()
    Sampled.engine = engine
    with engine.step():
        with engine.forward(LAYER) as save_order:
            y: torch.Tensor = Sampled.apply(torch.nn.functional.silu(x + 1))
            engine.capture(LAYER, [y], [x])
            assert engine.statistics.replayed_bytes == SIZE
        settle(engine)
        with engine.backward(save_order):
            assert parts_now(engine) == {}
            y.sum().backward()
    assert Sampled.found.pop(REPLAYED) == SIZE
    assert sum(Sampled.found.values()) == SIZE  # of what it is computed, for `silu`
    engine.close()


def test_a_step_that_somebody_measures_is_not_sampled(engine: OffloadEngine) -> None:
    class Somebody:
        def moves(self, scope: Scope, num_bytes: int) -> None: ...

        def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None: ...

    somebody = Somebody()
    engine.observe(somebody)
    assert not run_step(engine)
    assert engine._step.observer is somebody
    engine.observe(None)
    assert run_step(engine)


def test_steps_before_the_first_plan_are_not_sampled(engine: OffloadEngine, tmp_path: Path) -> None:
    assert engine.memory_report is not None
    engine.memory_report.planned = lambda: None
    assert not run_step(engine)
    engine.memory_report.planned = lambda: ("a plan", "a profile")
    assert run_step(engine)
    (step,) = load_steps(tmp_path / "m.jsonl")
    assert (step.step, step.plan, step.profile) == (2, "a plan", "a profile")


def test_ranks_have_files_of_their_own(offload_config: Any, tmp_path: Path) -> None:
    engine = OffloadEngine(offload_config(memory_report_file=tmp_path / "m.jsonl"), rank=3)
    for _ in range(3):
        run_step(engine)
    engine.close()
    assert [one.rank for one in load_steps(tmp_path / "m-rank3.jsonl")] == [3]
    assert not (tmp_path / "m.jsonl").exists()


def test_a_place_that_cannot_be_written_is_said_before_training(
    offload_config: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/m\.jsonl cannot be written: No such"):
        OffloadEngine(offload_config(memory_report_file=tmp_path / "nowhere" / "m.jsonl"))


@needs_full_disk
def test_a_disk_that_is_full_ends_the_report_and_not_the_training(
    engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.memory_report is not None
    engine.memory_report.path = FULL_DISK
    with caplog.at_level(logging.WARNING):
        assert [run_step(engine) for _ in range(3)] == [True, False, False]
    assert "No space left on device; it ends here" in one_warning_about("memory report", caplog)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for text in ("hello\n", "{}\n", '{"version": 1, "step": 3}\n'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="is not a memory report"):
            load_steps(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigurationError, match="is not a memory report"):
        load_steps(path)
    path.write_text(json.dumps({"version": 99}) + "\n")
    with pytest.raises(ConfigurationError, match="has format 99, this release reads 1"):
        load_steps(path)


def test_each_part_is_drawn(tmp_path: Path) -> None:
    moments = tuple(Moment(float(n), "", "", dict.fromkeys(PARTS, n << 20)) for n in (1, 2))
    step = StepMemory(0, 1, moments[1].num_bytes, None, moments[1], moments)
    (tmp_path / "m.jsonl").write_text(step.to_json() + "\n")
    text = explain_memory(tmp_path / "m.jsonl", tmp_path / "m.svg")
    drawn = (tmp_path / "m.svg").read_text()
    assert all(part in text and f"<!-- {part} -->" in drawn for part in PARTS)


def test_a_step_reads_as_it_was_written(engine: OffloadEngine, tmp_path: Path) -> None:
    assert run_step(engine)
    text = (tmp_path / "m.jsonl").read_text()
    (step,) = load_steps(tmp_path / "m.jsonl")
    assert isinstance(step, StepMemory) and step.to_json() + "\n" == text
