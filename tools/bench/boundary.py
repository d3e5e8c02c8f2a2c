#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What waits in memory between two units of a layer-major step, beside the step's peak.

    tools/bench/boundary.py [--units N ...] [--layers N] [--directory DIR]

A stack of transformer blocks on the CPU, activations in memory and on files in DIR, and what waits
between units there too. One line for each number of units and mode.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from megatron.offload import LayerMajor, offload_activations
from megatron.offload.activations.capture.tensor_swapper import TensorSwapper
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.device.open import open_device
from megatron.offload.layer_major.graph_cuts import CutTensor
from megatron.offload.layer_major.schedule import LayerMajorSchedule
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.stats.memory import PeakMemory
from tests.support.models import Block

MIB = 1 << 20
MIN_BYTES = 64 << 10  # smaller storages stay


@dataclass
class Waiting:
    """Most bytes at any time of a step: of hidden states that wait, and of gradients."""

    hidden_bytes: int = 0
    gradient_bytes: int = 0
    _hidden: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _gradients: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    # Of those that wait elsewhere: in memory until they are written, and once they are read.
    _away: dict[bool, list[weakref.ref[SavedView]]] = field(default_factory=dict)

    def note_hidden(self, tensor: torch.Tensor) -> None:
        """It has come to the end of a unit."""
        self._hidden.append(weakref.ref(tensor))
        self._count()

    def note_gradient(self, tensor: torch.Tensor) -> None:
        """It has come to the beginning of a unit, or back from a tier."""
        self._gradients.append(weakref.ref(tensor))
        self._count()

    def note_away(self, view: SavedView | None, *, is_gradient: bool) -> None:
        """It waits elsewhere from now on, if there is a view of it."""
        if view is not None:
            self._away.setdefault(is_gradient, []).append(weakref.ref(view))
        self._count()

    def _count(self) -> None:
        hidden = _bytes_alive(self._hidden, self._away.get(False, []))
        gradients = _bytes_alive(self._gradients, self._away.get(True, []))
        self.hidden_bytes = max(self.hidden_bytes, hidden)
        self.gradient_bytes = max(self.gradient_bytes, gradients)


def _bytes_alive(
    tensors: Sequence[weakref.ref[torch.Tensor]], away: Sequence[weakref.ref[SavedView]]
) -> int:
    storages = [one.untyped_storage() for r in tensors if (one := r()) is not None]
    views = [view for r in away if (view := r()) is not None]
    storages += [memory for view in views if (memory := view.saved._memory) is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextlib.contextmanager
def watched(layer_major: LayerMajor) -> Iterator[Waiting]:
    """What waits between units of one step in this context."""
    found, add, enter = Waiting(), CutTensor.add, LayerMajorSchedule.enter_layer
    put, take, empty = TensorSwapper.put, TensorSwapper.take, TensorSwapper.empty
    begins = {unit: layer for layer, unit in reversed(layer_major.units.items()) if unit}

    def noted_add(cut: CutTensor, gradient: torch.Tensor) -> None:
        add(cut, gradient)
        assert cut.gradient is not None
        found.note_gradient(cut.gradient)

    def noted_put(boundary: TensorSwapper, tensor: torch.Tensor, scope: Any) -> Any:
        view = put(boundary, tensor, scope)
        if tensor.grad_fn is None:  # a gradient; a hidden state comes here from `empty`
            found.note_away(view, is_gradient=True)
        return view

    def noted_take(boundary: TensorSwapper, waiting: Any) -> torch.Tensor:
        gradient = take(boundary, waiting)
        found.note_gradient(gradient)
        return gradient

    def noted_empty(boundary: TensorSwapper, tensor: torch.Tensor, scope: Any) -> Any:
        emptied = empty(boundary, tensor, scope)
        found.note_away(None if emptied is None else emptied.view, is_gradient=False)
        return emptied

    def noted_enter(schedule: LayerMajorSchedule, layer: Hashable, arguments: Any) -> Any:
        if layer in begins.values():
            found.note_hidden(arguments[0][0])
        return enter(schedule, layer, arguments)

    with (
        mock.patch.object(CutTensor, "add", noted_add),
        mock.patch.object(LayerMajorSchedule, "enter_layer", noted_enter),
        mock.patch.object(TensorSwapper, "put", noted_put),
        mock.patch.object(TensorSwapper, "take", noted_take),
        mock.patch.object(TensorSwapper, "empty", noted_empty),
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


class Step(NamedTuple):
    """What a step has taken.

    Attributes:
        waiting: between units.
        peak_bytes: of memory, above what was there before it.
        seconds: of the step, the fastest of those that nobody watched.
        gradients: of the step that was watched.
    """

    waiting: Waiting
    peak_bytes: int
    seconds: float
    gradients: list[torch.Tensor]


def measure(
    directory: Path,
    mode: str,
    boundary: str,
    units: int,
    num_layers: int,
    shape: Sequence[int],
    num_batches: int,
    *,
    timed_steps: int = 1,
    inflight_bytes: int = 8 * MIB,
) -> Step:
    """What a layer-major step takes.

    Args:
        mode: where activations go, `boundary`: where hidden states and their gradients wait.
        shape: of a micro-batch: samples, tokens, hidden.
    """
    torch.manual_seed(1)
    model = Stack(num_layers, shape[-1])
    settings: dict[str, Any] = {"mode": mode, "boundary": boundary, "min_bytes": MIN_BYTES}
    settings["inflight_bytes"] = inflight_bytes
    with offload_activations(model, directory, **settings) as offload:
        layer_major = LayerMajor(model, units, offload=offload)
        batches = [torch.randn(*shape) for _ in range(num_batches)]
        layer_major.step(batches, model)  # counts random numbers
        model.zero_grad(set_to_none=False)
        seconds = []
        for _ in range(timed_steps):
            began_s = time.perf_counter()
            layer_major.step(batches, model)
            seconds.append(time.perf_counter() - began_s)
            model.zero_grad(set_to_none=False)
        peak = PeakMemory(open_device("cpu"))
        peak.begin_step()
        with watched(layer_major) as found:
            layer_major.step(batches, model)
        peak_bytes = peak.end_step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return Step(found, peak_bytes, min(seconds), gradients)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=3, default=[2, 256, 256])
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("units  activations  boundary  hidden states  gradients  peak (MiB)  step s  gradients")
    for units in args.units:
        first: list[torch.Tensor] = []
        for mode, boundary in (("off", "keep"), ("ssd", "keep"), ("ssd", "ssd")):
            step = measure(
                args.directory,
                mode,
                boundary,
                units,
                args.layers,
                args.shape,
                args.micro_batches,
                timed_steps=args.steps,
            )
            first = first or step.gradients
            same = all(torch.equal(*pair) for pair in zip(first, step.gradients, strict=True))
            found = step.waiting
            print(
                f"{units:5}  {mode:11}  {boundary:8}  {found.hidden_bytes / MIB:13.1f}  "
                f"{found.gradient_bytes / MIB:9.1f}  {step.peak_bytes / MIB:10.0f}  "
                f"{step.seconds:6.2f}  {'identical' if same else 'DIFFERENT'}"
            )
    return 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in allocator_environment().items()):
        environment = {**os.environ, **allocator_environment()}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    sys.exit(main())
