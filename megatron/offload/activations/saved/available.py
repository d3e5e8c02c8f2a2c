# SPDX-License-Identifier: Apache-2.0
"""What a recipe can be made of: `AvailableTensors`.

The hooks tell it what is saved, and `RecipeSearch` asks it about results of nodes.

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

Note [Activations in place]
`relu_` writes its result over its input, and a later operation may write over it in turn, unseen by
the graph. But a node that saves its own result has it as it made it. So where a tensor has the
version that its node has saved, the node says what it is. Others (`silu_`) save a copy of their
input; out of place they save the input itself. So a node with such a copy has written to its
tensor, and if that was written to once, no other operation has.

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
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.replayable_nodes import (
    constants_of,
    lacks,
    operation_of,
)
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import WeightCast

Held = SavedView | ResidentTensor | WeightCast  # what autograd holds of an operand
Edge = tuple[Any, int]  # a node and the number of its result, as a node's `next_functions` has them

_MOST_PLACES = 1 << 14  # in layers, by shape, of which is known whether they compare
_MOST_HELD = 32  # storages that a codec has encoded: those that a layer saved last
_MOST_COPIED = 1 << 20  # bytes of a parameter; of a norm's, a few thousand values
_MOST_OF_BUFFER = 1 << 16  # bytes: all channels; a table that layers share is not copied for each
_RESULT = "_raw_saved_result"  # of a node that saves its only result
_COPY = "CloneBackward0"
_NOWHERE = Scope()


class AvailableTensors:
    """What can be an operand: what nodes have saved, and what this layer has saved of results.

    Attributes:
        results: by the node that made it and the number of its result. As long as a node is here,
            no other has its address.
        changed: what nodes have made and others may have written over since, before it was saved.
        remade: results that were made of what was computed of them: they may lie otherwise.
        scope: of the layer.
        is_exact: no codec changes operands.

    Args: as `RecipeFinder`.
    """

    def __init__(
        self,
        device: torch.device,
        unpack: Callable[[Any], torch.Tensor],
        norms: Norms,
        outlives_step: Callable[[torch.Tensor], bool],
        *,
        is_exact: bool = True,
    ) -> None:
        self.device = device
        self._outlives_step = outlives_step
        self.norms = norms
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
        self.changed: set[Edge] = set()
        self.remade: set[Edge] = set()
        self._taken_back: set[int] = set()  # parameters, by address
        # Note [Results of modules]
        self._returned: dict[Edge, weakref.ref[torch.Tensor]] = {}
        self._bases: dict[Edge, weakref.ref[torch.Tensor]] = {}  # of this layer
        self.scope = _NOWHERE

    def note(self, tensor: torch.Tensor, held: Held, scope: Scope) -> None:
        """Autograd has saved a tensor and holds this of it: it can be an operand from now on."""
        node = node_of(tensor)
        edge = None if node is None else origin_of(node, tensor.output_nr)
        is_as_made = not tensor._version or (node is not None and self.is_as_made(tensor, node))
        if scope is not self.scope:  # after what the layer before has saved was looked at
            self.forget()
            self.scope = scope
        if not is_as_made:
            if edge is not None:  # else a parameter
                self.changed.add(edge)
        else:
            if edge is not None:
                self.results[edge] = held
                self.remade.discard(edge)
            if (base := tensor._base) is not None and base.nbytes <= _MOST_COPIED:
                self._note_base(base)
        is_copied = id(tensor) in self._taken_back and tensor.nbytes <= _MOST_COPIED
        if is_copied and isinstance(held, ResidentTensor):
            held.copy = tensor.detach().clone()

    def is_as_made(self, tensor: torch.Tensor, node: Any) -> bool:
        """Whether a tensor that was changed in place has not been since its node made it.

        The node knows: see Note [Activations in place].
        """
        if tensor._is_view():
            return False
        if not hasattr(node, _RESULT):
            return tensor._version == 1 and self._has_copied_its_input(node)
        if lacks(node, "result"):  # it is saving it now
            return True
        held = self.held_by(node, "result")
        return not (held is None or isinstance(held, WeightCast)) and (
            held.version == tensor._version
        )

    def _has_copied_its_input(self, node: Any) -> bool:
        held = self.held_by(node, "self")
        copies = (maker for (maker, _), one in self.results.items() if one is held)
        return held is not None and any(
            type(one).__name__ == _COPY and one.next_functions[0] == node.next_functions[0]
            for one in copies
        )

    def result_of(self, edge: Edge) -> Held | None:
        """What is held of a result: of its saves, or of that by its own node."""
        held = self.results.get(edge)
        node, number = edge
        if held is None and not number and hasattr(node, _RESULT):
            held = self.held_by(node, "result")
        return held

    def common_subexpression(self, edge: Edge) -> Held | None:
        """What is held of a result that the same operation has made of the same tensors before."""
        node, _ = edge
        operation, edges = operation_of(node), node.next_functions
        if operation is None or operation.inputs != (None,) * len(edges):
            return None
        if any(one is None for one, _ in edges):  # such as a scalar
            return None
        if operation.missing and len(edges) == 1:  # the 1 of `1 - x`, which no node shows
            return None
        for other, held in self.results.items():
            if (
                type(other[0]) is type(node)
                and other != edge
                and other[0].next_functions == edges
                and constants_of(other, operation) == constants_of(edge, operation)
            ):
                return held
        return None

    def lacks(self, held: Held) -> bool:
        """Whether an operand is not what was saved any more.

        It was changed in place since, or is a parameter without memory, which is copied when it is
        saved again: Note [Parameters that are taken back].
        """
        if not isinstance(held, WeightCast) and held.is_changed:
            return True
        parameter = parameter_of(held)
        if parameter is None or copy_of(held) is not None:
            return False
        is_there = 0 < parameter.nbytes <= parameter.untyped_storage().nbytes()
        if not is_there:
            self._taken_back.add(id(parameter))
        return not is_there

    def is_small_buffer(self, held: ResidentTensor) -> bool:
        """Whether an operand of a few real values outlives its step: Note [Written to unseen]."""
        tensor = held.held
        if tensor.nbytes > _MOST_OF_BUFFER or not tensor.is_floating_point():
            return False
        return self._outlives_step(tensor)

    def note_returned(self, tensor: torch.Tensor) -> None:
        """A part of the model returns a tensor, all of its storage: Note [Results of modules]."""
        self._note_alive(tensor, self._returned)

    @staticmethod
    def _note_alive(tensor: torch.Tensor, alive: dict[Edge, weakref.ref[torch.Tensor]]) -> None:
        node, number = origin_of(node_of(tensor), tensor.output_nr)
        source = node
        while source is not None and (operation := operation_of(source)) is not None:
            if operation.inputs != (None,):
                return
            ((source, _),) = source.next_functions
        if source is not None and tensor._version == 0:
            alive[node, number] = weakref.ref(tensor)

    def _note_base(self, base: torch.Tensor) -> None:
        """A part of a small tensor is saved; others may be operands: Note [Results of modules]."""
        if base.device == self.device and base.nbytes == base.untyped_storage().nbytes():
            self._note_alive(base, self._bases)

    def returned(self, edge: Edge) -> torch.Tensor | None:
        """What a part of the model has returned, or a base, if it is alive and as it was."""
        reference = self._returned.get(edge) or self._bases.get(edge)
        tensor = None if reference is None else reference()
        return None if tensor is None or tensor._version else tensor

    def forget(self) -> None:
        """An operation or a layer has ended: its nodes belong to autograd alone again."""
        self.scope = _NOWHERE
        self.results.clear()
        self.changed.clear()
        self.remade.clear()
        self._bases.clear()

    def enter(self, scope: Scope, tensor: torch.Tensor) -> None:
        """A tensor of this scope is saved: Note [Exact bytes for comparisons]."""
        now = scope.chunk, scope.micro_batch, scope.layer
        if now != self._pass:
            self._exact.clear()
            self._pass, self._place = now, (scope.chunk, scope.layer, tensor.shape, tensor.dtype)
            self._holds = self._compared.get(self._place, True)
            if len(self._compared) == _MOST_PLACES:
                self._compared.clear()
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

    def held_in_list(self, node: Any, name: str) -> list[Held | None] | None:
        """Likewise, of a list that a node saved, with None for what it was not given."""
        try:
            raws = getattr(node, "_raw_saved_" + name)
            if all(raw.unpack_hook is None for raw in raws):
                tensors = getattr(node, "_saved_" + name)  # unlike `data`, this checks versions
                return [None if one is None else ResidentTensor(one, self.scope) for one in tensors]
            found: list[Held | None] = []
            for raw in raws:
                is_ours = raw.unpack_hook == self._unpack
                if not is_ours and not (raw.unpack_hook is None and raw.data is None):
                    return None
                found.append(raw.data)
        except RuntimeError:  # freed, or changed in place
            return None
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
