# SPDX-License-Identifier: Apache-2.0
"""Transforms of torch.func around layers, and around uses of parameters, that are on a tier.

What comes and goes within a transform must not become a tensor of the transform, whose memory is
gone when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp, vjp, vmap

from megatron.offload import offload_parameters
from tests.behaviour.test_parameters_that_others_write import HIDDEN, LAYERS, Net, batch


def _jvp(model: Net) -> Any:
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    tangents = {name: torch.ones_like(one) for name, one in values.items()}
    return jvp(lambda own: functional_call(model, own, (batch(0),)), (values,), (tangents,))


def _of_each(model: Net) -> Any:
    return vmap(model)(batch(0)[:, None])


def _of_inputs(model: Net) -> Any:
    with torch.no_grad():
        return jvp(model, (batch(0),), (torch.ones(4, HIDDEN),))


def _of_weights(number: int) -> Callable[[Net], Any]:
    def product(model: Net) -> Any:
        weight = model.layers[number].up.weight
        return grad(lambda x: (x * weight).square().sum())(torch.ones(HIDDEN, HIDDEN))

    return product


def _of_each_weight(model: Net) -> Any:
    weight = model.layers[1].up.weight
    return vmap(lambda x: (x * weight).sum())(torch.ones(3, HIDDEN, HIDDEN))


def _later(model: Net) -> Any:
    weight = model.layers[-1].up.weight
    _, gradient = vjp(lambda x: (x * weight).sum(), torch.ones(HIDDEN, HIDDEN))
    model(batch(1)).backward()
    return gradient(torch.ones(()))


TRANSFORMS: dict[str, Callable[[Net], Any]] = {
    "jvp": _jvp,
    "vmap": _of_each,
    "jvp of inputs": _of_inputs,
    "grad with a weight": _of_weights(1),
    "grad with a weight in memory": _of_weights(LAYERS - 1),
    "vmap with a weight": _of_each_weight,
    "vjp before a pass": _later,
}


@pytest.mark.parametrize("is_written", [False, True], ids=["", "written before"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_they_have_the_same_bits_and_leave_the_same_weights(
    transform: Callable[[Net], Any], is_written: bool, tmp_path: Path
) -> None:
    def run(directory: Path | None) -> list[torch.Tensor]:
        model = Net()
        handle = offload_parameters(model, directory) if directory is not None else None
        with torch.no_grad():
            model(batch(2))
            for layer in model.layers if is_written else ():
                layer.up.weight.data = torch.full((HIDDEN, HIDDEN), 0.1)
                layer.gate.mul_(0.5)
        found = torch.utils._pytree.tree_leaves(transform(model))
        model.zero_grad()
        model(batch(3)).backward()
        if handle is not None:
            handle.close()
        gradients = [one.grad for one in model.parameters()]
        return [one.detach().clone() for one in (*found, *gradients, *model.parameters())]

    assert all(map(torch.equal, run(tmp_path), run(None)))
