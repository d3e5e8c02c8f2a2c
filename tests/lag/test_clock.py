# SPDX-License-Identifier: Apache-2.0
"""Seconds of compute on a device that runs behind, against what it recorded.

The accelerator's own spans are the truth, not the lengths that were asked for. On a machine that is
busy its streams have gaps of their own, so a measurement may be taken again; a clock that tells the
host's seconds is wrong in every one of them, by a factor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from check.timed_model import Part

from megatron.offload import OffloadConfig, OffloadEngine, Scope, offload_activations
from megatron.offload.activations import engine as engine_module
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule, Span

FORWARD_S = 0.02  # of a layer; its backward takes twice as long
NUM_LAYERS = 5
NUM_WORDS = 1 << 17
LAYER_BYTES = 8 * NUM_WORDS
HIDDEN = {"all": 8.0, "half": 0.5, "a tenth": 0.1}  # of a layer's copy behind its forward
ATTEMPTS = 8
POSITION = PipelinePosition(1, 0, 1, 0)


class Work:
    """What the layers share, see `check.timed_model.Work`."""

    def __init__(
        self, lag: LagModule, num_words: int = NUM_WORDS, forward_s: float = FORWARD_S
    ) -> None:
        self.lag = lag
        self.num_words = num_words
        self.forward_s = forward_s
        self.number = 0
        self.num_wrong = torch.zeros((), dtype=torch.int64, device="lag")


class Layer(torch.nn.Module):
    """One of a model for the door."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="lag"))
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Part.apply(x, self.work)  # type: ignore[no-any-return, no-untyped-call]


