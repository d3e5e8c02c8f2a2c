# SPDX-License-Identifier: Apache-2.0
"""One walk through autograd's graph, from a tensor to what others have saved: `RecipeSearch`.

The finder of recipes begins one for each tensor; it ends at `AvailableTensors`. It collects a
program, and compares nothing.

Note [Exact bytes for comparisons]
Where a codec is used, what a recipe reads is encoded by the time it is compared, and a recipe of
decoded operands gives other bytes than those that were saved. So the exact ones are held until
their layer has ended. That takes memory, and after a few passes all is compared. So a pass through
a layer, with a first tensor of some shape, holds them only if the one before has compared a recipe,
or would have if it had held them.

Note [Results of modules]
A loss in fp32 saves the log-softmax of logits that an output layer has made in bf16. No operation
saves those, but the model holds them until its forward pass has ended. So what the parts of a model
return is known by its node as long as it lives, and is saved instead of something of at least twice
its bytes that is computed of it. Only products and the like: of what the table has, the operands
are saved. So is what a saved view is a small part of: diffusion transformers compute shifts, scales
and gates at once, and gates alone are saved.

Note [Parameters that are taken back]
ZeRO 3 gathers a parameter for the module that has it and frees its memory when the module has run:
the product of a norm's weight is saved later, as the input of the next module. So where a recipe
lacks a parameter's bytes, that parameter is copied from then on when its operation saves it. A norm
has few values; what is large is not copied.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.activations.saved.autograd_graph import node_of, origin_of
from megatron.offload.activations.saved.recipe import Step
from megatron.offload.activations.saved.replayable_nodes import (
    ALL_EDGES,
    DTYPE,
    EPS,
    LAYER_NORM_ALONE,
    NUMBER,
    SCALAR,
    SHAPE,
    NodeOperation,
    add_scalar,
    constant_of,
    function_of,
    layer_norm_of_decoded,
    operation_of,
)
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import WeightCast, is_away

Held = SavedView | ResidentTensor | WeightCast  # what autograd holds of an operand
Edge = tuple[Any, int]  # a node and the number of its result, as a node's `next_functions` has them

_MOST_NODES = 24  # that a search looks at: it ends soon in sums that go on through all layers
_MOST_HELD = 32  # storages that a codec has encoded: those that a layer saved last
_MOST_COPIED = 1 << 20  # bytes of a parameter; of a norm's, a few thousand values
_NOWHERE = Scope()


class AvailableTensors:
    """What can be an operand: what nodes have saved, and what this layer has saved of results.

    Attributes:
        results: by the node that made it and the number of its result. As long as a node is here,
            no other has its address.
        scope: of the layer.
        is_exact: no codec changes operands.

    Args: as `RecipeFinder`.
    """

    def __init__(
        self,
        device: torch.device,
        unpack: Callable[[Any], torch.Tensor],
        eps_of: Callable[[torch.Tensor], float | None],
        *,
        is_exact: bool = True,
    ) -> None:
        self.device = device
        self.eps_of = eps_of
        self.is_exact = is_exact
        # Note [Exact bytes for comparisons]: what is held, of which pass, where that is, and by
        # place whether the pass before has compared.
        self._exact: collections.deque[torch.UntypedStorage] = collections.deque(maxlen=_MOST_HELD)
        self._pass: tuple[int, int, str] | None = None
        self._place: tuple[Any, ...] = ()
        self._holds = False
        self._compared: dict[tuple[Any, ...], bool] = {}
        self._unpack = unpack
        self.results: dict[Edge, Held] = {}
        self._taken_back: set[int] = set()  # parameters, by address
        # Note [Results of modules]
        self._returned: dict[Edge, weakref.ref[torch.Tensor]] = {}
        self.scope = _NOWHERE

    def note(self, tensor: torch.Tensor, held: Held, scope: Scope) -> None:
        """Autograd has saved a tensor and holds this of it: it can be an operand from now on."""
        if scope is not self.scope:
            self.forget()
            self.scope = scope
        if tensor._version == 0:
            node = node_of(tensor)
            if node is not None:
                self.results[origin_of(node, tensor.output_nr)] = held
            if (base := tensor._base) is not None and base.nbytes <= _MOST_COPIED:
                self._note_base(base)
        is_copied = id(tensor) in self._taken_back and tensor.nbytes <= _MOST_COPIED
        if is_copied and isinstance(held, ResidentTensor):
            held.copy = tensor.detach().clone()

    def lacks(self, held: Held) -> bool:
        """Whether an operand is a parameter without memory: Note [Parameters that are taken back].

        It is copied when it is saved again.
        """
        parameter = parameter_of(held)
        if parameter is None or copy_of(held) is not None:
            return False
        is_there = 0 < parameter.nbytes <= parameter.untyped_storage().nbytes()
        if not is_there:
            self._taken_back.add(id(parameter))
        return not is_there

    def note_returned(self, tensor: torch.Tensor) -> None:
        """A part of the model returns a tensor, all of its storage: Note [Results of modules]."""
        node, number = origin_of(node_of(tensor), tensor.output_nr)
        source = node
        while source is not None and (operation := operation_of(source)) is not None:
            if operation.inputs != (None,):
                return
            ((source, _),) = source.next_functions
        if source is not None and tensor._version == 0:
            self._returned[node, number] = weakref.ref(tensor)

    def _note_base(self, base: torch.Tensor) -> None:
        """A part of a small tensor is saved; others may be operands: Note [Results of modules]."""
        if base.device == self.device and base.nbytes == base.untyped_storage().nbytes():
            self.note_returned(base)

    def returned(self, edge: Edge) -> torch.Tensor | None:
        """What a part of the model has returned, by its node, if it is alive and as it was."""
        reference = self._returned.get(edge)
        tensor = None if reference is None else reference()
        return None if tensor is None or tensor._version else tensor

    def forget(self) -> None:
        """An operation or a layer has ended: its nodes belong to autograd alone again."""
        self.scope = _NOWHERE
        self.results.clear()

    def enter(self, scope: Scope, tensor: torch.Tensor) -> None:
        """A tensor of this scope is saved: Note [Exact bytes for comparisons]."""
        now = scope.chunk, scope.micro_batch, scope.layer
        if now != self._pass:
            self._exact.clear()
            self._pass, self._place = now, (scope.chunk, scope.layer, tensor.shape, tensor.dtype)
            self._holds = self._compared.get(self._place, True)
            self._compared[self._place] = False

    def compares(self) -> None:
        """A recipe of the layer is compared, or would be if exact bytes were held."""
        self._compared[self._place] = True

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Keeps what a codec has encoded until the layer ends, where comparisons may need it."""
        if self._holds:
            self._exact.append(storage)

    def leave(self) -> None:
        """A forward pass has ended."""
        self.forget()
        self._returned.clear()
        self._exact.clear()
        self._pass = None

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
        """What stands for one saved tensor.

        Args:
            raw: that autograd has for it.
            node: that saved it.
            name: of the attribute with the tensor; None: reading it would unpack others.
        """
        try:
            hook = raw.unpack_hook
            if hook is not None and hook != self._unpack:
                return None
            data = raw.data if name is None or hook is not None else getattr(node, name)
        except RuntimeError:  # freed, or changed in place
            return None
        if isinstance(data, torch.Tensor):
            return ResidentTensor(data, self.scope)
        held: Held | None = data  # that we have packed, or nothing
        return held


