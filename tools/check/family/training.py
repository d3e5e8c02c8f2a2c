# SPDX-License-Identifier: Apache-2.0
"""A short training of a sample, and where two of them differ: `train`, `first_difference`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from check.family.inputs import Batch
from check.family.sample import loss_of

_SEED = 2
Tensors = dict[str, torch.Tensor]
BackwardOfStep = Callable[[torch.nn.Module, Sequence[Batch]], list[torch.Tensor]]


@dataclass
class Training:
    """What a training came to.

    Attributes:
        losses: of each step, those of its micro-batches.
        gradients: of each step, by the names of parameters.
        weights, buffers: at the end.
    """

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


def seed_everything() -> None:
    """Random numbers of torch, numpy and Python: models draw from all three."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy.random.seed(_SEED)


def one_after_the_other(model: torch.nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """A step as most scripts have it: forward and backward of each micro-batch."""
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(
    model: torch.nn.Module,
    steps: Sequence[Sequence[Batch]],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    backward: BackwardOfStep = one_after_the_other,
    shown: Callable[[], None] = lambda: None,
    updates: Callable[[int], bool] = lambda step: True,
) -> Training:
    """Trains a model, by AdamW as it is.

    Args:
        model: whose weights change.
        steps: the micro-batches of each.
        optimizer: of the model; None: made here.
        backward: runs the passes of a step, gives the losses.
        shown: called before weights are looked at.
        updates: whether the optimizer runs behind a step.
    """
    optimizer = optimizer or adamw(model)
    found = Training()
    seed_everything()
    for number, batches in enumerate(steps):
        found.losses.append([one.clone() for one in backward(model, batches)])
        found.gradients.append(
            {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        if updates(number):
            optimizer.step()
        optimizer.zero_grad()
    shown()
    found.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    found.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Its optimizer."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def first_difference(found: Training, expected: Training, num_steps: int | None = None) -> str:
    """Where one is not the other, bit by bit, in a few words; empty: nowhere.

    Args:
        found: of at most as many steps.
        expected: the plain one.
        num_steps: that are compared, without weights and buffers; None: all.
    """
    steps = len(expected.losses) if num_steps is None else num_steps
    for step in range(steps):
        for one, other in zip(found.losses[step], expected.losses[step], strict=True):
            if not same_bits(one, other):
                return f"the loss of step {step + 1}: {float(one)!r}, not {float(other)!r}"
        difference = _of_tensors(found.gradients[step], expected.gradients[step], "gradient")
        if difference:
            return f"step {step + 1}: {difference}"
    if num_steps is not None:
        return ""
    return _of_tensors(found.weights, expected.weights, "weight") or _of_tensors(
        found.buffers, expected.buffers, "buffer"
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """As `torch.equal`, but that a NaN equals the same NaN, and 0 is not -0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def distance(one: Tensors, other: Tensors) -> float:
    """Of two sets of tensors in the 2-norm, relative to the second."""
    squares = sum(float((one[n].double() - t.double()).square().sum()) for n, t in other.items())
    whole = sum(float(t.double().square().sum()) for t in other.values())
    return float((squares / whole) ** 0.5) if whole else squares


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool or tensor.is_sparse:
        return tensor.to_dense().to(torch.uint8) if tensor.is_sparse else tensor.to(torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _of_tensors(found: Tensors, expected: Tensors, what: str) -> str:
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        return f"a {what} is there in one of them alone: {names[0]} (of {len(names)})"
    names = [n for n, one in found.items() if not same_bits(one, expected[n])]
    if not names:
        return ""
    first: Any = found[names[0]].double() - expected[names[0]].double()
    largest = float(first.abs().max())
    return f"{len(names)} of {len(found)} {what}s differ, first {names[0]} by up to {largest:.1e}"
