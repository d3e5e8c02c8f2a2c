# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps on the test accelerator while its streams lag: `LayerMajorStress`.

As `ordering_stress.py` for activations: what waits between two units is on a tier, or parameters,
gradients and optimizer states are. In each step compute or copies are held back, at every layer
again, kernels and copies are late by random times, and losses, norms and weights are compared bit
by bit with those of a loop over micro-batches without any of that. `tests/ordering.py` runs it many
times, also with wrong waits (`ordering_mistakes.py`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.offload.device.platform import register_platform
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.parameters import gradients as gradients_file
from megatron.offload.sizes import MIB
from megatron.offload.tiers import ssd as ssd_tier
from megatron.offload.tiers.staging import StagingPool
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform
from tests.support.ordering_stress import DEVICE, Outcome, outcome_of
from tests.support.training import Stack, moving

_HIDDEN, _NUM_LAYERS, _MICRO_BATCHES = 32, 4, 4
_PIECE_BYTES = 4 << 10  # of staging buffers: large storages take several
_ALONE_BYTES = 1 << 12  # a gradient that is as large is a piece by itself; others are packed
_LATE_S = 0.004
_UNASKED_S = 0.1  # without a wait for it: longer than a host is slow
# What is held back in a step, the first of which counts random numbers.
_STEPS = ("nothing", "compute", "reads", "writes", "uses")
_SETTLED = ("reads", "uses")  # in these, what is written has left the device when a layer runs

_SSD: dict[str, Any] = {"mode": "ssd"}
_HOST: dict[str, Any] = {"mode": "host", "host_budget": 64 * MIB}
_SLOW: dict[str, Any] = {"mode": "ssd", "pinned_bytes": 0, "write_bytes_per_s": 20e6}
LAYER_MAJOR_MODES: dict[str, dict[str, Any]] = {
    "boundary, ssd": {"activations": {**_SLOW, "boundary": "ssd", "min_bytes": 1}},
    "boundary, host": {"activations": {**_HOST, "boundary": "host", "min_bytes": 1}},
    "parameters, ssd": {"parameters": {**_SSD, "gradients": "on"}},
    "parameters, host": {"parameters": {**_HOST, "gradients": "on"}},
}


class LayerMajorStress:
    """The model, and its results without offload and without any delay.

    Args:
        lag: `torch.lag`.
        directory: for files of the tiers.
    """

    def __init__(self, lag: LagModule, directory: Path) -> None:
        self._lag, self._directory = lag, directory
        register_platform("lag", LagPlatform(lag))
        draw = torch.Generator().manual_seed(4)
        self._inputs = [
            [torch.randn(2, 16, _HIDDEN, generator=draw).to(DEVICE) for _ in range(_MICRO_BATCHES)]
            for _ in _STEPS
        ]
        with lag.device(DEVICE):
            self._expected = self._train({}, None)[0]

    def run(self, mode: str, seed: int) -> Outcome:
        """Some steps of training with new delays; what is wrong, in a few words.

        Args:
            mode: a key of `LAYER_MAJOR_MODES`.
            seed: of the delays.
        """
        pool = functools.partial(StagingPool, piece_bytes=_PIECE_BYTES)
        with (
            mock.patch.object(ssd_tier, "StagingPool", pool),
            mock.patch.object(gradients_file, "ALONE_BYTES", _ALONE_BYTES),
        ):
            return outcome_of(
                self._lag,
                lambda: self._train(LAYER_MAJOR_MODES[mode], random.Random(seed)),
                self._expected,
                len(_STEPS),
            )

    def _train(
        self, moved: dict[str, dict[str, Any]], chance: random.Random | None
    ) -> tuple[list[torch.Tensor], int]:
        """Losses, norms and weights, in host memory, and the bytes that were written."""
        torch.manual_seed(7)
        model, found = Stack(_HIDDEN, _NUM_LAYERS, _MICRO_BATCHES).to(DEVICE), []
        lateness = _Lateness(self._lag, chance)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        streams = {*moved, *(["states"] if "parameters" in moved else [])}
        with moving(streams, model, optimizer, self._directory, **moved) as handles:
            lateness.activations, parameters = handles.activations, handles.parameters
            lateness.parameters = parameters
            step = handles.steps(model, _NUM_LAYERS if moved else None)
            for layer in model.layers if moved else ():
                lateness.hook(layer)
            for number, inputs in enumerate(self._inputs):
                lateness.begin(number)
                found += step(inputs)
                lateness.hold_back()
                if parameters is not None and number % 2:
                    parameters.bring_gradients()
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
                optimizer.step()
                optimizer.zero_grad()
            moved_bytes = 0
            if parameters is not None:
                moved_bytes = int(parameters.statistics["written_bytes"])
            if handles.activations is not None:
                moved_bytes = int(handles.activations.statistics["offloaded_bytes"])
        found += [one.detach() for one in model.parameters()]
        return [one.cpu() for one in found], moved_bytes


class _Lateness:
    """Holds streams back, whenever a layer is about to run, in forward and in backward."""

    def __init__(self, lag: LagModule, chance: random.Random | None) -> None:
        self._lag, self._chance = lag, chance
        self._what = "nothing"
        self.activations: ActivationOffload | None = None
        self.parameters: ParameterOffload | None = None

    def begin(self, step: int) -> None:
        """A step begins, with delays of its own."""
        if self._chance is None:
            return
        self._what = _STEPS[step]
        kernel_us, copy_us = (300, 10) if self._what in ("compute", "uses") else (30, 300)
        self._lag.set_delays(kernel_us, copy_us, seed=self._chance.randrange(1 << 30))

    def hook(self, layer: torch.nn.Module) -> None:
        """Has this layer's passes held back."""

        def after_forward(_: torch.nn.Module, __: Any, result: torch.Tensor) -> None:
            if result.requires_grad:
                result.register_hook(lambda _: self.hold_back())

        layer.register_forward_pre_hook(lambda *_: self.hold_back(), prepend=True)
        layer.register_forward_hook(after_forward)

    def hold_back(self) -> None:
        """From now on for a while."""
        if self._chance is None:
            return
        late_s = _LATE_S * (1 + self._chance.random())
        if self.parameters is not None:
            late_s *= 4  # more than a unit computes: the next one is read meanwhile
        devices = list(self._devices())
        if self._what in ("compute", "uses"):
            self._lag.late(self._lag.current_stream(DEVICE), late_s, _UNASKED_S)
        for device in devices:
            if self._what == "reads":
                self._lag.late(device._load, late_s, _UNASKED_S)
            if self._what == "writes":
                for stream in (device._store, device._pieces):
                    self._lag.late(stream, late_s, _UNASKED_S)

    def _devices(self) -> Iterator[Any]:
        """Whose streams copy."""
        engine = self.activations.engine if self.activations is not None else None
        if engine is not None:
            assert self._what not in _SETTLED or engine.wait_for_writes(30), "writes did not end"
            yield engine._device
        window = self.parameters.window if self.parameters is not None else None
        if window is not None:
            yield window.device
