#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What waits in memory between two units of a layer-major step, beside the step's peak.

    tools/bench/boundary.py [--units N ...] [--layers N] [--directory DIR]

A stack of transformer blocks on the CPU, activations in memory and on files in DIR. One line for
each number of units and mode.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from megatron.offload import LayerMajor, offload_activations
from megatron.offload.device.allocator import allocator_environment
from megatron.offload.device.open import open_device
from megatron.offload.layer_major.graph_cuts import Crossing
from megatron.offload.layer_major.schedule import LayerMajorSchedule
from megatron.offload.stats.memory import PeakMemory
from tests.support.models import Block

MIB = 1 << 20


@dataclass
class Waiting:
    """Most bytes at any time of a step: of hidden states that wait, and of gradients."""

    hidden_bytes: int = 0
    gradient_bytes: int = 0
    _hidden: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _gradients: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def note_hidden(self, tensor: torch.Tensor) -> None:
        """It has come to the end of a unit."""
        self._hidden.append(weakref.ref(tensor))
        self.hidden_bytes = max(self.hidden_bytes, _bytes_alive(self._hidden))

    def note_gradient(self, tensor: torch.Tensor) -> None:
        """It has come to the beginning of a unit."""
        self._gradients.append(weakref.ref(tensor))
        self.gradient_bytes = max(self.gradient_bytes, _bytes_alive(self._gradients))


def _bytes_alive(references: Sequence[weakref.ref[torch.Tensor]]) -> int:
    storages = [one.untyped_storage() for r in references if (one := r()) is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextlib.contextmanager
def watched(layer_major: LayerMajor) -> Iterator[Waiting]:
    """What waits between units of one step in this context."""
    found, add, enter = Waiting(), Crossing.add, LayerMajorSchedule.enter_layer
    begins = {unit: layer for layer, unit in reversed(layer_major.units.items()) if unit}

    def noted_add(crossing: Crossing, gradient: torch.Tensor) -> None:
        add(crossing, gradient)
        assert crossing.gradient is not None
        found.note_gradient(crossing.gradient)

    def noted_enter(schedule: LayerMajorSchedule, layer: Hashable, arguments: Any) -> Any:
        if layer in begins.values():
            found.note_hidden(arguments[0][0])
        return enter(schedule, layer, arguments)

    with (
        mock.patch.object(Crossing, "add", noted_add),
        mock.patch.object(LayerMajorSchedule, "enter_layer", noted_enter),
    ):
        yield found


class Stack(torch.nn.Module):
    """Transformer blocks, and a number that they come to."""

    def __init__(self, num_layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(hidden) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measure(
    directory: Path, mode: str, units: int, num_layers: int, shape: Sequence[int], num_batches: int
) -> tuple[Waiting, int]:
    """What waits, and the peak of memory of the step above what was there before it, in bytes.

    Args:
        shape: of a micro-batch: samples, tokens, hidden.
    """
    torch.manual_seed(1)
    model = Stack(num_layers, shape[-1])
    settings = {"mode": mode, "min_bytes": 64 << 10, "inflight_bytes": 8 * MIB}
    with offload_activations(model, directory, **settings) as offload:
        layer_major = LayerMajor(model, units, offload=offload)
        batches = [torch.randn(*shape) for _ in range(num_batches)]
        layer_major.step(batches, model)  # counts random numbers
        model.zero_grad(set_to_none=False)
        peak = PeakMemory(open_device("cpu"))
        peak.begin_step()
        with watched(layer_major) as found:
            layer_major.step(batches, model)
        return found, peak.end_step()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=3, default=[2, 256, 256])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("units  mode  hidden states  gradients  peak of the step (MiB)")
    for units in args.units:
        for mode in ("off", "ssd"):
            found, peak_bytes = measure(
                args.directory, mode, units, args.layers, args.shape, args.micro_batches
            )
            sizes = (found.hidden_bytes, found.gradient_bytes, peak_bytes)
            print(f"{units:5}  {mode:4}" + "".join(f"  {one / MIB:9.1f}" for one in sizes))
    return 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in allocator_environment().items()):
        environment = {**os.environ, **allocator_environment()}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    sys.exit(main())
