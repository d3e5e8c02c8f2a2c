# SPDX-License-Identifier: Apache-2.0
"""Which values of a compiled graph a codec may round: `roundable`.

`compiled_graphs.py` asks it about each graph once. In eager `encoding_of` decides by the operations
that autograd knows; within a graph it knows none.

Note [What a graph has rounded]
In eager formulas of gradients say what is saved. What a graph saves its partitioner has chosen, and
backward computes other values of it again: a score that is rounded, or a mask beside it, would be
an exponent. So a value is rounded for what made it, and the rest stays exact:

- results of matrix products, convolutions, embeddings and attention, and sums of two values with
  gradients, which the residual stream is; their views, and casts of them;
- whatever backward only multiplies with gradients, in products of matrices;
- if they depend on an input that wants a gradient: no tables of angles, no features of a frozen
  part;
- not what a maximum is taken of or chosen among, back to the product that made it: softmax and
  cross entropy begin with one, so scores and logits are exact, and routers choose the same again.
  A group with a masked score would lose all others.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from megatron.offload.integration.torch.graph_nodes import PRODUCTS, made_of

_aten = torch.ops.aten
_ATTENTION = "_attention"  # in the names of operations, whose first result is the values
_CONVOLUTIONS = frozenset((_aten.convolution.default,))
_SUMS = frozenset((_aten.add.Tensor,))
_MADE_BY = PRODUCTS | _CONVOLUTIONS | {_aten.embedding.default}
_COPIES = frozenset(
    (_aten._to_copy.default, _aten.clone.default, torch.ops.prims.convert_element_type.default)
)
_MAXIMA = frozenset(
    (
        *(_aten.amax.default, _aten.max.dim, _aten.max.default, _aten.logsumexp.default),
        *(_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default),
        *(_aten.argmax.default, _aten.topk.default, _aten.sort.default),
    )
)


def roundable(forward: fx.Graph, backward: fx.Graph) -> set[fx.Node]:
    """The nodes of a forward graph whose values a codec may round for backward.

    Args:
        forward: its first inputs are those of which backward gives gradients.
        backward: gives a gradient for each, or None.
    """
    varying = _with_gradients(forward, backward)
    exponents = _exponents(forward)
    factors = {one.name for one in backward.find_nodes(op="placeholder") if _is_factor(one)}
    found: set[fx.Node] = set()
    for node in forward.nodes:
        if node not in varying or node in exponents:
            continue
        origin = node.args[0] if node.target in _COPIES else made_of(node)
        is_made = origin is None and _is_made(node, varying)
        if origin in found or is_made or node.name in factors:
            found.add(node)
    return found


def _is_factor(node: fx.Node) -> bool:
    """Whether all that uses a value, or a view of it, are products of matrices."""
    return bool(node.users) and all(
        user.target in PRODUCTS or (made_of(user) is node and _is_factor(user))
        for user in node.users
    )


def _is_made(node: fx.Node, varying: set[fx.Node]) -> bool:
    """Whether an operation that is none of views makes what may be rounded."""
    if node.target is operator.getitem:
        maker, place = node.args
        return isinstance(maker, fx.Node) and not place and _ATTENTION in str(maker.target)
    if node.target in _SUMS:
        return len(node.all_input_nodes) == 2 and varying.issuperset(node.all_input_nodes)
    return node.target in _MADE_BY


def _with_gradients(forward: fx.Graph, backward: fx.Graph) -> set[fx.Node]:
    """What is computed of inputs that want gradients, in floating point."""
    gradients: Any = backward.output_node().args[0]
    inputs = forward.find_nodes(op="placeholder")
    inputs = [one for one in inputs if one.name.startswith("primals")]
    if len(inputs) != len(gradients):  # a partitioner that we do not know
        return set()
    found = {one for one, gradient in zip(inputs, gradients, strict=True) if gradient is not None}
    for node in forward.nodes:
        inputs = [one for one in node.all_input_nodes if one.target is not _aten.detach.default]
        if found.intersection(inputs) and _is_floating(node.meta.get("val")):
            found.add(node)
    return found


def _is_floating(value: object) -> bool:
    """Whether a value may have a gradient; a tuple has such values in it."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, tuple | list)


def _exponents(graph: fx.Graph) -> set[fx.Node]:
    """What maxima are taken of or chosen among, back to the products that made it."""
    found: set[fx.Node] = set()
    todo = [one for one in graph.nodes if one.target in _MAXIMA]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if node.target not in PRODUCTS | _CONVOLUTIONS:
            todo += node.all_input_nodes
    return found
