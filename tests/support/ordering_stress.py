# SPDX-License-Identifier: Apache-2.0
"""Trains on the test accelerator while its streams lag, and compares bits: `OrderingStress`.

The model has what the ways to and from the tiers tell apart: parts on a side stream, masks that
move as bits and are used on both streams, views, parts of storages that move as copies. Three
micro-batches overlap as in a pipeline and add up their gradients; two are captured layer by layer,
one by hooks. Before each forward and backward pass either compute is held back or the copies are,
so that what forgets to wait for the other comes too early; on top of that every kernel and copy is
late by a random time, in one step the kernels more, in the other the copies. Drives are slow.

`tests/ordering.py` runs it many times, also with wrong waits (`ordering_mistakes.py`).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.activations.transfer import write_batch
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.sizes import MIB
from megatron.offload.tiers import ssd as ssd_tier
from megatron.offload.tiers.staging import StagingPool
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform

# Not that on which new threads stand.
DEVICE = "lag:1"
MODES: dict[str, dict[str, Any]] = {
    "ssd": {"mode": "ssd", "pinned_bytes": 0, "threads": 2},
    "ssd, pinned": {"mode": "ssd", "pinned_bytes": 64 * MIB, "threads": 2},
    "host": {"mode": "host", "host_budget": 64 * MIB},
    "tiered": {"mode": "tiered", "host_budget": MIB // 2, "pinned_bytes": 0, "threads": 2},
    "tiered, pinned": {"mode": "tiered", "host_budget": MIB // 2, "pinned_bytes": MIB // 2},
}
_HIDDEN, _NUM_LAYERS, _TOKENS = 32, 3, 96
_NUM_STEPS = 2
_PIECE_BYTES = 4 << 10  # of staging buffers: large storages take several
_ENOUGH_BYTES = 4 << 10  # what is handed over while a layer runs on, as in a large one
_SCHEDULE = ("forward 0", "forward 1", "backward 0", "forward 2", "backward 1", "backward 2")
_BY_HOOKS = "1"  # the micro-batch whose saved tensors are taken by hooks
_LATE_S = 0.025
_UNASKED_S = 0.1  # without a wait for it: longer than a host is slow
_WRITE_BYTES_PER_S = 20e6  # so that what drives have not got yet is asked for
# Microseconds of a kernel and of a copy, at most, in the steps in turn.
_DELAYS = ((60, 300), (600, 10))
_POISONED = 1e9  # what poison gives in floating point is larger

Results = list[torch.Tensor]


class Block(torch.nn.Module):
    """Attention and an MLP on the current stream, another part on a side stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(_HIDDEN)
        self.qkv = torch.nn.Linear(_HIDDEN, 3 * _HIDDEN)
        self.up = torch.nn.Linear(_HIDDEN, 4 * _HIDDEN)
        self.down = torch.nn.Linear(4 * _HIDDEN, _HIDDEN)
        self.aside = torch.nn.Linear(_HIDDEN, 2 * _HIDDEN)

    def forward(self, x: torch.Tensor, lag: LagModule, side: torch.Stream) -> torch.Tensor:
        """Shape [batch, tokens, hidden], as what it returns."""
        main = lag.current_stream(DEVICE)
        mask = x > 0
        side.wait_stream(main)
        with lag.stream(side):
            for tensor in (x, mask):
                tensor.record_stream(side)
            aside = self.aside(x.masked_fill(mask, 0.5)).flatten()
            part = aside[: x.numel()].square()  # half of a storage is saved
            aside = part.view_as(x).sigmoid().masked_fill(mask, 0.25)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v) + x
        hidden = functional.gelu(self.up(self.norm(attended)))
        hidden = functional.dropout(self.down(hidden), 0.1)
        main.wait_stream(side)
        aside.record_stream(main)
        return attended + hidden.masked_fill(mask, -0.5) * aside


@dataclass(frozen=True)
class Outcome:
    """How one run compares with the training without offload.

    Attributes:
        found: what shows that something was wrong; empty: nothing was.
        offloaded_bytes: in the last step.
        forwarded_bytes: of these, what came back before it was written.
    """

    found: str
    offloaded_bytes: int = 0
    forwarded_bytes: int = 0


def outcome_of(
    lag: LagModule,
    train: Callable[[], tuple[Sequence[torch.Tensor], int]],
    expected: Sequence[torch.Tensor],
    num_steps: int,
) -> Outcome:
    """How a training compares with one without any delay; its device is as before after it.

    Args:
        lag: `torch.lag`.
        train: some steps; gives results in host memory, and how many bytes moved.
        expected: these results.
        num_steps: of the training.
    """
    try:
        with lag.device(DEVICE):
            ours, moved_bytes = train()
    except Exception as error:  # whatever the wrong bytes led to
        return Outcome(_line_of(error))
    finally:
        lag.reset()
        _settle_all(lag)
    return Outcome(_difference(ours, expected, num_steps), moved_bytes)


