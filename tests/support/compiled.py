# SPDX-License-Identifier: Apache-2.0
"""A small stack of blocks that is compiled and trained: `Stack`, `trained`, `without_offload`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.offload import offload_activations
from tests.support import models

HIDDEN, LAYERS, STEPS = 64, 3, 3


class Stack(models.Stack):
    def __init__(self) -> None:
        super().__init__(HIDDEN, LAYERS)


class Short(Stack):
    """One block: for shapes that a graph leaves open, which take seconds a block to compile, and
    where many graphs are compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[1:]


def batch(step: int, length: int = 32) -> torch.Tensor:
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(step))


Trained = tuple[list[torch.Tensor], list[dict[str, float]]]


def trained(
    directory: Path | None,
    backend: str = "aot_eager",
    *,
    lengths: tuple[int, ...] = (32,) * STEPS,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    kind: Callable[[], torch.nn.Module] = Stack,
    device: str = "cpu",
    settled: bool = False,
    **settings: Any,
) -> Trained:
    """Losses and gradients of each step, and what moved.

    Args:
        directory: of offload; None: without.
        backend: of torch.compile.
        lengths: of the sequences, one a step.
        around: each forward pass.
        kind: of the model.
        device: of it.
        settled: backward begins when all is written.
        settings: of `offload_activations`.
    """
    model = kind().eval().to(device)  # dropout draws otherwise in eager
    settings = {"min_bytes": 1024, "inside_graphs": True, **settings}
    compiled: Any = torch.compile(model, backend=backend)
    results, statistics = [], []
    with contextlib.ExitStack() as stack:
        offload = None
        if directory is not None:
            offload = stack.enter_context(offload_activations(model, directory, **settings))
        for step, length in enumerate(lengths):
            with around():
                loss = compiled(batch(step, length).to(device))
            if offload is not None and settled:
                assert offload.engine is not None and offload.engine.wait_for_writes(30)
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results += [one.detach().cpu() for one in (loss, *gradients)]
            model.zero_grad()
            if offload is not None:
                statistics.append(dict(offload.statistics))
    return results, statistics


_MOST_STEPS = 5


@functools.cache
def _alone(
    backend: str, kind: Callable[[], torch.nn.Module], _num_threads: int
) -> list[torch.Tensor]:
    return trained(None, backend, kind=kind, lengths=(32,) * _MOST_STEPS)[0]


def without_offload(
    num_steps: int = STEPS,
    backend: str = "aot_eager",
    kind: Callable[[], torch.nn.Module] = Stack,
) -> Trained:
    """What `trained` comes to without offload in the first steps, by as many threads.

    It trains once a session. All compiled graphs are forgotten. Steps do not change weights: fewer
    of them come to the same.
    """
    torch.compiler.reset()
    results = _alone(backend, kind, torch.get_num_threads())
    torch.compiler.reset()
    return results[: num_steps * len(results) // _MOST_STEPS], []


def added_gradients(
    num_steps: int = STEPS, kind: Callable[[], torch.nn.Module] = Stack
) -> list[torch.Tensor]:
    """Gradients of the first steps without offload, added up as those of steps are."""
    results, _ = without_offload(num_steps, kind=kind)
    size = len(results) // num_steps  # a loss and the gradients
    steps = [results[step * size + 1 : (step + 1) * size] for step in range(num_steps)]
    return [functools.reduce(torch.add, one) for one in zip(*steps, strict=True)]


def assert_same(one: Trained, other: Trained) -> None:
    assert len(one[0]) == len(other[0]) > STEPS
    assert all(map(torch.equal, one[0], other[0]))
