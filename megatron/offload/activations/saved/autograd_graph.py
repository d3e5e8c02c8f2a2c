# SPDX-License-Identifier: Apache-2.0
"""What a part of the autograd graph saved: `saved_tensors_between`, and `nodes_behind` others.

The engine calls it at the end of each layer's forward. It only reads the graph.

Note [Why per-node capture]
`torch.autograd.graph.saved_tensors_hooks` sees every saved tensor, but autograd then returns each
one, parameters included, as a new object: a parameter loses the attributes that Megatron's fused
gradient accumulation puts on it, and overlapped gradient reduction then fails. Hooks that we
register on single saved tensors after the layer has run leave parameters alone, see only what
autograd really kept, and do not nest with the hooks of other libraries.

Note [Saved tensors that have hooks]
Reading one calls its unpack hook: a checkpoint would recompute, and an earlier capture would read
its bytes back. So we yield such a saved tensor without its content. Nodes of `autograd.Function`,
and nodes with lists, show all that they saved or nothing, so one hook hides the others.

Note [Leaves]
The gradient accumulator of a saved leaf that requires a gradient holds the leaf as well, and hooks
do not replace that reference: moving the leaf frees nothing, so it stays. Some functions save
leaves of their own: detached copies of their inputs that only their node holds. An integration that
knows such a function gives the engine the type of its nodes; those copies are emptied when hooks
take over. A view that a function makes of its input and saves (Liger's kernels do) says that it is
a leaf that requires a gradient, and is none: what it is a view of has a node.

Note [Functions that hand on]
Full backward hooks of torch and ZeRO 3 put a function of their own around modules, to be called in
backward. Its results are its inputs, the same bytes with the same version counter. Such a function
is known by its name: of another one the graph does not show what it does, today or in a later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_RAW, _SAVED = "_raw_saved_", "_saved_"
_Attributes = list[tuple[str, str]]  # with the `SavedTensor`s, and with their tensors
_OF_FUNCTION = [("_raw_saved_tensors", "saved_tensors")]  # of torch.autograd.Function
_MOST_VIEWS = 4  # of views, one of the other
_LIST_TYPES = (tuple, list)
_HAND_ON = {  # by module and class: Note [Functions that hand on]
    ("torch.nn.modules._functions", "BackwardHookFunction"),
    ("deepspeed.runtime.zero.parameter_offload", "PreBackwardFunctionForModule"),
    ("deepspeed.runtime.zero.parameter_offload", "PostBackwardFunctionModule"),
}
_FunctionNode = torch._C._FunctionBase
_attributes_of_node_type: dict[type, _Attributes] = {}  # torch's own types


def saved_tensors_between(
    outputs: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    walked: Iterable[Any] = (),
) -> Iterator[tuple[Any, Any, torch.Tensor | None]]:
    """What the nodes that lead from `inputs` to `outputs` saved, in forward order.

    It leaves out a tensor that was modified in place since it was saved: autograd itself raises
    where backward needs that one.

    Args:
        outputs: what the layer returned.
        inputs: what it was called with; the walk ends there, and also at a view that autograd
            refuses to use again.
        walked: nodes at which the walk ends too, and whose saved tensors it does not yield.

    Yields:
        The node, a `torch._C._autograd.SavedTensor` to register hooks on, and the tensor that it
        holds, or None if it has hooks already. Earlier operations come first: autograd runs nodes
        in descending order of sequence number, so backward needs the last ones first.
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


def nodes_behind(begin: Iterable[Any], beyond: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes that backward from some would run, themselves too.

    Args:
        begin: nodes; None among them is none.
        beyond: nodes at which the walk ends, and which it does not yield.
    """
    left, seen = list(begin), {None, *beyond}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def is_kept_by_accumulator(tensor: torch.Tensor) -> bool:
    """Whether autograd holds a saved leaf a second time, so that moving it frees nothing.

    See Note [Leaves].
    """
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    base = tensor._base
    return base is None or node_of(base) is None


def is_view_of_leaf(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the node that made a view keeps a leaf with its storage; see Note [Leaves]."""
    if not tensor.requires_grad or not tensor._is_view():
        return False
    node = node_of(tensor)
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return False
        ((node, _),) = node.next_functions
        leaf: torch.Tensor | None = getattr(node, "variable", None)  # of its accumulator
        if leaf is not None:
            return leaf.layout is torch.strided and leaf.untyped_storage()._cdata == storage._cdata
    return False


def node_of(tensor: torch.Tensor) -> Any | None:
    """The node that made the tensor; None for a leaf and for a view whose base was changed."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # its base was changed in place
        return None


def origin_of(node: Any, number: int) -> tuple[Any, int]:
    """The node and the number of the result that this result is: Note [Functions that hand on]."""
    while isinstance(node, _FunctionNode):
        function = getattr(type(node), "_forward_cls", None)
        if (getattr(function, "__module__", ""), getattr(function, "__name__", "")) not in _HAND_ON:
            break
        node, number = node.next_functions[number]
    return node, number


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
    """Names of a node's attributes that hold what it saved; empty: it never saves anything."""
    # An `autograd.Function` that a forward pass defines is a new type each time.
    if isinstance(node, _FunctionNode):
        return _OF_FUNCTION
    names = _attributes_of_node_type.get(type(node))
    if names is None:
        names = _attributes_of_node_type[type(node)] = [
            (name, _SAVED + name.removeprefix(_RAW)) for name in dir(node) if name.startswith(_RAW)
        ]
    return names