class OrderingStress:
    """The model, and its results without offload and without any delay.

    Args:
        lag: `torch.lag`.
        directory: for files of the tiers.
    """

    def __init__(self, lag: LagModule, directory: Path) -> None:
        self._lag, self._directory = lag, directory
        self._side = lag.Stream(DEVICE)
        torch.manual_seed(3)
        self._blocks = torch.nn.ModuleList(Block() for _ in range(_NUM_LAYERS)).to(DEVICE)
        self._inputs = [torch.randn(4, _TOKENS // 4, _HIDDEN).to(DEVICE) for _ in range(3)]
        with lag.device(DEVICE):
            self._expected = [self._step(None, None) for _ in range(_NUM_STEPS)]

    def run_without_offload(self, seed: int) -> Outcome:
        """The model alone, with delays."""
        try:
            with self._lag.device(DEVICE):
                return Outcome(self._train(None, random.Random(seed)))
        finally:
            self._lag.reset()

    def run(self, mode: str, seed: int) -> Outcome:
        """Some steps of training, with a new engine and new delays.

        Args:
            mode: a key of `MODES`.
            seed: of the delays.
        """
        config = OffloadConfig(
            directories=(self._directory,),
            min_bytes=1,
            write_bytes_per_s=_WRITE_BYTES_PER_S,
            **MODES[mode],
        )
        pool = functools.partial(StagingPool, piece_bytes=_PIECE_BYTES)
        with (
            mock.patch.object(ssd_tier, "StagingPool", pool),
            mock.patch.object(write_batch, "_ENOUGH_BYTES", _ENOUGH_BYTES),
            self._lag.device(DEVICE),
        ):
            device = AcceleratorDevice(torch.device(DEVICE), LagPlatform(self._lag))
            engine = OffloadEngine(config, device)
            try:
                try:
                    found = self._train(engine, random.Random(seed), device)
                except Exception as error:  # whatever the wrong bytes led to
                    found = _line_of(error)
                counted = engine.statistics
            finally:
                self._lag.reset()
                _settle_all(self._lag)
                engine.close()
        return Outcome(found, counted.offloaded_bytes, counted.forwarded_bytes)

    def _train(
        self, engine: OffloadEngine | None, chance: random.Random, device: Any = None
    ) -> str:
        """What is wrong, in a few words."""
        lateness = _Lateness(self._lag, self._side, chance, device)
        for number, expected in enumerate(self._expected):
            kernel_us, copy_us = _DELAYS[number]
            self._lag.set_delays(kernel_us, copy_us, seed=chance.randrange(1 << 30))
            ours = self._step(engine, lateness)
            if found := _difference(ours, expected, number):
                return found
        return ""

    def _step(self, engine: OffloadEngine | None, lateness: _Lateness | None) -> Results:
        """The losses, and the gradients of all parameters, in host memory."""
        torch.manual_seed(5)
        self._blocks.zero_grad()
        losses: dict[str, torch.Tensor] = {}
        save_orders: dict[str, Any] = {}
        with ExitStack() as step:
            if engine is not None:
                engine.exclude([*self._blocks.parameters(), *self._inputs])
                step.enter_context(engine.step())
            for phase in _SCHEDULE:
                kind, number = phase.split()
                if lateness is not None:
                    lateness.before(kind, engine)
                with ExitStack() as within:
                    if kind == "forward":
                        if engine is not None:
                            scope = Scope(micro_batch=int(number))
                            save_orders[number] = within.enter_context(engine.forward(scope))
                            if number == _BY_HOOKS:
                                within.enter_context(engine.saved_tensors_hooks())
                        losses[number] = self._forward(int(number), engine)
                    else:
                        if engine is not None:
                            within.enter_context(engine.backward(save_orders.pop(number)))
                        losses[number].backward()
                        losses[number] = losses[number].detach()
        gradients = [parameter.grad for parameter in self._blocks.parameters()]
        return [one.cpu() for one in [*losses.values(), *gradients] if one is not None]

    def _forward(self, micro_batch: int, engine: OffloadEngine | None) -> torch.Tensor:
        x = self._inputs[micro_batch]
        for index, block in enumerate(self._blocks):
            y = block(x, self._lag, self._side)
            if engine is not None and str(micro_batch) != _BY_HOOKS:
                scope = Scope(micro_batch=micro_batch, layer=f"decoder.{index}")
                engine.capture(scope, outputs=[y], inputs=[x])
            x = y
        return x.square().mean()


class _Lateness:
    """Holds streams back for a while, compute's and the copies' in turn."""

    def __init__(
        self, lag: LagModule, side: torch.Stream, chance: random.Random, device: Any
    ) -> None:
        self._lag, self._chance = lag, chance
        self._compute = [lag.current_stream(DEVICE), side]
        self._copies = [] if device is None else [device._store, device._pieces, device._load]
        self._num_forward = self._num_backward = 0

    def before(self, kind: str, engine: OffloadEngine | None) -> None:
        """A forward or backward pass is about to be queued."""
        late = self._compute
        if kind == "backward":
            if engine is not None:
                self._settle(engine)
            if self._num_backward % 2:
                late = self._copies
            self._num_backward += 1
        else:
            if self._num_forward % 2:
                late = self._compute[
                    1:
                ]  # what the side stream produces is not there when main's is
            self._num_forward += 1
        for stream in late:
            self._lag.late(stream, _LATE_S * (1 + self._chance.random()), _UNASKED_S)

    def _settle(self, engine: OffloadEngine) -> None:
        """Before a step's first backward pass all bytes reach their tiers.

        What comes later has left the device, but not for the drives, in one step; in the other it
        has not even left, and is forwarded.
        """
        if self._num_backward % 3 == 0:
            assert engine.wait_for_writes(30), "writes did not end"
        elif self._num_backward == 2:
            assert engine.writer.wait_for_writes(30), "writes did not end"


def _line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _settle_all(lag: LagModule) -> None:
    """What failed on the device is said by now, and belongs to this run."""
    for index in range(lag.device_count()):
        lag.synchronize(index)


def _difference(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], step: int) -> str:
    """What is wrong with results, in a few words."""
    for place, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        if not torch.equal(mine, theirs):
            what = "poison" if _is_poisoned(mine) else "wrong bits"
            return f"{what} in step {step}, result {place}"
    return ""


def _is_poisoned(tensor: torch.Tensor) -> bool:
    largest = float(tensor.abs().max())
    return not math.isfinite(largest) or largest > _POISONED
