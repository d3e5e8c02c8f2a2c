# SPDX-License-Identifier: Apache-2.0
"""Finds how a saved tensor can be computed from others that are saved: `RecipeFinder`.

The hooks ask it before a tensor moves or stays. It reads autograd's graph from the node that made
the tensor to what earlier operations saved, and compares bytes. It changes nothing.

Note [When a recipe is trusted]
The graph shows which operation made a tensor and of what. It does not show everything (the eps of a
norm, the 1 of `1 + x`), and that an operation gives the same bytes again is a claim. So a recipe
counts where it has given the saved bytes: the first `_NUM_PROOFS` times that a layer saves a tensor
so, it is run at once and its result compared. Another shape, stride, dtype or constant is another
recipe. One that fails once is never used again in that layer.

Note [Constants that the graph does not show]
The eps of a norm is what the module that owns its weight says, confirmed by the bytes, and again in
each replay by the deviations that autograd has saved, which another eps changes. A scalar
that was added is computed from the bytes. It may be another one next time, or in another place of
the layer, and nothing would show that. So such a recipe is run and compared each time. On an
accelerator that would wait for the device, so there such a tensor is saved as usual.

Note [What a recipe may use]
What nodes saved, by what stands in autograd's place for it; what the operations of this layer saved
of one another's results; copies of parameters; and the results of nodes in the table, computed on
the way. A
tensor that was changed in place since it was made is neither target nor operand: its node does not
show what it was then. Operands that are changed later make backward raise, as they do in autograd.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.activations.saved.recipe import Layout, Program, Recipe, Step
from megatron.offload.activations.saved.record import SavedStorage
from megatron.offload.activations.saved.replayable_nodes import (
    ALL_EDGES,
    DTYPE,
    EPS,
    NUMBER,
    SCALAR,
    SHAPE,
    NodeOperation,
    add_scalar,
    constant_of,
    function_of,
    operation_of,
)
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import WeightCast
from megatron.offload.errors import OffloadError

Held = SavedView | ResidentTensor | WeightCast  # what autograd holds of an operand

_NUM_PROOFS = 2
_MOST_NODES = 24  # that a search looks at: it ends soon in sums that go on through all layers
_MOST_DEPTH = 6  # replayed operands of replayed operands: all are in memory together
_LEAST_GAIN = 4  # a recipe holds copies of parameters: they take less than this part of its result
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass
class _Claim:
    """A program in a layer, and what is known of it."""

    program: Program
    num_proofs: int = 0
    is_refused: bool = False


class RecipeFinder:
    """Recipes of what the layers of a model save.

    Attributes:
        left_bytes: of storages that were saved as usual, by the node that made them.

    Args:
        device: where activations live.
        unpack: the hook that gives autograd its tensors back, to tell ours from others'.
        eps_of: the eps of the norm that a parameter is the weight of; None: not known.
        fetch: reads a record from its tier, for a comparison.
    """

    def __init__(
        self,
        device: torch.device,
        unpack: Callable[[Any], torch.Tensor],
        eps_of: Callable[[torch.Tensor], float | None],
        fetch: Callable[[SavedStorage], torch.UntypedStorage],
    ) -> None:
        self._device = device
        self._unpack = unpack
        self._eps_of = eps_of
        self._fetch = fetch
        self._scope: Scope | None = None
        self.left_bytes: collections.Counter[str] = collections.Counter()
        # What the operations of this layer saved, by the node that made it and the number of its
        # result. As long as a node is here, no other has its address.
        self._results: dict[tuple[Any, int], Held] = {}
        self._claims: dict[Any, _Claim] = {}

    def note(self, tensor: torch.Tensor, held: object, scope: Scope) -> None:
        """Autograd has saved a tensor and holds this of it: it can be an operand from now on."""
        if scope is not self._scope:
            self.forget()
            self._scope = scope
        if tensor._version == 0 and isinstance(held, Held):
            node = node_of(tensor)
            if node is not None:
                self._results[node, tensor.output_nr] = held

    def forget(self) -> None:
        """A layer has ended: its nodes belong to autograd alone again."""
        self._scope = None
        self._results.clear()

    def find(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        scope: Scope,
        save: Callable[[torch.Tensor], Held],
    ) -> Recipe | None:
        """How the storage of a tensor can be computed again; None: it cannot, or not for little.

        Args:
            tensor: that autograd saves; its operation has ended.
            storage: its storage, which can move.
            scope: that saves it.
            save: saves a tensor that autograd does not: half the bytes of the target.
        """
        base = tensor._base
        target = tensor if base is None else base
        node = node_of(target)
        if node is None or (operation_of(node) is None and function_of(node) is None):
            self.left_bytes["no node" if node is None else type(node).__name__] += storage.nbytes()
            return None
        if target._version or target.storage_offset() or target.nbytes != storage.nbytes():
            return None
        search = _Search(self, target, save)
        if search.result(node, target.output_nr, is_target=True) is None:
            return None
        if search.depth > _MOST_DEPTH or search.parameter_bytes * _LEAST_GAIN > target.nbytes:
            return None
        layout = Layout(tuple(target.shape), target.stride(), target.dtype)
        steps = tuple(search.steps)
        if search.is_scalar_missing:
            program = self._with_scalar(steps, layout, search, target)
            return None if program is None else _recipe(program, search)
        key = scope.chunk, scope.layer, scope.part, steps, layout
        claim = self._claims.get(key)
        if claim is None:
            claim = self._claims[key] = _Claim(Program(steps, layout))
        if claim.is_refused:
            return None
        if claim.num_proofs < _NUM_PROOFS:
            fetched: list[SavedStorage] = []
            try:
                operands = self._peek(search.held, fetched)
                assert operands is not None
                is_right = same_bytes(claim.program.run(operands), target)
            except torch.OutOfMemoryError:
                return None
            except (OffloadError, RuntimeError):  # what it says does not go with its operands
                is_right = False
            finally:
                operands = None
                for record in fetched:
                    record.give_up_read()
            if not is_right:
                claim.is_refused = True
                return None
            claim.num_proofs += 1
        return _recipe(claim.program, search)

    def _with_scalar(
        self, steps: tuple[Step, ...], layout: Layout, search: _Search, target: torch.Tensor
    ) -> Program | None:
        """See Note [Constants that the graph does not show]."""
        operands = None if self._device.type != "cpu" else self._peek(search.held)
        if operands is None or target.numel() == 0 or not target.dtype.is_floating_point:
            return None
        last = steps[-1]
        rest = Program((*steps[:-1], last._replace(constants=(0.0,))), layout).run(list(operands))
        at = rest.abs().argmin()  # there the difference is most exact
        scalar = target.detach().flatten()[at].double() - rest.flatten()[at].double()
        for one in (
            float(scalar),
            round(1024 * float(scalar)) / 1024 if scalar.isfinite() else 0.0,
        ):
            program = Program((*steps[:-1], last._replace(constants=(one,))), layout)
            if same_bytes(program.run(list(operands)), target):
                return program
        return None

    def _peek(
        self, held: list[Held], fetched: list[SavedStorage] | None = None
    ) -> list[torch.Tensor | None] | None:
        """Operands without a change to where they are.

        Args:
            held: what stands for them.
            fetched: gets the records that had to be read for it. None: nothing is read, and if
                something is not in memory, the answer is None.
        """
        found = [self._peek_at(one, fetched) for one in held]
        return None if any(one is None for one in found) else found

    def _peek_at(self, held: Held, fetched: list[SavedStorage] | None) -> torch.Tensor | None:
        if not isinstance(held, SavedView):
            return held.tensor()
        record = held.saved
        memory = record.peeked
        if memory is None and record.recipe is not None:
            operands = self._peek(record.recipe.operands, fetched)
            if operands is None:
                return None
            memory = record.recipe.program.run(operands).untyped_storage()
        elif memory is None and fetched is not None:
            memory = self._fetch(record)
            fetched.append(record)
        return None if memory is None else held.rebuild(memory)

    def held_by(self, node: Any, name: str) -> Held | None:
        """What autograd holds of a tensor that a node saved; None: it is not ours to use."""
        raw = getattr(node, "_raw_saved_" + name, None)
        return None if raw is None else self._held(raw, node, "_saved_" + name)

    def held_by_function(self, node: Any) -> list[Held] | None:
        """Likewise, all that an `autograd.Function` saved."""
        found: list[Held] = []
        for raw in node._raw_saved_tensors:
            one = self._held(raw, node, None)
            if one is None:
                return None
            found.append(one)
        return found

    def _held(self, raw: Any, node: Any, name: str | None) -> Held | None:
        """Args: name of the attribute with the tensor; None: reading it would unpack others."""
        try:
            hook = raw.unpack_hook
            if hook is not None and hook != self._unpack:
                return None
            data = raw.data if name is None or hook is not None else getattr(node, name)
        except RuntimeError:  # freed, or changed in place
            return None
        if isinstance(data, torch.Tensor):
            return ResidentTensor(data, self._scope or Scope())
        return data if isinstance(data, Held) else None


class _Search:
    """One walk through the graph, from a target to what is saved. It collects the program.

    Attributes:
        depth: how many replays behind one another a replay of the target takes.
        parameter_bytes: of the parameters among the operands.
        steps: so far.
        held: the operands.
        is_scalar_missing: the target is the sum of an operand and a scalar that is not known.
    """

    def __init__(
        self, finder: RecipeFinder, target: torch.Tensor, save: Callable[[torch.Tensor], Held]
    ) -> None:
        self._finder = finder
        self._target = target
        self._save = save
        self._known: dict[tuple[Any, int], int] = {}
        self._of_held: dict[int, int] = {}
        self._num_nodes = 0
        self.depth = 1
        self.parameter_bytes = 0
        self.steps: list[Step] = []
        self.held: list[Held] = []
        self.is_scalar_missing = False

    def result(self, node: Any, number: int, *, is_target: bool = False) -> int | None:
        """A result of a node, as a program names it; None: it cannot be had."""
        key = node, number
        value = self._known.get(key)
        if value is not None:
            return value
        held = None if is_target else self._finder._results.get(key)
        if held is not None:
            value = self._operand(held)
        elif self._num_nodes < _MOST_NODES:
            self._num_nodes += 1
            operation = operation_of(node)
            if operation is None:
                value = self._function(node)
            else:
                value = self._computed(node, number, operation, is_target)
        if value is not None:
            self._known[key] = value
        return value

    def _operand(self, held: Held) -> int:
        value = self._of_held.get(id(held))
        if value is None:
            value = self._of_held[id(held)] = ~len(self.held)
            self.held.append(held)
            if isinstance(held, SavedView):
                recipe = held.saved.recipe
                self.depth = max(self.depth, 1 if recipe is None else recipe.depth + 1)
            elif (parameter := _parameter(held)) is not None:
                self.parameter_bytes += parameter.nbytes
        return value

    def _step(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _function(self, node: Any) -> int | None:
        compute = function_of(node)
        if compute is None:
            return None
        held = self._finder.held_by_function(node)
        if held is None:
            return None
        return self._step(Step(compute, tuple(self._operand(one) for one in held)))

    def _computed(
        self, node: Any, number: int, operation: NodeOperation, is_target: bool
    ) -> int | None:
        edges = node.next_functions
        names = operation.inputs
        if names is ALL_EDGES:
            names = (None,) * len(edges)
        missing = operation.missing
        is_cast_target = is_target and operation.constants == (DTYPE,)
        if not is_cast_target and any(
            name is None and self._is_out_of_reach(*edge)
            for edge, name in zip(edges, names, strict=False)
        ):
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
            elif value is None and name not in operation.optional:
                return None
            values.append(value)
        constants = tuple(_constant(node, number, name) for name in operation.constants)
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
        return self._step(Step(function, tuple(values), constants))

    def _is_out_of_reach(self, node: Any, number: int) -> bool:
        """Whether a result can be no operand, as is seen at once: the search need not begin."""
        return (
            node is not None
            and operation_of(node) is None
            and (node, number) not in self._finder._results
            and getattr(node, "variable", None) is None
            and function_of(node) is None
        )

    def _input(self, node: Any, edges: Any, position: int, name: str | None) -> int | None:
        if name is not None:
            held = self._finder.held_by(node, name)
            if held is not None:
                return self._operand(held)
        if position >= len(edges):
            return None
        following, number = edges[position]
        if following is None:
            return None
        leaf = getattr(following, "variable", None)  # of its accumulator
        if leaf is not None:
            if type(leaf) is torch.nn.Parameter and leaf.device == self._finder._device:
                return self._operand(ResidentTensor(leaf, self._finder._scope or Scope()))
            return None
        return self.result(following, number)

    def _eps(self, weight: int | None) -> float | None:
        held = None if weight is None or weight >= 0 else _parameter(self.held[~weight])
        return None if held is None else self._finder._eps_of(held)

    def _narrower(self, edges: Any) -> int | None:
        """A cast to more bits, of which the narrower tensor is not saved: it is made and saved."""
        source, number = edges[0]
        if source is None or getattr(source, "variable", None) is not None:
            return None
        dtype = source._input_metadata[number].dtype
        target = self._target
        if not (dtype.is_floating_point and target.dtype.is_floating_point):
            return None
        if dtype.itemsize >= target.dtype.itemsize:
            return None
        held = self._save(target.detach().to(dtype))
        self._finder._results[source, number] = held
        return self._operand(held)


def _constant(node: Any, number: int, name: str) -> Any:
    if name == NUMBER:
        return number
    if name == DTYPE:
        return node._input_metadata[number].dtype
    if name == SHAPE:
        return tuple(node._input_metadata[number].shape)
    return constant_of(node, name)


def _recipe(program: Program, search: _Search) -> Recipe:
    operands = [_again(one) for one in search.held]
    bases: dict[int, Any] = {}
    for one in operands:
        if isinstance(one, SavedView):
            recipe = one.saved.recipe
            records = [one.saved] if recipe is None else recipe.bases
            bases.update((id(record), record) for record in records)
    return Recipe(program, operands, list(bases.values()), search.depth)


def _again(held: Held) -> Held:
    """The same operand, for a use of its own.

    Of a parameter its bytes: others give parameters other memory, or write to it through `data`,
    and what autograd would have saved is not affected by that.
    """
    if isinstance(held, SavedView):
        return SavedView.again(held)
    parameter = _parameter(held)
    return held if parameter is None else ResidentTensor(parameter.detach().clone(), Scope())


def _parameter(held: Held) -> torch.nn.Parameter | None:
    tensor = held.held if isinstance(held, ResidentTensor) else None
    return tensor if isinstance(tensor, torch.nn.Parameter) else None


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bytes."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    integer = _INTEGERS[one.element_size()]
    return torch.equal(one.detach().view(integer), other.detach().view(integer))
