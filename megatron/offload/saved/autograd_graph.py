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
and those with lists, show all that they saved or nothing, so one hook hides the others. Old
versions of torch (2.6) do not tell which have hooks; there all are looked at.

Note [Leaves]
A saved leaf that requires a gradient is held by its gradient's accumulator as well, which hooks do
not replace: to move it frees nothing, so it stays where it is. Some functions save leaves of their
own making, detached copies of their inputs that nobody else refers to. Whoever knows such a
function tells the engine the type of its nodes; those copies are emptied when hooks take over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

_RAW, _SAVED = "_raw_saved_", "_saved_"
_FUNCTION_NODE = ("_raw_saved_tensors", "saved_tensors")  # of torch.autograd.Function
# Weak: an `autograd.Function` that is defined in a forward pass has a type of its own each time.
_attributes_of_node_type: MutableMapping[type, list[tuple[str, str]]] = WeakKeyDictionary()


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
    nodes: list[Any] = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        stack.extend(following for following, _ in node.next_functions)
    nodes.sort(key=lambda node: node._sequence_nr())
    for node in nodes:
        yield from ((node, saved, tensor) for saved, tensor in _saved_by(node))


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


def _saved_by(node: Any) -> Iterator[tuple[Any, torch.Tensor | None]]:
    names = _attributes_of_node_type.get(type(node))
    if names is None:
        names = _attributes_of_node_type[type(node)] = _saved_attributes(node)
    for raw_name, name in names:
        try:
            raw = getattr(node, raw_name)
        except RuntimeError:  # another backward pass has freed it
            continue
        is_list = isinstance(raw, tuple | list)
        hooked = [saved for saved in (raw if is_list else (raw,)) if _has_hooks(saved)]
        if hooked:
            yield from ((saved, None) for saved in hooked)
            continue
        try:
            tensor = getattr(node, name)  # unlike `SavedTensor.data`, this checks versions
        except RuntimeError:
            continue
        pairs = zip(raw, tensor, strict=True) if is_list else ((raw, tensor),)
        yield from (pair for pair in pairs if isinstance(pair[1], torch.Tensor))


def _has_hooks(saved: Any) -> bool:
    return getattr(saved, "unpack_hook", None) is not None


def _saved_attributes(node: Any) -> list[tuple[str, str]]:
    """Pairs of the attribute with the `SavedTensor`s and the one with their tensors."""
    names = dir(node)
    if _FUNCTION_NODE[0] in names:
        return [_FUNCTION_NODE]
    return [(name, _SAVED + name.removeprefix(_RAW)) for name in names if name.startswith(_RAW)]
