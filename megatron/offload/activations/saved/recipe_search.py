# SPDX-License-Identifier: Apache-2.0
"""One walk through autograd's graph, from a tensor to what others have saved: `RecipeSearch`.

The finder of recipes begins one for each tensor; it ends at `AvailableTensors`. It collects a
program, and compares nothing.

Note [Saved once]
Where a few heads of keys and values serve many queries, models repeat them for attention, which
saves the repeats. What was repeated is saved by no operation. So one of the repeats is cut out of
the target, and is saved instead. A norm that subtracts a mean for its deviation and once more for
its result has saved the same bytes before: a common subexpression.

Note [Written to unseen]
Optimizers and sharded training give a parameter other values and other memory through `data`, and
modules write to their buffers so: averages, scales, statistics. Autograd does not notice it, and
what it has saved itself is not affected. So a recipe copies those that are small.

Note [Layouts that the graph does not show]
A copy may lie in memory otherwise than what it is of (`x.t().contiguous()`), and its node does not
say how. That matters where the copy is not the target, whose layout is known: a CPU computes most
values in vectors and the last few one by one, and some functions then differ in the last bit. So it
is with what was made of a target to be saved instead: it lies as the target does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.activations.saved.autograd_graph import origin_of
from megatron.offload.activations.saved.available import (
    AvailableTensors,
    Edge,
    Held,
    copy_of,
    parameter_of,
)
from megatron.offload.activations.saved.recipe import Step
from megatron.offload.activations.saved.replay_operations import (
    add_scalar,
    layer_norm_of_decoded,
)
from megatron.offload.activations.saved.replayable_nodes import (
    ALL_EDGES,
    BIAS,
    DTYPE,
    EPS,
    NUMBER,
    SCALAR,
    NodeOperation,
    constants_of,
    edges_of,
    function_of,
    lacks,
    operation_of,
    shape_of,
)
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import is_away

_LEAST_DIMENSIONS = 4  # of tensors whose channels may come last
_MOST_NODES = 24  # that a search looks at: it ends soon in sums that go on through all layers


class RecipeSearch:
    """One walk through the graph, from a target to what is saved. It collects the program.

    Attributes:
        target: what is to be computed.
        depth: how many replays behind one another a replay of it takes.
        copied: numbers of the operands that a recipe copies: Note [Written to unseen].
        copied_bytes: of these.
        steps: so far.
        held: the operands.
        is_scalar_missing: the target is the sum of an operand and a scalar that is not known.
        saved: what was saved for it alone.
    """

    def __init__(
        self,
        available: AvailableTensors,
        target: torch.Tensor,
        save: Callable[[torch.Tensor], Held],
    ) -> None:
        self._available = available
        self.target = target
        self._save = save
        self.saved: list[Held] = []
        self._begin()

    def _begin(self) -> None:
        self._known: dict[Edge, int] = {}
        self._of_held: dict[int, int] = {}
        self._copies: set[int] = set()  # Note [Layouts that the graph does not show]; and views
        self._num_nodes = 0
        self.depth = 1
        self.copied: set[int] = set()
        self.copied_bytes = 0
        self.steps: list[Step] = []
        self.held: list[Held] = []
        self.is_scalar_missing = False

    def target_of(self, edge: Edge) -> int | None:
        """The target, the result of that edge, as a program names it; None: it cannot be had."""
        found = self._result(edge, is_target=True)
        if found is not None:
            return found
        self._begin()
        same = self._available.common_subexpression(edge)
        if same is not None:
            return self._step(Step(torch.clone, (self._operand(same),)))
        return self._result(edge, is_target=True) if self._find_repeated(edge) else None

    def _result(self, edge: Edge, *, is_target: bool = False) -> int | None:
        """A result of a node, as a program names it; None: it cannot be had.

        Args:
            edge: as `origin_of` gives it.
        """
        value = self._known.get(edge)
        if value is not None:
            return value
        held = None if is_target else self._available.result_of(edge) or self._returned(edge)
        if held is not None:
            value = self._operand(held)
            if edge in self._available.remade:
                self._copies.add(value)
        elif not is_target and edge in self._available.changed:
            return None
        elif self._num_nodes < _MOST_NODES:
            self._num_nodes += 1
            node, number = edge
            operation = operation_of(node)
            if operation is None:
                value = self._function(node)
            else:
                value = self._computed(node, number, operation, is_target)
        if value is not None:
            self._known[edge] = value
        return value

    def _returned(self, edge: Edge) -> Held | None:
        """Note [Results of modules]."""
        tensor = self._available.returned(edge)
        if tensor is None or 2 * tensor.nbytes > self.target.nbytes:
            return None
        return self._save_for(edge, tensor)

    def _save_for(self, edge: Edge, tensor: torch.Tensor) -> Held:
        """Saves a result that autograd does not."""
        held = self._available.results[edge] = self._save(tensor)
        self.saved.append(held)
        return held

    def _operand(self, held: Held) -> int:
        value = self._of_held.get(id(held))
        if value is None:
            number = len(self.held)
            value = self._of_held[id(held)] = ~number
            self.held.append(held)
            if isinstance(held, SavedView):
                recipe = held.saved.recipe
                self.depth = max(self.depth, 1 if recipe is None else recipe.depth + 1)
            elif isinstance(held, ResidentTensor) and (
                parameter_of(held) is not None or self._available.is_small_buffer(held)
            ):
                copy = copy_of(held)
                self.copied.add(number)
                self.copied_bytes += (held.held if copy is None else copy).nbytes
        return value

    def _step(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _find_repeated(self, edge: Edge) -> bool:
        """Saves what the target repeats: Note [Saved once]. Returns whether it repeats anything."""
        node, number = edge
        while _runs(node) in (torch.reshape, torch.clone):  # which leave values in their order
            node, number = origin_of(*node.next_functions[0])
        if _runs(node) not in (torch.Tensor.expand, torch.Tensor.repeat):
            return False
        source = origin_of(*node.next_functions[0])
        if source[0] is None or getattr(source[0], "variable", None) is not None:
            return False
        shape, once = shape_of((node, number)), shape_of(source)
        if 2 * math.prod(once) > math.prod(shape):
            return False
        repeats = self.target.detach().reshape(shape)
        for dim, size in enumerate((1,) * (len(shape) - len(once)) + once):
            repeats = repeats.narrow(dim, 0, size)
        one = repeats.clone(memory_format=torch.contiguous_format).reshape(once)
        self._available.remade.add(source)
        self._save_for(source, one)
        return True

    def _function(self, node: Any) -> int | None:
        compute = function_of(node)
        if compute is None:
            return None
        held = self._available.held_by_function(node)
        if held is None:
            return None
        return self._step(Step(compute, tuple(self._operand(one) for one in held)))

    def _computed(
        self, node: Any, number: int, operation: NodeOperation, is_target: bool
    ) -> int | None:
        if number and NUMBER not in operation.constants:  # the statistics of a norm
            return None
        operation = operation.instead(node) or operation
        names, edges = operation.inputs, node.next_functions
        if names is ALL_EDGES:
            edges = edges_of(node, operation, number)
            names = (None,) * len(edges)
        missing = operation.missing
        is_cast_target = is_target and operation.constants == (DTYPE,)
        if not is_cast_target:
            for edge, name in zip(edges, names, strict=False):
                if name is None and self._is_out_of_reach(edge):
                    return None
        values: list[int | None] = []
        for position, name in enumerate(names):
            value = self._input(node, edges, position, name)
            if value is None and name is None:
                if missing is SCALAR and is_target and position and edges[position][0] is None:
                    self.is_scalar_missing = True
                    continue
                if is_cast_target:
                    value = self._narrower(edges)
                if value is None:
                    return None
            elif value is None and name is BIAS and BIAS not in operation.optional:
                value = self._frozen_bias(values[-1])
                if value is None and values[-1] is not None:  # a norm without weight has no bias
                    return None
            elif value is None and not (name in operation.optional and lacks(node, name)):
                return None
            values.append(value)
        if operation.listed:
            listed = self._available.held_in_list(node, operation.listed)
            if listed is None:
                return None
            values += [None if one is None else self._operand(one) for one in listed]
        constants: tuple[Any, ...] = ()
        if operation.constants:
            constants = constants_of((node, number), operation)
        function = operation.operation
        if missing is SCALAR and len(names) == 1:  # of `rsub`
            if not is_target:
                return None
            self.is_scalar_missing = True
        elif self.is_scalar_missing and is_target and missing is SCALAR:
            function, constants = add_scalar, ()
        elif missing is EPS:
            eps = self._eps(values[1])
            if eps is None:
                return None
            constants = (*constants, eps)
            if not self._available.is_exact:  # the deviations are those of the exact operand
                function = layer_norm_of_decoded
        is_of_copy = any(one in self._copies for one in values)
        if is_of_copy and operation.by_layout and constants != (1,):
            return None
        value = self._step(Step(function, tuple(values), constants))
        if is_of_copy or _is_copy(node, number):
            self._copies.add(value)
        return value

    def _is_out_of_reach(self, edge: Edge) -> bool:
        """Whether a result can be no operand, as is seen at once: the search need not begin."""
        edge = origin_of(*edge)
        node, _ = edge
        return (
            node is not None
            and operation_of(node) is None
            and self._available.result_of(edge) is None
            and self._available.returned(edge) is None
            and getattr(node, "variable", None) is None
            and function_of(node) is None
        )

    def _input(self, node: Any, edges: Any, position: int, name: str | None) -> int | None:
        if name is not None:
            held = self._available.held_by(node, name)
            if held is not None:
                return self._operand(held)
        if position >= len(edges):
            return None
        edge = origin_of(*edges[position])
        following, _ = edge
        if following is None:
            return None
        leaf = getattr(following, "variable", None)  # of its accumulator
        if leaf is not None:
            return self._leaf(leaf)
        return self._result(edge)

    def _eps(self, weight: int | None) -> float | None:
        parameter = self._parameter(weight)
        return None if parameter is None else self._available.norms.eps_of(parameter)

    def _frozen_bias(self, weight: int | None) -> int | None:
        """A norm's bias that has no gradient, so that the graph does not show it."""
        parameter = self._parameter(weight)
        bias = None if parameter is None else self._available.norms.bias_of(parameter)
        return None if bias is None or bias.requires_grad else self._leaf(bias)

    def _parameter(self, value: int | None) -> torch.nn.Parameter | None:
        return None if value is None or value >= 0 else parameter_of(self.held[~value])

    def _leaf(self, leaf: torch.Tensor) -> int | None:
        if is_away(leaf) or leaf.device != self._available.device:
            return None
        return self._operand(ResidentTensor(leaf, self._available.scope))

    def _narrower(self, edges: Any) -> int | None:
        """A cast to more bits, of which the narrower tensor is not saved: it is made and saved."""
        source, number = origin_of(*edges[0])
        if source is None or getattr(source, "variable", None) is not None:
            return None
        dtype = source._input_metadata[number].dtype
        target = self.target
        if not (dtype.is_floating_point and target.dtype.is_floating_point):
            return None
        if dtype.itemsize >= target.dtype.itemsize:
            return None
        self._available.remade.add((source, number))
        return self._operand(self._save_for((source, number), target.detach().to(dtype)))


def _runs(node: Any) -> Any:
    """The operation that a replay runs for a node; None: there is none."""
    operation = None if node is None else operation_of(node)
    return None if operation is None else operation.operation


def _is_copy(node: Any, number: int) -> bool:
    """Whether a result may lie otherwise than the operand: a clone, a cast that may say so too."""
    name = type(node).__name__
    if name != "ToCopyBackward0":
        return name == "CloneBackward0"
    source, of_source = node.next_functions[0]
    made, of = node._input_metadata[number], source._input_metadata[of_source]
    return made.dtype is of.dtype or len(made.shape) >= _LEAST_DIMENSIONS
