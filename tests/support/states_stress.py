# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on tiers, on the test accelerator while its streams lag: `StatesStress`.

As `ordering_stress.py` for activations: before each optimizer step compute or the copies are held
back, kernels and copies are late by random times, and weights and states are compared bit by bit
with those of a training without any of that. One parameter moves with its states, as main weights
do; not where the step is on the host, for torch lets no parameter of this device have host memory
(of a CUDA device it does). `tests/ordering.py` runs it many times, also with wrong waits
(`ordering_mistakes.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.integration.torch import optimizer as front_door
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.sizes import MIB
from megatron.offload.states.config import StatesConfig
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform
from tests.support.ordering_stress import DEVICE, Outcome, outcome_of

_WIDTH, _NUM_LAYERS, _NUM_STEPS = 64, 5, 4
_LAYER_BYTES = 2 * 4 * _WIDTH * (_WIDTH + 1)  # of Adam's states
_LATE_S = 0.06
_UNASKED_S = 0.3  # without a wait for it: longer than a host is slow
_DELAYS = ((60, 300), (600, 10))  # microseconds of a kernel and of a copy, at most, in turn

STATES_MODES: dict[str, dict[str, Any]] = {
    "states, ssd": {"mode": "ssd", "window_bytes": 2 * _LAYER_BYTES},
    "states, host": {"mode": "host", "host_budget": MIB},
    "states, step on the host": {"mode": "ssd", "step_on": "cpu", "window_bytes": 2 * _LAYER_BYTES},
}


class StatesStress:
    """The model, and its results without offload and without any delay.

    Args:
        lag: `torch.lag`.
        directory: for files of the tiers.
    """

    def __init__(self, lag: LagModule, directory: Path) -> None:
        self._lag, self._directory = lag, directory
        self._device = AcceleratorDevice(torch.device(DEVICE), LagPlatform(lag))
        torch.manual_seed(3)
        self._inputs = torch.randn(8, _WIDTH).to(DEVICE)
        with lag.device(DEVICE):
            self._expected, _ = self._train(None, None)

    def run(self, mode: str, seed: int) -> Outcome:
        """Some steps of training with new delays; what is wrong, in a few words.

        Args:
            mode: a key of `STATES_MODES`.
            seed: of the delays.
        """
        settings = {"directories": (self._directory,), "bucket_bytes": _LAYER_BYTES}
        config = StatesConfig.from_settings({**settings, **STATES_MODES[mode]})
        return outcome_of(
            self._lag, lambda: self._train(config, random.Random(seed)), self._expected, _NUM_STEPS
        )

    def _train(
        self, config: StatesConfig | None, chance: random.Random | None
    ) -> tuple[list[torch.Tensor], int]:
        """Losses, weights and states, in host memory, and the bytes that moved."""
        torch.manual_seed(4)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)]
        model = torch.nn.Sequential(*layers).to(DEVICE)
        # As Megatron does it: the optimizer has a copy of the first weight, and fills the weight.
        main = torch.nn.Parameter(layers[0].weight.detach().clone())
        others = [p for p in model.parameters() if p is not layers[0].weight]
        # The kernel that a step on the host takes too.
        optimizer = torch.optim.AdamW([main, *others], lr=1e-2, fused=True)
        fill = layers[0].weight.detach().copy_
        offload, moved_bytes = None, 0
        if config is not None:

            def updated(params: Sequence[torch.Tensor]) -> None:
                if any(one is main for one in params):
                    fill(main.data)

            with mock.patch.object(front_door, "open_device", lambda *_: self._device):
                offload = OptimizerOffload(
                    optimizer,
                    config,
                    moves_param=lambda param: param is main and config.step_on == "device",
                    updated=updated,
                )
        losses = []
        for number in range(_NUM_STEPS):
            if chance is not None:
                kernel_us, copy_us = _DELAYS[number % 2]
                self._lag.set_delays(kernel_us, copy_us, seed=chance.randrange(1 << 30))
            loss = model(self._inputs).square().mean()
            loss.backward()
            losses.append(loss.detach())
            main.grad, layers[0].weight.grad = layers[0].weight.grad, None
            if chance is not None:
                self._hold_back(number, chance)
            optimizer.step()
            if offload is None:
                fill(main.data)
            optimizer.zero_grad()
        if offload is not None:
            assert offload.states is not None
            moved_bytes = _NUM_STEPS * offload.states.num_bytes
            offload.close()
        kept = [
            value
            for param in [main, *others]
            for value in (param.detach(), *optimizer.state[param].values())
        ]
        weights = [parameter.detach() for parameter in model.parameters()]
        return [one.cpu() for one in (*losses, *weights, *kept)], moved_bytes

    def _hold_back(self, number: int, chance: random.Random) -> None:
        """Compute's stream, or those of the copies, before a step."""
        device = self._device
        copies = [device._store, device._pieces, device._load]
        late = [self._lag.current_stream(DEVICE)]
        if number % 2:
            self._lag.synchronize(DEVICE)  # compute must not be later still
            late = copies
        for stream in late:
            self._lag.late(stream, _LATE_S * (1 + chance.random()), _UNASKED_S)
