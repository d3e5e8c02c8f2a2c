# SPDX-License-Identifier: Apache-2.0
"""Finds how a saved tensor can be computed from others that are saved: `RecipeFinder`.

The hooks ask it before a tensor moves or stays. It reads autograd's graph from the node that made
the tensor to what earlier operations saved, and compares bytes. It changes nothing.

Note [When a recipe is trusted]
The graph shows which operation made a tensor and of what. It does not show everything (the eps of a
norm, the 1 of `1 + x`), and that an operation gives the same bytes again is a claim. So a recipe
counts where it has given the saved bytes: the first two times that a layer saves a tensor so, it is
run at once and its result compared. Another shape, stride, dtype, constant or version is another
recipe; an accelerator trusts it sooner, see Note [Other shapes]. One that fails once is never used
again in that layer.

Note [Constants that the graph does not show]
The eps of a norm is what the module that owns its weight says, confirmed by the bytes, and again in
each replay by the deviations that autograd has saved, which another eps changes. A scalar that was
added is computed from the bytes. It may be another one next time, or in another place of the layer,
and nothing would show that. So such a recipe is run and compared each time. On an accelerator that
would wait for the device, so there such a tensor is saved as usual.

Note [What a recipe may use]
What nodes saved, by what stands in autograd's place for it; what the operations of this layer saved
of one another's results; copies of parameters and of small buffers; and the results of nodes in the
table, computed on the way. A tensor that was changed in place since it was made is neither target
nor operand: its node does not show what it was then. Operands that are changed later make backward
raise, as they do in autograd.

Note [Searches left out]
A walk through the graph that ends without a recipe takes as long as saving the tensor, and ends so
in each pass. So a search that found nothing `_MOST_FAILED` times in a row, in the same place of the
same layer, for a result of the same operation and shape, is made in one pass of `_TRIED_AGAIN`
only. The tensor is saved then, which is right in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.activations.saved.autograd_graph import node_of, origin_of
from megatron.offload.activations.saved.available import (
    AvailableTensors,
    Held,
    copy_of,
)
from megatron.offload.activations.saved.checked_programs import CheckedProgram, CheckedPrograms
from megatron.offload.activations.saved.noise import may_be_noise, pack_noise, unpack_noise
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.recipe import (
    Layout,
    Program,
    Recipe,
    Step,
)
from megatron.offload.activations.saved.recipe_search import RecipeSearch
from megatron.offload.activations.saved.record import SavedStorage
from megatron.offload.activations.saved.replay_operations import dropped_out
from megatron.offload.activations.saved.replayable_nodes import function_of, operation_of
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.errors import OffloadError

_MOST_DEPTH = 6  # replayed operands of replayed operands: all are in memory together
_MOST_FAILED = 8  # Note [Searches left out]
_TRIED_AGAIN = 64  # of so many passes one
_MOST_KINDS = 1 << 14
_LEAST_GAIN = 4  # a recipe holds copies of operands: they take less than this part of its result


class _Fruitless:
    """Searches that found nothing, by place and kind of target: see Note [Searches left out]."""

    def __init__(self) -> None:
        self._num_passes: dict[Any, int] = {}  # in a row, also those without a search
        self._scope: Scope | None = None
        self._number = 0

    def place_of(self, scope: Scope) -> tuple[int, str, str, int]:
        """The layer of the next target, and its number among those of this pass through it."""
        if scope is not self._scope:
            if scope != self._scope:
                self.leave()
            self._scope = scope
        self._number += 1
        return scope.chunk, scope.layer, scope.part, self._number

    def leave(self) -> None:
        """A pass through a layer, or a forward pass, has ended."""
        self._number = 0

    def skips(self, kind: Any) -> bool:
        """Whether this search is left out."""
        passes = self._num_passes.get(kind, 0)
        if passes < _MOST_FAILED or passes % _TRIED_AGAIN == 0:
            return False
        self._num_passes[kind] = passes + 1
        return True

    def note(self, kind: Any, *, is_found: bool) -> None:
        """A search was made."""
        if is_found:
            self._num_passes.pop(kind, None)
            return
        if len(self._num_passes) == _MOST_KINDS:  # shapes that come once
            self._num_passes.clear()
        self._num_passes[kind] = self._num_passes.get(kind, 0) + 1


class RecipeFinder:
    """Recipes of what the layers of a model save.

    Attributes:
        available: what can be an operand; the hooks tell it what was saved.

    Args:
        device: where activations live.
        unpack: the hook that gives autograd its tensors back, to tell ours from others'.
        norms: what modules say about their norms.
        fetch: reads a record from its tier, for a comparison.
        outlives_step: whether a tensor is a parameter, a buffer or another that stays.
        is_exact: no codec changes operands.
    """

    def __init__(
        self,
        device: torch.device,
        unpack: Callable[[Any], torch.Tensor],
        norms: Norms,
        fetch: Callable[[SavedStorage], torch.UntypedStorage],
        outlives_step: Callable[[torch.Tensor], bool],
        *,
        is_exact: bool = True,
    ) -> None:
        self._device = device
        self._fetch = fetch
        self.available = AvailableTensors(device, unpack, norms, outlives_step, is_exact=is_exact)
        self._programs = CheckedPrograms(trusts_kinds=is_exact and device.type != "cpu")
        self._fruitless = _Fruitless()
        self._scalars: dict[Any, float] = {}  # that were right last, to be compared first

    def leave(self) -> None:
        """A forward pass has ended: nothing is kept for comparisons."""
        self.available.leave()
        self._fruitless.leave()

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
            save: saves a tensor that autograd does not, of at most half the bytes of the target.
        """
        if not self.available.is_exact:
            self.available.enter(scope, tensor)
        base = tensor._base
        target = tensor if base is None else base
        node, number = origin_of(node_of(target), target.output_nr)
        if node is None and base is not None:  # a function has returned a view of what it made
            node, number = origin_of(node_of(tensor), tensor.output_nr)
            target = base if node is None else tensor
        if node is None and may_be_noise(target):
            return self._of_bits(target, storage, save)
        if node is None or (operation_of(node) is None and function_of(node) is None):
            return None
        if target.storage_offset() or target.nbytes != storage.nbytes():
            return None
        if target._version and not self.available.is_as_made(target, node):
            return None
        layout = Layout(target.shape, target.stride(), target.dtype)
        kind = self._fruitless.place_of(scope), type(node), layout
        if self._fruitless.skips(kind):
            return None
        search = RecipeSearch(self.available, target, save)
        found = search.target_of((node, number))
        is_found = found is not None and not any(map(self.available.lacks, search.held))
        self._fruitless.note(kind, is_found=is_found)
        if not is_found:
            return None
        if search.depth > _MOST_DEPTH or search.copied_bytes * _LEAST_GAIN > target.nbytes:
            return None
        steps = tuple(search.steps)
        if search.is_scalar_missing:
            program = self._with_scalar(steps, layout, search, target)
            return None if program is None else _recipe(program, search)
        checked = self._programs.of(scope, steps, layout, target._version)
        if checked.is_refused:
            return None
        if not checked.is_trusted or self._may_differ(steps):
            self.available.compares()
            fetched: list[SavedStorage] = []
            try:
                is_right = self._gives(checked.program, self._peek(search.held, fetched), target)
            finally:
                for record in fetched:
                    record.give_up_read()
            if is_right is None:
                if not self.available.is_exact:
                    checked.note_unseen()
                return None
            checked.note(is_right)
            if not is_right:
                return None
        return _recipe(checked.program, search, self._use(checked))

    def _may_differ(self, steps: tuple[Step, ...]) -> bool:
        """Whether nothing shows if dropout was training, so that each use is compared.

        An accelerator's own layers call it in training only; a CPU's do not call it at all.
        """
        return self._device.type == "cpu" and any(one.operation is dropped_out for one in steps)

    def _use(self, checked: CheckedProgram) -> int | None:
        return checked.use()

    def _of_bits(
        self,
        target: torch.Tensor,
        storage: torch.UntypedStorage,
        save: Callable[[torch.Tensor], Held],
    ) -> Recipe | None:
        """See Note [Noise as bits]; on an accelerator, to look at values would wait for it."""
        if self._device.type != "cpu" or target.nbytes != storage.nbytes():
            return None
        packed = pack_noise(target)
        if packed is None:
            return None
        bits, constant = packed
        num_values = target.numel()
        step = Step(unpack_noise, (~0,), (num_values, target.dtype, constant))
        program = Program((step,), Layout((num_values,), (1,), target.dtype))
        held = save(bits)
        bases = [held.saved] if isinstance(held, SavedView) else []
        return Recipe(program, [held], bases, 1)

    def _with_scalar(
        self, steps: tuple[Step, ...], layout: Layout, search: RecipeSearch, target: torch.Tensor
    ) -> Program | None:
        """See Note [Constants that the graph does not show]."""
        if self._device.type != "cpu":
            return None
        self.available.compares()
        operands = self._peek(search.held)
        if operands is None or target.numel() == 0 or not target.dtype.is_floating_point:
            return None
        last = steps[-1]

        def with_scalar(scalar: float) -> Program:
            return Program((*steps[:-1], last._replace(constants=(scalar,))), layout)

        key = steps, layout
        known = self._scalars.get(key)
        if known is not None and self._gives(with_scalar(known), list(operands), target):
            return with_scalar(known)
        try:
            rest = with_scalar(0.0).run(list(operands))
        except (OffloadError, RuntimeError):
            return None
        at = rest.abs().argmin()  # there the difference is most exact
        scalar = float(target.detach().flatten()[at].double() - rest.flatten()[at].double())
        if not math.isfinite(scalar):
            return None
        for one in (scalar, round(1024 * scalar) / 1024):
            if self._gives(with_scalar(one), list(operands), target):
                if len(self._scalars) == _MOST_KINDS:
                    self._scalars.clear()
                self._scalars[key] = one
                return with_scalar(one)
        return None

    def _gives(
        self, program: Program, operands: list[torch.Tensor | None] | None, target: torch.Tensor
    ) -> bool | None:
        """Whether a program gives the bytes of the target; None: there is no memory to see.

        It raises nothing: what does not go with its operands is no recipe, and forward goes on.
        """
        if operands is None:
            return None
        try:
            return program.gives(operands, target)
        except torch.OutOfMemoryError:
            return None
        except (OffloadError, RuntimeError):
            return False

    def _peek(
        self, held: list[Held], fetched: list[SavedStorage] | None = None
    ) -> list[torch.Tensor | None] | None:
        """Operands without a change to where they are.

        Args:
            held: what stands for them.
            fetched: gets the records that had to be read for it. None: nothing is read.

        Returns:
            None: one of them cannot be had now.
        """
        try:
            found = [self._peek_at(one, fetched) for one in held]
        except (OffloadError, torch.OutOfMemoryError):  # a failed read; changed in place since
            return None
        return None if any(one is None for one in found) else found

    def _peek_at(self, held: Held, fetched: list[SavedStorage] | None) -> torch.Tensor | None:
        if not isinstance(held, SavedView):
            copy = copy_of(held)
            return held.tensor() if copy is None else copy
        record = held.saved
        memory = record.peeked
        if memory is None and record.recipe is not None:
            if record.recipe.encodes:  # the exact bytes are gone
                return None
            operands = self._peek(record.recipe.operands, fetched)
            if operands is None:
                return None
            memory = record.recipe.program.run(operands).untyped_storage()
        elif memory is None and fetched is not None:
            memory = self._fetch(record)
            fetched.append(record)
        return None if memory is None else held.rebuild(memory)