def parameter_of(held: Held) -> torch.nn.Parameter | None:
    """The parameter that stands for itself; None: it is something else."""
    if not isinstance(held, ResidentTensor):
        return None
    tensor = held.held
    if type(tensor) is torch.Tensor:  # else torch looks, in Python
        return None
    return tensor if isinstance(tensor, torch.nn.Parameter) else None


def copy_of(held: Held) -> torch.Tensor | None:
    """The copy of a parameter; None: it has none, or it is something else."""
    return held.copy if isinstance(held, ResidentTensor) else None


class RecipeSearch:
    """One walk through the graph, from a target to what is saved. It collects the program.

    Attributes:
        target: what is to be computed.
        depth: how many replays behind one another a replay of it takes.
        parameter_bytes: of the parameters among the operands.
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
        self._known: dict[Edge, int] = {}
        self._of_held: dict[int, int] = {}
        self._num_nodes = 0
        self.depth = 1
        self.parameter_bytes = 0
        self.steps: list[Step] = []
        self.held: list[Held] = []
        self.is_scalar_missing = False
        self.saved: list[Held] = []

    def result(self, edge: Edge, *, is_target: bool = False) -> int | None:
        """A result of a node, as a program names it; None: it cannot be had.

        Args:
            edge: as `origin_of` gives it.
        """
        value = self._known.get(edge)
        if value is not None:
            return value
        held = None if is_target else self._available.results.get(edge) or self._returned(edge)
        if held is not None:
            value = self._operand(held)
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
            value = self._of_held[id(held)] = ~len(self.held)
            self.held.append(held)
            if isinstance(held, SavedView):
                recipe = held.saved.recipe
                self.depth = max(self.depth, 1 if recipe is None else recipe.depth + 1)
            elif (parameter := parameter_of(held)) is not None:
                copy = copy_of(held)
                self.parameter_bytes += (parameter if copy is None else copy).nbytes
        return value

    def _step(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

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
        edges = node.next_functions
        if operation.missing is EPS and all(_lacks(node, one) for one in operation.optional):
            operation = LAYER_NORM_ALONE
        names = operation.inputs
        if names is ALL_EDGES:
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
            elif value is None and not (name in operation.optional and _lacks(node, name)):
                return None
            values.append(value)
        constants: tuple[Any, ...] = ()
        if operation.constants:
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
            if not self._available.is_exact:  # the deviations are those of the exact operand
                function = layer_norm_of_decoded
        return self._step(Step(function, tuple(values), constants))

    def _is_out_of_reach(self, edge: Edge) -> bool:
        """Whether a result can be no operand, as is seen at once: the search need not begin."""
        edge = origin_of(*edge)
        node, _ = edge
        return (
            node is not None
            and operation_of(node) is None
            and edge not in self._available.results
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
            if not is_away(leaf) and leaf.device == self._available.device:
                return self._operand(ResidentTensor(leaf, self._available.scope))
            return None
        return self.result(edge)

    def _eps(self, weight: int | None) -> float | None:
        held = None if weight is None or weight >= 0 else parameter_of(self.held[~weight])
        return None if held is None else self._available.eps_of(held)

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
        return self._operand(self._save_for((source, number), target.detach().to(dtype)))


def _lacks(node: Any, name: str) -> bool:
    """Whether an operation was given no tensor of that name."""
    try:
        raw = getattr(node, "_raw_saved_" + name)
        return raw.unpack_hook is None and raw.data is None
    except RuntimeError:  # freed
        return False


def _constant(node: Any, number: int, name: str) -> Any:
    if name == NUMBER:
        return number
    if name == DTYPE:
        return node._input_metadata[number].dtype
    if name == SHAPE:
        return tuple(node._input_metadata[number].shape)
    return constant_of(node, name)
