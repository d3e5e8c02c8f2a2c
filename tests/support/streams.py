# SPDX-License-Identifier: Apache-2.0
"""One small training for each stream of bytes, and faults for what its tier reads and writes.

`test_every_stream_alike.py` asks all streams the same questions: a `Training` has the same
methods for each, and is compared bit by bit with the same training without offload.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier
from tests.support.frozen import round_matrices
from tests.support.waiting import SOON_S

ACTIVATIONS, STATES, PARAMETERS, GRADIENTS, FROZEN = STREAMS = (
    "activations",
    "optimizer states",
    "parameters",
    "gradients",
    "frozen weights",  # in 8 bits
)
_CODEC = "int8"
HIDDEN, LAYERS, MICRO_BATCHES = 64, 3, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(up)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).pow(2).mean()


def batches_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(32, HIDDEN, generator=generator) for _ in range(MICRO_BATCHES)]


class Training:
    """A model in training, one of whose streams is on a tier. Others move as little as can be.

    Args:
        stream: one of `STREAMS`; its moves are those of every step.
        directory: on which its SSD tier is; None: nothing is offloaded.
        seed: of the weights.
        settings: of the stream's door.
    """

    def __init__(
        self, stream: str, directory: Path | None, *, seed: int = 0, **settings: Any
    ) -> None:
        torch.manual_seed(seed)
        self.stream = stream
        self.model = Net()
        if stream == FROZEN:
            self.model.blocks.requires_grad_(False)
            round_matrices(self.model.blocks, _CODEC)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.losses: list[torch.Tensor] = []
        self.handle: Any = None
        self._layer_major: LayerMajor | None = None
        if directory is not None:
            self.handle = self._offload(directory, settings)
        if stream == GRADIENTS:
            self._layer_major = LayerMajor(self.model)

    def _offload(self, directory: Path, settings: dict[str, Any]) -> Any:
        if self.stream == ACTIVATIONS:
            return offload_activations(self.model, directory, **({"min_bytes": 1} | settings))
        if self.stream == STATES:
            small = {"window_bytes": 0, "bucket_bytes": 1 << 16}
            return offload_optimizer(self.optimizer, directory, **(small | settings))
        if self.stream == PARAMETERS:
            return offload_parameters(self.model, directory, **settings)
        if self.stream == FROZEN:
            return offload_parameters(self.model, directory, **({"codec": _CODEC} | settings))
        # All units live, so that behind the first step gradients move alone.
        alone = {"gradients": "on", "live_units": LAYERS}
        return offload_parameters(self.model, directory, **(alone | settings))

    # -- Training -------------------------------------------------------------------------------

    def passes(self, number: int) -> None:
        """Forward and backward of a step, which begins with zero gradients."""
        self.optimizer.zero_grad()
        batches = batches_of(number)
        losses = []
        if self._layer_major is not None:
            losses = self._layer_major.step(batches, self.model)
        else:
            for batch in batches:
                loss = self.model(batch)
                if self.stream == ACTIVATIONS and self.handle is not None and self.handle.engine:
                    self.handle.engine.wait_for_writes(SOON_S)  # else what is there is not read
                loss.backward()
                losses.append(loss.detach())
        self.losses += losses

    def step(self, number: int) -> None:
        self.passes(number)
        self.optimizer.step()

    def train(self, *numbers: int) -> Training:
        for number in numbers:
            self.step(number)
        return self

    def evaluate(self) -> None:
        """A forward pass without gradients, and waits until what leaves has left."""
        with torch.no_grad():
            self.model(batches_of(0)[0])
        self.settle()

    def outcome(self) -> dict[str, torch.Tensor]:
        """All that a training gives: losses, weights and the optimizer's states."""
        found = {f"loss {n}": loss.clone() for n, loss in enumerate(self.losses)}
        found |= {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {key}": value.clone() for key, value in state.items()}
        return found

    def checkpoint(self) -> dict[str, Any]:
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(saved)

    def load(self, checkpoint: dict[str, Any]) -> Training:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        return self

    def close(self, *, restore: bool = True) -> None:
        if self._layer_major is not None:
            self._layer_major.close()
        if self.handle is None:
            return
        if self.stream == ACTIVATIONS:
            self.handle.close()
        else:
            self.handle.close(restore=restore)

    # -- Its tier -------------------------------------------------------------------------------

    @property
    def tiers(self) -> list[Tier]:
        if self.stream == ACTIVATIONS:
            return [] if self.handle.engine is None else list(self.handle.engine.tiers.values())
        of = self.handle.states if self.stream == STATES else self.handle.window
        return list(of.tiers)

    @property
    def drives(self) -> list[Any]:
        single = [
            one
            for tier in self.tiers
            for one in (tier.tiers if isinstance(tier, TieredTier) else [tier])
        ]
        return [drive for tier in single if isinstance(tier, SsdTier) for drive in tier.drives]

    @property
    def written_bytes(self) -> int:
        return sum(drive.statistics.writes.total_bytes for drive in self.drives)

    def settle(self) -> None:
        """Waits until what leaves has left."""
        if self.stream == STATES:
            self.handle.states.wait_for_writes()
        elif self.stream != ACTIVATIONS:
            for unit in self.handle.window.units:
                unit.wait_for_write()


@functools.cache
def _without_offload(stream: str, numbers: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    return Training(stream, None, seed=seed).train(*numbers).outcome()


def without_offload(stream: str, *numbers: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the same steps give with everything in memory."""
    return _without_offload(stream if stream in (GRADIENTS, FROZEN) else ACTIVATIONS, numbers, seed)


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, losses: bool = True
) -> None:
    """All bits are the same.

    Args:
        found: an outcome.
        expected: the other one.
        losses: False: steps were repeated or left out, so losses are not compared.
    """
    if not losses:
        found, expected = (
            {name: one for name, one in of.items() if not name.startswith("loss")}
            for of in (found, expected)
        )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Faults:
    """Makes reads and writes of unlinked files fail.

    Attributes:
        num_failed: calls that were made to fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failed = 0
        self._rules: dict[str, list[Any]] = {}  # by method: what is raised, and how often still
        self._lock = threading.Lock()
        for name in ("read", "write", "read_cached", "sync"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        call = getattr(UnlinkedFile, name)

        def fails(file: UnlinkedFile, *args: Any) -> Any:
            with self._lock:
                rule = self._rules.get(name)
                if rule is not None and rule[1]:
                    rule[1] -= 1
                    self.num_failed += 1
                    # As a debugger or a logger may, the error holds what was to be moved.
                    held = [memoryview(body)[:] for body in args if _has_bytes(body)]
                    raise rule[0](held)
            return call(file, *args)

        monkeypatch.setattr(UnlinkedFile, name, fails)

    def fail(self, *methods: str, number: int, times: int = -1) -> None:
        """These methods raise an OSError of that number from now on, -1: for ever."""
        for method in methods:
            self._rules[method] = [functools.partial(_error, number), times]

    def end(self) -> None:
        """All is well again."""
        self._rules.clear()


def _has_bytes(argument: Any) -> bool:
    return isinstance(argument, memoryview)


def _error(number: int, held: list[memoryview]) -> OSError:
    error = OSError(number, os.strerror(number))
    error.held = held  # type: ignore[attr-defined]
    return error
