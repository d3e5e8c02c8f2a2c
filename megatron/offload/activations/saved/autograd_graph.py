# SPDX-License-Identifier: Apache-2.0
"""What a part of the autograd graph saved: `saved_tensors_between`.

The engine calls it at the end of each layer's forward. It only looks.

Note [Why per-node capture]
`torch.autograd.graph.saved_tensors_hooks` sees every saved tensor, but each one, parameters
included, comes back as a new object: a parameter loses the attributes that Megatron's fused
gradient accumulation puts on it, and overlapped gradient reduction then fails. Hooks registered on
single saved tensors after the layer has run leave parameters alone, see only what autograd really
kept, and do not nest with anybody else's.

Note [Saved tensors that have hooks]
To look at one is to call its unpack hook: a checkpoint would be recomputed, what an earlier capture
took would be read back. Such a tensor is told without its content. Nodes of `autograd.Function`,
and those with lists, show all that they saved or nothing, so one hook hides the others.

Note [Leaves]
A saved leaf that requires a gradient is held by its gradient's accumulator as well, which hooks do
not replace: to move it frees nothing, so it stays where it is. Some functions save leaves of their
own making, detached copies of their inputs that nobody else refers to. Whoever knows such a
function tells the engine the type of its nodes; those copies are emptied when hooks take over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_RAW, _SAVED = "_raw_saved_", "_saved_"
_Attributes = list[tuple[str, str]]  # with the `SavedTensor`s, and with their tensors
_OF_FUNCTION = [("_raw_saved_tensors", "saved_tensors")]  # of torch.autograd.Function
_LIST_TYPES = (tuple, list)
_attributes_of_node_type: dict[type, _Attributes] = {}  # torch's own types


def saved_tensors_between(
    outputs: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    walked: Iterable[Any] = (),
) -> Iterator[tuple[Any, Any, torch.Tensor | None]]:
    """What the nodes that lead from `inputs` to `outputs` saved, in forward order.

    A tensor that was modified in place since it was saved is left out: autograd itself raises if
    backward needs it.

    Args:
        outputs: what the layer returned.
        inputs: what it was called with; the walk does not go behind them, unless autograd refuses
            to use one again.
        walked: nodes that the walk does not go behind either, nor tells what they saved.

    Yields:
        The node, a `torch._C._autograd.SavedTensor`, to register hooks on, and the tensor that it
        holds, or None if hooks are registered already. Those of earlier operations come first:
        autograd runs nodes in descending order of sequence number, so backward needs the last ones
        first.
    """
    seen: set[Any] = {*walked, *(node_of(tensor) for tensor in inputs)}
    stack: list[Any] = [node_of(tensor) for tensor in outputs]
    nodes: list[tuple[Any, _Attributes]] = []  # of those that save
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        attributes = _attributes_of(node)
        if attributes:
            nodes.append((node, attributes))
        for following, _ in node.next_functions:
            stack.append(following)
    nodes.sort(key=lambda one: one[0]._sequence_nr())
    for node, attributes in nodes:
        for saved, tensor in _saved_by(node, attributes):
            yield node, saved, tensor


def is_kept_by_accumulator(tensor: torch.Tensor) -> bool:
    """Whether autograd holds a saved leaf a second time, so that moving it frees nothing.

    Note [Leaves] says more.
    """
    return tensor.requires_grad and tensor.is_leaf


def node_of(tensor: torch.Tensor) -> Any | None:
    """What made the tensor; None for a leaf, and for a view that autograd refuses to use again."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # its base was changed in place
        return None


def _saved_by(node: Any, attributes: _Attributes) -> list[tuple[Any, torch.Tensor | None]]:
    found: list[tuple[Any, torch.Tensor | None]] = []
    for raw_name, name in attributes:
        try:
            raw = getattr(node, raw_name)
        except RuntimeError:  # another backward pass has freed it
            continue
        raws = raw if isinstance(raw, _LIST_TYPES) else (raw,)
        hooked = [one for one in raws if getattr(one, "unpack_hook", None) is not None]
        if hooked:
            found.extend((one, None) for one in hooked)
            continue
        try:
            tensor = getattr(node, name)  # unlike `SavedTensor.data`, this checks versions
        except RuntimeError:
            continue
        tensors = tensor if raws is raw else (tensor,)
        for one, saved in zip(raws, tensors, strict=True):
            if isinstance(saved, torch.Tensor):
                found.append((one, saved))
    return found


def _attributes_of(node: Any) -> _Attributes:
    """What a node has of what it saved; empty: it never saves anything."""
    # An `autograd.Function` that is defined in a forward pass has a type of its own each time.
    if isinstance(node, torch._C._FunctionBase):
        return _OF_FUNCTION
    names = _attributes_of_node_type.get(type(node))
    if names is None:
        names = _attributes_of_node_type[type(node)] = [
            (name, _SAVED + name.removeprefix(_RAW)) for name in dir(node) if name.startswith(_RAW)
        ]
    return names