def _recipe(program: Program, search: RecipeSearch, sampled: int | None = None) -> Recipe:
    saved = {id(one) for one in search.saved}  # and this is its first use
    if saved and program.of_a_row:
        sampled = 0
    operands = [
        one if id(one) in saved else _again(one, is_copied=number in search.copied)
        for number, one in enumerate(search.held)
    ]
    bases: dict[int, Any] = {}
    is_exact = True
    for one in operands:
        if isinstance(one, SavedView):
            recipe = one.saved.recipe
            for record in (one.saved,) if recipe is None else recipe.bases:
                bases[id(record)] = record
            is_exact = is_exact and (recipe is None or recipe.is_exact)
    return Recipe(
        program,
        operands,
        list(bases.values()),
        search.depth,
        search.copied_bytes,
        is_exact=is_exact,
        frees=bool(search.saved),
        sample=program.sample_of(search.target, sampled) if is_exact else None,
    )


def _again(held: Held, *, is_copied: bool) -> Held:
    """The same operand, for a use of its own.

    Args:
        held: that stands for it.
        is_copied: see Note [Written to unseen] in `recipe_search.py`.
    """
    if isinstance(held, SavedView):
        return SavedView.again(held)
    if not is_copied or not isinstance(held, ResidentTensor):
        return held
    copy = copy_of(held)
    return ResidentTensor(held.held.detach().clone() if copy is None else copy, Scope())