class Model(torch.nn.Module):
    """Layers behind a parameter."""

    def __init__(self, work: Work, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(8, device="lag"))
        self.layers = torch.nn.ModuleList(Layer(work) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.fixture(autouse=True)
def _accelerator(accelerator: Lag, lag: LagModule, monkeypatch: pytest.MonkeyPatch) -> None:
    lag.set_poison(False)
    # What is in flight is bounded by two layers, as with layers of the usual size.
    monkeypatch.setattr(engine_module, "DEFAULT_INFLIGHT_BYTES", 4096)


class Seen(NamedTuple):
    """A measured run: what was told, and what the accelerator recorded of its last step."""

    profile: StageProfile
    steps: Sequence[Sequence[Span]]  # what the stream that computes did in each measured step
    waited_s: Sequence[float]

    def layers_s(self, kind: int) -> list[float]:
        """Of each layer what its forward (0) or backward (1) took, at the least."""
        of_steps = []
        for spans in self.steps:
            slept = [s.ended_s - s.began_s for s in spans if s.kind == "sleep"]
            assert len(slept) == 2 * NUM_LAYERS
            of_steps.append(slept[:NUM_LAYERS] if kind == 0 else slept[: NUM_LAYERS - 1 : -1])
        return [min(column) for column in zip(*of_steps, strict=True)]

    @property
    def idle_s(self) -> list[float]:
        """In each step, the stream that computes had nothing to do between its first and last."""
        return [
            spans[-1].ended_s - spans[0].began_s - sum(s.ended_s - s.began_s for s in spans)
            for spans in self.steps
        ]


def measured(
    accelerator: Lag,
    lag: LagModule,
    hidden: float,
    forward_s: float = FORWARD_S,
    *,
    by_context: bool = False,
) -> Seen:
    """Two steps in detail, after one, with all that is saved on the host."""
    bytes_per_s = hidden * LAYER_BYTES / forward_s
    lag.set_bandwidth(bytes_per_s, bytes_per_s)
    device, work = accelerator.open(), Work(lag, forward_s=forward_s)
    config = OffloadConfig(mode="host", min_bytes=4096, host_budget=64 << 20)
    engine = OffloadEngine(config, device)
    meter = StepMeter(config, engine, device)
    compute = device.current_stream().stream_id
    steps, waited_s = [], []
    try:
        for detailed in (False, True, True):
            with lag.recorded() as spans:
                run_step(meter, engine, work, detailed=detailed, by_context=by_context)
                lag.synchronize()
            if detailed:
                steps.append([s for s in spans if s.stream == compute and s.kind != "copy"])
                (known,) = meter.read()[-1:]
                assert known.stall_s is not None
                waited_s.append(known.stall_s)
        profile = meter.profile(POSITION, recomputes=True, previous=None)
    finally:
        engine.close()
    assert not int(work.num_wrong)
    return Seen(profile, steps, waited_s)


def run_step(
    meter: StepMeter, engine: OffloadEngine, work: Work, *, detailed: bool, by_context: bool
) -> None:
    profiler = meter.profiler
    with meter.step(detailed=detailed), engine.step():
        with (
            profiler.forward(0, 0),
            engine.forward(Scope()) as order,
            engine.saved_tensors_hooks() if by_context else contextlib.nullcontext(),
        ):
            x = torch.ones(8, device="lag", requires_grad=True) * 1
            for number in range(NUM_LAYERS):
                scope = Scope(layer=f"decoder.{number + 1}")
                profiler.begin_layer(scope, [x], recomputes=False)
                with engine.within(scope):
                    y: torch.Tensor = Part.apply(x, work)  # type: ignore[no-untyped-call]
                if not by_context:
                    engine.capture(scope, [y], [x])
                profiler.end_layer([y])
                x = y
        with profiler.backward(0, 0), engine.backward(order):
            x.sum().backward()


def off(told: float, truth: float) -> float:
    return abs(told - truth) / truth


def until_near(attempt: Callable[[], float], bound: float) -> None:
    """An attempt gives how far off it is; the machine may be busy in some."""
    errors = []
    for _ in range(ATTEMPTS):
        errors.append(attempt())
        if errors[-1] <= bound:
            return
    raise AssertionError(f"off by {errors}, not at most {bound}")


@pytest.mark.slow
@pytest.mark.parametrize("hides", HIDDEN)
def test_a_profile_has_the_seconds_of_each_layer_whatever_the_link(
    hides: str, accelerator: Lag, lag: LagModule
) -> None:
    def attempt() -> float:
        seen = measured(accelerator, lag, HIDDEN[hides])
        layers = [one for one in seen.profile.layers if one.name.startswith("decoder.")]
        told = [[one.forward_s for one in layers], [one.backward_s for one in layers]]
        return max(
            off(*pair) for k in (0, 1) for pair in zip(told[k], seen.layers_s(k), strict=True)
        )

    until_near(attempt, 0.05)


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("by_context", [True, False])
def test_a_profile_has_no_seconds_of_hooks_that_the_device_waits_for(
    by_context: bool, accelerator: Lag, lag: LagModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a wait for room the device has nothing to do until the hooks have ended."""
    find_move = SavedTensorHooks.find_move

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(3 * FORWARD_S)
        return find_move(*args, **kwargs)

    monkeypatch.setattr(SavedTensorHooks, "find_move", slow)

    def attempt() -> float:
        seen = measured(accelerator, lag, HIDDEN["a tenth"], by_context=by_context)
        layers = [one for one in seen.profile.layers if one.name.startswith("decoder.")]
        told = [one.forward_s for one in layers]
        return max(off(*pair) for pair in zip(told, seen.layers_s(0), strict=True))

    until_near(attempt, 0.1)


# After each wait the host queues what is next: of the shorter waits that would be too large a part.
@pytest.mark.slow
@pytest.mark.parametrize(("hides", "forward_s"), [("half", 0.1), ("a tenth", 0.02)])
def test_compute_waited_as_long_as_its_stream_was_idle(
    hides: str, forward_s: float, accelerator: Lag, lag: LagModule
) -> None:
    def attempt() -> float:
        seen = measured(accelerator, lag, HIDDEN[hides], forward_s)
        return max(off(*pair) for pair in zip(seen.waited_s, seen.idle_s, strict=True))

    until_near(attempt, 0.05)


def test_what_hides_is_no_wait_though_the_host_waited(accelerator: Lag, lag: LagModule) -> None:
    def attempt() -> float:
        seen = measured(accelerator, lag, HIDDEN["all"])
        too_long_s = max(told - idle for told, idle in zip(seen.waited_s, seen.idle_s, strict=True))
        return too_long_s / (3 * FORWARD_S * NUM_LAYERS)

    until_near(attempt, 0.02)


# -- Steps ----------------------------------------------------------------------------------------

OPTIMIZER_S = 0.03


class Trained(NamedTuple):
    """Steps of a loop that never waits for the device."""

    told: list[dict[str, Any]]  # statistics at the end of each step
    spans: list[Span]

    def step_starts_s(self, num_layers: int = NUM_LAYERS) -> list[float]:
        """When each step's first layer began."""
        sleeps = [one for one in self.spans if one.kind == "sleep"]
        return [one.began_s for one in sleeps[:: 2 * num_layers + 1]]


def train(
    model: Model, lag: LagModule, num_steps: int, statistics: Callable[[], Any] = dict
) -> Trained:
    """The optimizer takes its time, too."""
    told = []
    with lag.recorded() as spans:
        for _ in range(num_steps):
            model(torch.ones(8, device="lag")).backward()
            lag.sleep(OPTIMIZER_S)
            told.append(dict(statistics()))
        lag.synchronize()
    return Trained(told, spans)


@pytest.mark.slow(but="off")
@pytest.mark.parametrize("mode", ["off", "host"])
def test_the_steps_of_a_metrics_file_take_as_long_as_the_device(
    mode: str, lag: LagModule, tmp_path: Path
) -> None:
    num_steps = 6
    lag.set_bandwidth(3200 << 20, 3200 << 20)
    file = tmp_path / "metrics.jsonl"
    model = Model(Work(lag))
    handle = offload_activations(
        model,
        mode=mode,  # type: ignore[arg-type]
        layers=[Layer],
        min_bytes=4096,
        host_budget=64 << 20,
        metrics_file=file,
    )
    with handle:
        trained = train(model, lag, num_steps)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert {line["loss"] for line in lines} == {8.0}
    starts_s = trained.step_starts_s()
    # From the second step on: in the first one much is opened before a layer is queued. The last
    # one ends with its backward.
    told_s = sum(line["step_time_s"] for line in lines[1:-1])
    assert off(told_s, starts_s[-1] - starts_s[1]) <= 0.02


def test_nothing_waits_for_the_device_to_write_a_metrics_file(
    lag: LagModule, accelerator: Lag, tmp_path: Path
) -> None:
    """All steps are queued while the device does nothing; their lines come when it has run."""
    file = tmp_path / "metrics.jsonl"
    model = Model(Work(lag))
    with offload_activations(model, mode="off", layers=[Layer], metrics_file=file):
        with lag.held(lag.current_stream()):
            for _ in range(3):
                model(torch.ones(8, device="lag")).backward()
            assert file.read_text() == ""
        for _ in range(2):  # the third step ends where the fourth begins
            lag.synchronize()
            model(torch.ones(8, device="lag")).backward()
        assert len(file.read_text().splitlines()) >= 3
    assert len(file.read_text().splitlines()) == 5


# -- A plan ---------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The plans that were followed, in order."""
    from megatron.offload.activations.placement.plan_policy import PlannedPolicy

    followed: list[Any] = []
    follow = PlannedPolicy.follow

    def note(self: PlannedPolicy, plan: Any) -> None:
        followed.append(plan)
        follow(self, plan)

    monkeypatch.setattr(PlannedPolicy, "follow", note)
    yield followed


@pytest.mark.slow
def test_auto_recomputes_nothing_for_a_link_that_hides_all(
    lag: LagModule, plans: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    num_layers, budget_bytes, num_words = 12, 44 << 20, 1 << 20
    lag.set_bandwidth(3200 << 20, 3200 << 20)
    model = Model(Work(lag, num_words), num_layers)
    caplog.set_level(logging.INFO)
    handle = offload_activations(
        model,
        mode="auto",
        layers=[Layer],
        min_bytes=4096,
        host_budget=256 << 20,
        memory_budget_bytes=budget_bytes,
    )
    with handle:
        trained = train(model, lag, 7, lambda: handle.statistics)
        planned = plans[0]
    assert {part.placement.value for part in planned.parts} <= {"keep", "host"}
    assert trained.told[-1]["recomputed_layers"] == 0
    starts_s = trained.step_starts_s(num_layers)
    # What steps take is told one later. The plan was made before the fourth.
    told_s = [one["measured_step_s"] for one in trained.told[-2:]]
    truth_s = [later - earlier for earlier, later in itertools.pairwise(starts_s[3:])]
    assert off(sum(told_s) / 2, sum(truth_s) / len(truth_s)) <= 0.1


# -- A line ---------------------------------------------------------------------------------------


def lines_of_a_run(
    lag: LagModule, hidden: float, caplog: pytest.LogCaptureFixture
) -> tuple[list[str], dict[str, Any]]:
    """What is said of copies in some steps, and the counters at the end."""
    num_words = 1 << 20  # as much as is handed over at once
    bytes_per_s = hidden * 8 * num_words / FORWARD_S
    lag.set_bandwidth(bytes_per_s, bytes_per_s)
    caplog.clear()
    model = Model(Work(lag, num_words))
    handle = offload_activations(
        model, mode="host", layers=[Layer], min_bytes=4096, host_budget=256 << 20
    )
    with handle:
        train(model, lag, 8)
        model(torch.ones(8, device="lag")).backward()
        statistics = dict(handle.statistics)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    return [one for one in said if "stood still" in one], statistics


@pytest.mark.slow
def test_a_link_that_hides_little_is_told_of_once_and_one_that_hides_all_is_not(
    lag: LagModule, caplog: pytest.LogCaptureFixture
) -> None:
    said, statistics = lines_of_a_run(lag, 0.25, caplog)
    assert len(said) == 1 and "the device stood still" in said[0]
    assert statistics["stall_s"] > FORWARD_S and statistics["write_wait_s"] > FORWARD_S
    assert lines_of_a_run(lag, 8.0, caplog)[0] == []


# -- A timeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hides", [0.25, 8.0])
def test_a_timeline_shows_the_waits_of_the_device_and_not_those_of_the_host(
    hides: float, lag: LagModule, tmp_path: Path
) -> None:
    num_words = 1 << 20
    bytes_per_s = hides * 8 * num_words / FORWARD_S
    lag.set_bandwidth(bytes_per_s, bytes_per_s)
    file = tmp_path / "trace.json"
    model = Model(work := Work(lag, num_words))
    handle = offload_activations(
        model,
        mode="host",
        layers=[Layer],
        min_bytes=4096,
        host_budget=256 << 20,
        trace_file=file,
    )
    with handle:
        train(model, lag, 2)
        statistics = dict(handle.statistics)
    assert not int(work.num_wrong)
    spans = [one for one in json.loads(file.read_text()) if one.get("ph") == "X"]
    second_us = max(one["ts"] for one in spans if one["name"] == "step 2")
    waits = [
        one
        for one in spans
        if one["ts"] >= second_us
        and (one["name"].startswith("read of") or one["name"] == "wait for room to write")
        and "scope" not in one.get("args", {})
    ]
    waited_s = sum(one["dur"] for one in waits) / 1e6
    told_s = statistics["stall_s"] + statistics["write_wait_s"]
    assert waited_s == pytest.approx(told_s, abs=0.005)
    assert (waited_s > 2 * FORWARD_S) == (hides < 1)
