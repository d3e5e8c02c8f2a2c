# SPDX-License-Identifier: Apache-2.0
"""Section `side_streams`: layers that compute on a stream of their own get the right bytes back.

Autograd runs a node's backward on the stream that its forward was on. Here half of each layer runs
on a side stream, the layer is captured on the main one, and in backward both lag behind at random
while freed memory is scribbled over: what comes back for a node of the side stream must be there
when that stream reads it, and must not be reused before it has. Then a mixture of experts of
megatron-core, whose shared experts compute on a stream of their own (--moe-shared-expert-overlap).
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass

import torch

from check.gpu.delays import Delays
from check.gpu.models import start_megatron
from check.gpu.ordering import MODES
from check.gpu.parity import check_model, deterministic, same_bits
from check.gpu.result import Section
from check.gpu.settings import Settings, settle
from megatron.offload import (
    ChangedInPlaceError,
    ConfigurationError,
    OffloadConfig,
    OffloadEngine,
    Scope,
)
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB

_MODES = ("ssd direct", "host", "tiered")
_NUM_LAYERS, _NUM_VALUES = 6, 1 << 20
_SCRIBBLE = 0xDB


@dataclass
class SideLayers:
    """Layers of which one half runs on a side stream, where the device has streams.

    Only operations on single elements: they have the same bits on whatever stream they run.
    """

    device: torch.device
    delays: Delays

    def __post_init__(self) -> None:
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        """Saves what both streams have computed."""
        on_main = x * x.sin()
        if self._side is None:
            return on_main + on_main.tanh() * on_main
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self.delays.compute()
            on_main.record_stream(self._side)
            on_side = on_main.tanh() * on_main
        main.wait_stream(self._side)
        on_side.record_stream(main)
        return on_main + on_side

    def gradient(self, start: torch.Tensor, engine: OffloadEngine | None) -> torch.Tensor:
        """Forward and backward through all layers; what arrives at the start."""
        x = start.detach().clone().requires_grad_()
        if engine is None:
            return self._backward(x, self._forward(x, None))
        with engine.step():
            with engine.forward(Scope()) as save_order:
                y = self._forward(x, engine)
            settle(engine)  # so that every byte comes back from its tier
            with engine.backward(save_order):
                return self._backward(x, y)

    def _forward(self, x: torch.Tensor, engine: OffloadEngine | None) -> torch.Tensor:
        for number in range(_NUM_LAYERS):
            self.delays.compute()
            y = self.layer(x)
            if engine is not None:
                engine.capture(Scope(layer=f"decoder.{number + 1}"), [y], [x])
            x = y
        return x

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.register_hook(self._lag)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return gradient

    def _lag(self, gradient: torch.Tensor) -> None:
        """Before backward: all streams are late, and free memory is taken and scribbled over."""
        self.delays.copies()
        self.delays.compute(at_least=0.5)
        if self._side is not None:
            with torch.cuda.stream(self._side):
                self.delays.compute(at_least=0.5)
        for _ in range(_NUM_LAYERS):
            torch.full((gradient.nbytes,), _SCRIBBLE, dtype=torch.uint8, device=self.device)


def run(settings: Settings, section: Section) -> None:
    """Runs the section: layers made here, then megatron-core's experts."""
    for mode in _MODES:
        name = f"{mode}: a layer on two streams"
        try:
            wrong, passes, moved = compare(settings, mode)
        except ConfigurationError as error:
            section.skip(name, str(error))
            continue
        section.check(
            name,
            not wrong and moved > 0,
            f"{wrong} of {passes} gradients differ from those without offload",
        )
    if not settings.on_gpu:
        section.skip("streams", "needs a GPU: on a CPU all runs in one order")
    try:
        start_megatron(settings.device, settings.seed)
    except ImportError as error:
        section.check("megatron-core", False, f"it cannot be imported: {error}")
        return
    if settings.on_gpu and importlib.util.find_spec("transformer_engine") is None:
        section.skip("experts", "megatron-core's router needs transformer_engine on a GPU")
        return
    with deterministic(strict=False):
        check_model("experts", "bf16", settings, section)


def compare(settings: Settings, mode: str) -> tuple[int, int, int]:
    """Gradients with an engine of a mode against those without.

    Returns:
        How many of them differ, of how many, and the bytes that were offloaded.

    Raises:
        ConfigurationError: the mode cannot work here.
    """
    config = OffloadConfig(
        directories=(settings.directory,), min_bytes=1, inflight_bytes=64 * MIB, **MODES[mode]
    )
    device = open_device(settings.device)
    num_passes = (4 if settings.quick else 20) if settings.on_gpu else 2
    num_values = _NUM_VALUES if settings.on_gpu else 1 << 10
    layers = SideLayers(settings.device, Delays(device, random.Random(settings.seed)))
    engine = OffloadEngine(config, device)
    wrong = moved = 0
    try:
        for seed in range(num_passes):
            generator = torch.Generator().manual_seed(settings.seed + seed)
            start = torch.randn(num_values, generator=generator).to(settings.device)
            wanted = layers.gradient(start, None)
            try:
                found = layers.gradient(start, engine)
            except ChangedInPlaceError:  # a sample of what is computed again has shown it
                wrong += 1
                continue
            wrong += not same_bits(found, wanted)
            moved += engine.statistics.offloaded_bytes
    finally:
        engine.close()
    return wrong, num_passes, moved
