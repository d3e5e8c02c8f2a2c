# SPDX-License-Identifier: Apache-2.0
"""Job: some steps of a Llama trained in one way; seconds of device time, memory, throughput.

`parts.py` lists it for the parts stack, auto, full8b, lora, timeline and rok.

Note [What is measured]
After the first steps the host waits for the device once, and never again until the last step: it
runs ahead as far as the way lets it, as in a training. Timestamps in the stream of compute stand at
the beginning of each step, of its backward pass and of the optimizer's step; a step lasts until the
next one begins. They are read when all is done. Peaks are torch's own, since the end of the first
steps; the base is what is allocated before a step: weights, gradients and states.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from check.gpu_day.link import finish
from check.gpu_day.models import add_adapters, make_model, make_tokens
from check.gpu_day.settings import Settings, Shape
from check.gpu_day.spans import device_spans
from check.gpu_day.ways import Way, move_frozen, move_states, prepare
from megatron.offload.device.open import open_device
from megatron.offload.machine import vector_math

Note = Callable[[dict[str, Any]], None]
_WARM_STEPS = 3
_MOST_STEPS_OF_PLANS = 40
_SETTLED = 10  # steps of `auto` without a new plan: after 8 it plans again, if only once
_LONG_S = 5.0  # where the second step takes longer, it is the last of them: memory is there by then
_MARKS = 3  # timestamps of a step


class Said(logging.Handler):
    """What the package says from INFO on: when it plans and why."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("megatron.offload")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Trainee:
    """A model, its optimizer and the way in which they train.

    Args:
        way: its name.
        shape: of the model.
        states: where the optimizer's states are.
        budget_bytes: of `auto`.
        frozen: where frozen layers are, and adapters train; None: the model itself trains.
    """

    def __init__(
        self,
        way: str,
        shape: Shape,
        settings: Settings,
        states: str,
        budget_bytes: int | None,
        frozen: str | None = None,
    ) -> None:
        vector_math.first_call()  # as offload's door does: all ways are to have the same bits
        self.shape = shape
        self.model = make_model(shape, settings.device)
        self.frozen = None
        if frozen is not None:
            self.model = add_adapters(self.model, shape)
        self.way: Way = prepare(way, self.model, shape, settings, budget_bytes)
        self._call = self.model if self.way.compiled is None else self.way.compiled
        if frozen is not None:
            self.frozen = move_frozen(frozen, self.model, settings)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.states = move_states(states, self.optimizer, settings)
        self.device = open_device(settings.device)
        self._tokens = make_tokens(shape, 4, settings.device)
        self._num_steps = 0
        self._least_steps = 2  # the first one compiles kernels, and no states are away before it
        if self.way.compiled is not None:
            self._least_steps = _WARM_STEPS  # the first one compiles
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Forward, backward and the optimizer's step; waits for nothing."""
        tokens = self._tokens[self._num_steps % len(self._tokens)]
        self._num_steps += 1
        self.marks.append(self.device.timestamp())
        with self.way.context():
            loss = self._call(input_ids=tokens, labels=tokens).loss
        self.marks.append(self.device.timestamp())
        loss.backward()
        self.marks.append(self.device.timestamp())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients are no activations
        self.losses.append(loss.detach())

    def settle(self) -> float:
        """Runs the first steps, with `auto` until it has planned; seconds of the last one."""
        seconds, last_plan = 0.0, 0
        num_plans: Any = 0
        for number in range(1, _MOST_STEPS_OF_PLANS + 1):
            began_s = time.perf_counter()
            self.step()
            finish(self.device)
            seconds = time.perf_counter() - began_s
            found = self.way.handle.statistics if self.way.handle is not None else {}
            plans = found.get("plans")
            if plans != num_plans:
                num_plans, last_plan = plans, number
            is_planned = plans is None or (plans > 0 and number - last_plan >= _SETTLED)
            enough = _WARM_STEPS if seconds <= _LONG_S else self._least_steps
            if number >= enough and is_planned:
                break
        return seconds

    def close(self) -> None:
        """Gives back what was opened; states that are away do not come back to a full device."""
        if self.way.handle is not None:
            self.way.handle.close()
        if self.states is not None:
            self.states.close(restore=False)
        if self.frozen is not None:
            self.frozen.close(restore=False)


