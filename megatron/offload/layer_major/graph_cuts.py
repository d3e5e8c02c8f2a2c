# SPDX-License-Identifier: Apache-2.0
"""Autograd's graph of a forward pass, cut where a unit ends: `GraphCuts`.

Note [Cutting the graph]
Backward is to run unit by unit, so the graph of a unit must end where the unit begins. A tensor
that a layer takes from an earlier unit comes to it through a `_DetachAtUnit`: the same bytes, but
the graph behind them is not reached. Its gradient arrives there and waits in a `CutTensor`. When
all later units have had their backward passes, the gradient goes on from where the tensor was made.
What is kept of that tensor is its place in the graph, never its bytes.

Note [The sums of autograd]
Autograd adds the gradients of a tensor in the order in which they come, from the last use in
forward to the first. So all layers of a unit that take a tensor get one and the same detached one,
and backward of a unit begins there with the sum of later units. A leaf (a weight that is tied, or
that layers share) is not cut. What a later unit has for it would be added to `grad` before the
other micro-batches' turns: it is taken from there (`leaf_gradients.py`), waits like the gradient
of a tensor, and goes on where autograd would add it up with those of the next unit that uses it.

A list or a dict among the arguments stays the caller's: what a layer writes there is for all.
Detached tensors are put into it, and taken out again before the next layer, which gets its own.

What a layer does not take as an argument (a sum of all layers' outputs, say) is not cut. Backward
would run on into an earlier unit, with a part of its gradient: `check` finds that first and raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.offload.activations.saved.autograd_graph import nodes_behind
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_major.boundary import Boundary
from megatron.offload.layer_major.config import refusal
from megatron.offload.layer_major.leaf_gradients import Elsewhere, is_leaf, taken


@dataclass
class CutTensor:
    """A tensor that a unit has made and layers of later ones take: the graph is cut there.

    Attributes:
        edge: where it is made.
        scope: the same, for people.
        boundary: where gradients may wait; None: in memory.
        gradient: the sum of those that have come back so far, if it is in memory.
        waiting: of the boundary, if it is there.
        is_changed: a later unit has changed it in place, and only its own layers know of that.
    """

    edge: GradientEdge
    scope: Scope
    boundary: Boundary | None = None
    gradient: torch.Tensor | None = None
    waiting: Any = None
    is_changed: bool = False

    def add(self, gradient: torch.Tensor) -> None:
        """The gradient has come, of all consumers in a unit; the sum before went on to them."""
        before = self.gradient
        self.gradient = gradient if before is None else before + gradient

    def take(self) -> torch.Tensor | None:
        """The sum, which is not kept here: `_DetachAtUnit` refers to this as long as the loss's
        graph is there."""
        gradient, self.gradient = self.gradient, None
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            assert self.boundary is not None
            gradient = self.boundary.take(waiting)
        return gradient

    def put(self) -> None:
        """No backward pass is under way: the sum so far may wait outside of memory.

        Not before: autograd may accumulate in place into a gradient that it alone refers to.
        """
        if self.boundary is not None and self.gradient is not None:
            self.waiting = self.boundary.put(self.gradient, self.scope)
            if self.waiting is not None:
                self.gradient = None

    def read_ahead(self) -> None:
        """The sum is needed soon."""
        if self.boundary is not None and self.waiting is not None:
            self.boundary.read_ahead(self.waiting)


@dataclass
class _Entered:
    """What the layers of a unit get in place of a tensor of an earlier one.

    Attributes:
        cut: where the graph is cut.
        edge: where it goes on in the unit.
        of: the tensor; it is the model's whether it lives.
        tensor: that they get; None: no further layer can take it.
    """

    cut: CutTensor
    edge: GradientEdge
    of: weakref.ref[torch.Tensor]
    tensor: torch.Tensor | None


class GraphCuts:
    """The parts of one forward pass's graph, a part for each unit.

    Autograd numbers nodes by thread, and only those count that the thread of the forward pass has
    made. It meets none of other passes, see Note [Autocast's cache]. What the caller has made
    before the step is refused or, if its number is as large, run by each pass that reaches it, as
    in a step that runs one micro-batch after the other.

    Args:
        micro_batch: whose pass it is.
        boundary: where gradients may wait; None: in memory.
    """

    def __init__(self, micro_batch: int = 0, boundary: Boundary | None = None) -> None:
        self._micro_batch = micro_batch
        self._boundary = boundary
        self._begins: list[int] = []  # autograd's number of the first node of each part
        self._cuts: list[dict[Any, CutTensor]] = []  # of tensors made in each, by their edges
        self._entered: list[dict[Any, _Entered]] = []  # what layers of each have taken
        # By unit: leaves whose gradients go on in an earlier one, and what they wait in.
        self._shared: dict[int, list[tuple[Any, CutTensor]]] = {}
        # Detached tensors in lists and dicts of the caller: where, which, and what was there.
        self._put_into: list[tuple[Any, Any, torch.Tensor, Any]] = []

    def begin(self) -> None:
        """The next unit begins."""
        autograd: Any = torch._C._autograd
        self._begins.append(autograd._get_sequence_nr())
        self._cuts.append({})
        self._entered.append({})

    def end(self) -> None:
        """The unit under way ends; other micro-batches come before the next one."""
        for one in self._entered[-1].values():
            if one.tensor is not None and one.tensor.grad_fn is not one.edge.node:
                one.cut.is_changed = True
            one.tensor = None

    def enter(self, values: Any) -> Any:
        """A layer's arguments, with detached tensors in place of what earlier units have made."""
        for one in self._entered[-1].values():
            if one.of() is None:  # the model is through with it: so are we
                one.tensor = None
        return self._enter(values)

    def _enter(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._detached(value)
        if isinstance(value, list | dict):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in list(pairs):
                if (made := self._enter(one)) is not one:
                    value[key] = made
                    self._put_into.append((value, key, made, one))
            return value
        if isinstance(value, tuple):
            return _like(value, [self._enter(one) for one in value])
        leaves, spec = tree_flatten(value)
        parts = [self._enter(one) if one is not value else one for one in leaves]
        return value if _are_same(parts, leaves) else tree_unflatten(parts, spec)

    def leave(self) -> None:
        """Another layer comes next: lists and dicts have in them what was put there."""
        put_into, self._put_into = self._put_into, []
        for container, key, entry, before in reversed(put_into):
            if isinstance(container, list):
                places = [i for i, one in enumerate(container) if one is entry]
            else:
                places = [key] if container.get(key) is entry else []
            for place in places:
                container[place] = before

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None or tensor.grad_fn._sequence_nr() >= self._begins[-1]:
            return tensor
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        before = self._entered[-1].get(key)
        if before is not None and before.tensor is not None:
            return before.tensor
        number = edge.node._sequence_nr()
        part = max(i for i, begins in enumerate(self._begins) if begins <= number or not i)
        made = CutTensor(edge, Scope(part, self._micro_batch), self._boundary)
        cut = self._cuts[part].setdefault(key, made)
        if cut.is_changed:
            raise refusal(
                "a layer has changed in place a tensor that a later unit takes too, whose gradient "
                "a layer-major step cannot follow; run this model micro-batch by micro-batch"
            )
        marker = torch.empty(0, requires_grad=True)
        entered: torch.Tensor = _DetachAtUnit.apply(marker, tensor.detach(), cut)
        self._entered[-1][key] = _Entered(
            cut, get_gradient_edge(entered), weakref.ref(tensor), entered
        )
        return entered

    def find_shared(self, nodes: Sequence[Node], *, autocasts: bool = False) -> None:
        """The forward pass has ended: which leaves several units use.

        Args:
            nodes: where backward of the last unit begins.
            autocasts: autocast casts a weight once in a pass that does not pause.
        """
        starts = [[one.edge.node for one in cuts.values()] for cuts in self._cuts]
        starts[-1] = [*starts[-1], *nodes]
        before: dict[Any, tuple[int, Node]] = {}  # the unit so far that has used a leaf, and where
        for unit, of_unit in enumerate(starts):
            for key, node in _uses_of_leaves(of_unit, autocasts=autocasts).items():
                if key in before:
                    earlier, goes_on = before[key]
                    made = CutTensor(
                        GradientEdge(goes_on, 0), Scope(earlier, self._micro_batch), self._boundary
                    )
                    self._cuts[earlier][goes_on, 0] = made
                    self._shared.setdefault(unit, []).append((node, made))
                before[key] = unit, node

    @contextlib.contextmanager
    def backward(self, unit: int, elsewhere: Elsewhere) -> Iterator[None]:
        """Around a backward pass: gradients of leaves that earlier units use go on there."""
        with contextlib.ExitStack() as contexts:
            for node, cut in self._shared.pop(unit, ()):
                contexts.enter_context(taken(node, cut.add, elsewhere))
            yield

    def has_gradients(self, unit: int) -> bool:
        """Whether later units have handed gradients back to this one."""
        return any(
            one.gradient is not None or one.waiting is not None for one in self._cuts[unit].values()
        )

    def put_gradients(self) -> None:
        """A backward pass has ended: gradients may wait outside of memory."""
        for one in (one for cuts in self._cuts for one in cuts.values()):
            one.put()

    def read_ahead(self, unit: int) -> None:
        """Backward of a unit comes soon: it begins with gradients, and adds to others."""
        for one in self._cuts[unit].values():
            one.read_ahead()
        for entered in self._entered[unit].values():
            entered.cut.read_ahead()

    def roots(self, unit: int) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where the backward pass of a unit begins, and with which gradients. Asked once.

        Raises:
            ConfigurationError: see `check`.
        """
        edges, gradients = [], []
        # Of what the unit has made, and of what it took from earlier ones: the sum goes on there.
        places = [(one, one.edge) for one in self._cuts[unit].values()]
        places += [(one.cut, one.edge) for one in self._entered[unit].values()]
        for cut, edge in places:
            if (gradient := cut.take()) is not None:
                edges.append(edge)
                gradients.append(gradient)
        self._cuts[unit], self._entered[unit] = {}, {}
        self.check(unit, [edge.node for edge in edges])
        return edges, gradients

    def check(self, unit: int, nodes: Sequence[Node]) -> None:
        """Raises ConfigurationError if the graph of a unit reaches into an earlier one."""
        begins = self._begins[unit] if unit else 0
        for node in nodes_behind(nodes):
            if node._sequence_nr() < begins:
                raise refusal(
                    f"a tensor that was made before a unit ({node.name()}; by an earlier one, or "
                    "before the step) is used in it beside its layers' inputs, which a layer-major "
                    "step cannot follow; run this model micro-batch by micro-batch"
                )


def _like(value: Any, parts: list[Any]) -> Any:
    """A tuple with these parts; the same one if they are its own."""
    if _are_same(parts, value):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def _uses_of_leaves(nodes: Sequence[Node], *, autocasts: bool) -> dict[Any, Node]:
    """Where the gradients of each leaf come together in a unit, by what is the same in all units.

    That is where autograd adds them to `grad`; of a leaf that autocast has cast, behind the cast.
    """
    found: dict[Any, Node] = {}
    casts: dict[Node, list[Node]] = {}
    for node in nodes_behind(nodes):
        if is_leaf(node):
            found[node] = node
        elif autocasts and node.name() == "ToCopyBackward0":
            leaf = node.next_functions[0][0]
            if leaf is not None and is_leaf(leaf):
                casts.setdefault(leaf, []).append(node)
    # Several in one unit are the model's own: autocast makes one.
    return found | {("cast", leaf): own[0] for leaf, own in casts.items() if len(own) == 1}


class _DetachAtUnit(torch.autograd.Function):
    """The identity, at which backward ends: gradients go to a `CutTensor`."""

    @staticmethod
    def forward(ctx: Any, marker: torch.Tensor, tensor: torch.Tensor, cut: CutTensor) -> Any:
        ctx.cut = cut
        return tensor.detach()  # no view: layers may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.cut.add(gradient)
        return None, None, None
