# SPDX-License-Identifier: Apache-2.0
"""Takes a leaf's gradient of one backward pass from where autograd adds it: `taken`.

`GraphCuts` asks for it where an earlier unit uses the leaf too, whose backward pass adds the whole:
hooks of the leaf, of users and trainers, run then, once a micro-batch and with the whole gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import Node

# Around a backward pass, of a leaf whose gradient a trainer adds up elsewhere than in `grad`.
# Inside there is nothing, behind it what was there is back, and what it yields gives what came.
Elsewhere = Callable[[torch.Tensor], AbstractContextManager[Callable[[], torch.Tensor | None]]]


def is_leaf(node: Node) -> bool:
    """Whether a leaf's gradient ends here: autograd adds it to `grad`."""
    return type(node).__name__ == "AccumulateGrad"


@contextlib.contextmanager
def taken(node: Node, add: Callable[[torch.Tensor], None], elsewhere: Elsewhere) -> Iterator[None]:
    """Around a backward pass: the gradient that comes to a node goes elsewhere.

    Args:
        node: of a leaf, whose `grad` and hooks are the same after it; or of a leaf's cast.
        add: gets the gradient, if there is one.
        elsewhere: where hooks that cannot be kept from running put it.
    """
    if is_leaf(node):
        with _taken_of_leaf(node, add, elsewhere):
            yield
        return

    def take(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None]:
        if gradients[0] is not None:
            add(gradients[0])
        return (None,)

    handle = node.register_prehook(take)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _taken_of_leaf(
    node: Any, add: Callable[[torch.Tensor], None], elsewhere: Elsewhere
) -> Iterator[None]:
    leaf: torch.Tensor = node.variable
    before, leaf.grad = leaf.grad, None
    hooks: list[Any] = [leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)]
    # Autograd holds these dicts themselves.
    contents = [(one, list(one.items())) for one in hooks if one]
    for one, _ in contents:
        one.clear()
    gradient = None
    try:
        with elsewhere(leaf) as came:
            yield
            gradient = came() if leaf.grad is None else leaf.grad
    finally:
        leaf.grad = before
        for one, entries in contents:
            one.update(entries)
    if gradient is not None:
        add(gradient)
