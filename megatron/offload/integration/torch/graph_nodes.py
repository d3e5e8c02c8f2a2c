# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a compiled graph are: what shares bytes, what may change them, whose they are.

`compiled_graphs.py` rewrites the graphs, `graph_codec.py` chooses what a codec may round. Nothing
here changes a graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from megatron.offload.activations.saved.scope import name_of_call

PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")
)

_OVERWRITING = ("index_put", "scatter", "all_reduce", "_foreach")  # in inductor, where it can


def made_of(view: fx.Node) -> fx.Node | None:
    """What a view is of; None: it is none.

    Joint graphs have views whose tensors say nothing of the storage that they share.
    """
    first = view.args[0] if view.op == "call_function" and view.args else None
    if not isinstance(first, fx.Node):
        return None
    maker = first if view.target is operator.getitem else view
    is_view = getattr(maker.target, "is_view", False)
    storage = storage_of(view)
    return first if is_view or (storage is not None and storage == storage_of(first)) else None


def base_of(view: fx.Node) -> fx.Node:
    """What a view is of in the end."""
    while (origin := made_of(view)) is not None:
        view = origin
    return view


def may_change(node: fx.Node) -> bool:
    """Whether an operation that gets a tensor, or a view of it, may write its result there."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if isinstance(user.target, torch._ops.HigherOrderOperator) or any(
                word in str(user.target) for word in _OVERWRITING
            ):
                return True
            if user not in seen and made_of(user) in seen:
                seen.add(user)
                todo.append(user)
    return False


def may_be_fused(product: fx.Node) -> bool:
    """Whether inductor may make one operation of a matrix product and what takes its result."""
    shape, todo = product.meta["val"].shape, [product]
    while todo:
        node = todo.pop()
        views = [user for user in node.users if made_of(user) is node]
        others = [user for user in node.users if user not in views and user.op != "output"]
        is_taken = any(user.target not in PRODUCTS for user in others)
        if is_taken and node.meta["val"].shape == shape:
            return True
        todo += views
    return False


def layer_of(node: fx.Node, layers: Collection[str]) -> str:
    """The call of a layer that makes a tensor, by its name; empty: none of these."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    for key, (path, _) in reversed(stack.items()):
        # As it is written in the code of the graph: L['self'].model.layers[3], or with _modules.
        name = re.sub(r"_modules\[['\"]([^'\"]+)['\"]\]", r"\1", path)
        name = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", name.partition(".")[2])
        if not name:
            continue
        for layer in layers:
            if layer == name or layer.endswith(f".{name}"):
                _, _, number = key.partition("@")  # of calls before this one
                return name_of_call(layer, int(number or 0) + 1)
    return ""


def storage_of(node: Any) -> int | None:
    """The address of its storage, which the graph keeps alive."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def bytes_of(node: fx.Node) -> int:
    """Of its storage; of symbolic sizes by their hints."""
    num_bytes = node.meta["val"].untyped_storage().nbytes()
    return num_bytes if isinstance(num_bytes, int) else int(num_bytes.node.hint or 0)