def train(
    settings: Settings,
    note: Note,
    *,
    way: str,
    shape: Shape,
    num_steps: int,
    seconds: float,
    states: str = "device",
    budget_bytes: int | None = None,
    frozen: str | None = None,
    shows_spans: bool = False,
    limits_memory: bool = False,
) -> dict[str, Any]:
    """Trains; see Note [What is measured].

    Args:
        way: see `ways.py`.
        shape: of the model.
        num_steps: that are measured.
        seconds: for them: fewer steps, at least one, where they would take longer.
        states: where the optimizer's are: device, host, or cpu with the step there.
        budget_bytes: of `auto`.
        frozen: where frozen layers are, see `move_frozen`; None: the whole model trains.
        shows_spans: one more step runs under torch's profiler.
        limits_memory: the measured steps get no more memory than the base and the budget, what
            torch's allocator holds for reuse included.
    """
    began_s = time.perf_counter()
    said = Said()
    trainee = Trainee(way, shape, settings, states, budget_bytes, frozen)
    found: dict[str, Any] = {
        "way": way,
        "states": states,
        "frozen": frozen,
        "budget_bytes": budget_bytes,
        "shape": vars(shape) | {"layer_bytes": shape.layer_bytes, "step_flops": shape.step_flops},
    }
    finish(trainee.device)
    found["made_s"] = time.perf_counter() - began_s
    last_s = trainee.settle()
    found["first_steps"] = len(trainee.losses)
    note(found)
    if limits_memory and budget_bytes is not None:
        found["limit_bytes"] = _limit_memory(trainee.device, settings, budget_bytes)
    count = max(1, min(num_steps, int(seconds / max(last_s, 1e-6))))
    found |= measure(trainee, settings, count)
    note(found)
    if shows_spans:
        found["spans"] = device_spans(trainee.step, settings)
    found |= _of_handles(trainee) | {"said": said.lines}
    trainee.close()
    return found


def measure(trainee: Trainee, settings: Settings, num_steps: int) -> dict[str, Any]:
    """Runs steps without waiting for the device; what they took, and the most memory."""
    device = trainee.device
    module = None if device.is_host else torch.get_device_module(settings.device)
    finish(device)
    base_bytes = device.allocated_bytes()
    retries = _retries(module)
    peak = device.peak_reader()
    peak.reset()
    if module is not None:
        module.reset_peak_memory_stats(settings.device)
    trainee.marks.clear()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        trainee.step()
    launched_s = time.perf_counter() - began_s
    trainee.marks.append(device.timestamp())
    finish(device)
    wall_s = time.perf_counter() - began_s
    marks = trainee.marks
    spans = [device.seconds_between(marks[n], marks[n + 1]) for n in range(len(marks) - 1)]
    steps = [sum(spans[n : n + _MARKS]) for n in range(0, len(spans), _MARKS)]
    step_s = statistics.median(steps)
    found = {
        "steps_s": steps,
        "step_s": step_s,
        "forward_s": statistics.median(spans[0::_MARKS]),
        "backward_s": statistics.median(spans[1::_MARKS]),
        "optimizer_s": statistics.median(spans[2::_MARKS]),
        "launched_s": launched_s / num_steps,
        "wall_s": wall_s / num_steps,
        "tokens_per_s": trainee.shape.tokens / step_s,
        "TFLOP_per_s": trainee.shape.step_flops / step_s / 1e12,
        "base_bytes": base_bytes,
        "peak_bytes": peak.peak_bytes(),
        "losses": [float(loss) for loss in trainee.losses],
    }
    if module is not None:
        found["reserved_bytes"] = module.max_memory_reserved(settings.device)
        found["alloc_retries"] = _retries(module) - retries
    return found


def _limit_memory(device: Any, settings: Settings, budget_bytes: int) -> int:
    """Has torch's allocator take no more than what is there now and a budget; its bytes."""
    finish(device)
    limit_bytes = int(device.allocated_bytes()) + budget_bytes
    if settings.on_gpu:
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(settings.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, settings.device)
    return limit_bytes


def _retries(module: Any) -> int:
    return 0 if module is None else int(module.memory_stats().get("num_alloc_retries", 0))


def _of_handles(trainee: Trainee) -> dict[str, Any]:
    """What our handles say of the last step and of the run."""
    found: dict[str, Any] = {}
    if (handle := trainee.way.handle) is not None:
        found["statistics"] = dict(handle.statistics)
        found["summary"] = handle.summary()
        if found["statistics"].get("plans"):
            found["report"] = handle.report()
    if trainee.states is not None:
        found["states_report"] = trainee.states.report()
    if trainee.frozen is not None:
        found["frozen_statistics"] = dict(trainee.frozen.statistics)
    return found
