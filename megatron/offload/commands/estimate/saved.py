# SPDX-License-Identifier: Apache-2.0
"""What becomes of the tensors that autograd saves, in a step that computes nothing: `SavedBytes`.

It stands for `SavedTensorHooks` and all behind them, on storages without bytes. Which tensors are
the same storage, which are small, and which can be computed again, the same code decides as in a
training (`is_small_part`, `RecipeFinder`). Only two things are taken for granted: a recipe gives
the bytes that were saved, and a tier has what it is given when the next layer has run.

Note [Bytes on their way]
A storage that moves is in memory until it is written, and comes back before backward asks for it.
How long that takes depends on drives and link; here the writes of `IN_FLIGHT` bytes are under way
at any time, and the largest storage is read ahead, as `Prefetcher` does it.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.offload.activations.saved.available import Held
from megatron.offload.activations.saved.bits import bits_bytes
from megatron.offload.activations.saved.cache import is_small_part, span_of
from megatron.offload.activations.saved.noise import may_be_noise
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.recipe import Layout, Program, Recipe, Step
from megatron.offload.activations.saved.recipe_search import RecipeSearch
from megatron.offload.activations.saved.recipes import RecipeFinder
from megatron.offload.activations.saved.record import SavedStorage, Span, State
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.storage_reference import StorageReference
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.commands.estimate.live_bytes import Kind, LiveBytes
from megatron.offload.sizes import MIB

KEEP, REPLAY, MOVE = "keep", "replay", "move"  # what becomes of what is saved
IN_FLIGHT = 8 * MIB
_META = torch.device("meta")


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Hooks for a forward pass on the meta device, as a context.

    Attributes:
        scope: the layer that runs; a new one is a new object.
        kept_bytes: of storages that autograd saved and that stay.
        replayed_bytes: of those that are computed again in backward.
        moved_bytes: of those that are written to a tier, and read from it.

    Args:
        live: counts; it is told what is saved.
        treatment: `KEEP`, `REPLAY`, or `MOVE`, which replays as well.
        stationary: parameters and buffers, which stay.
        norms: what modules say about their norms.
        min_bytes: smaller storages stay.
        on_cpu: the step is one of a CPU.
    """

    def __init__(
        self,
        live: LiveBytes,
        treatment: str,
        stationary: Iterable[torch.Tensor],
        norms: Norms,
        *,
        min_bytes: int = MIB,
        on_cpu: bool = False,
    ) -> None:
        super().__init__(self._pack, self._unpack)
        self.scope = Scope()
        self.kept_bytes = self.replayed_bytes = self.moved_bytes = 0
        self._live = live
        self._treatment = treatment
        self._min_bytes = min_bytes
        self._stationary = {one.untyped_storage()._cdata for one in stationary}
        self._finder: _Finder | None = None
        if treatment != KEEP:
            self._finder = _Finder(
                _META, self._unpack, norms, _no_read, self._is_stationary, on_cpu=on_cpu
            )
        self._records: dict[Any, weakref.ref[SavedStorage]] = {}
        self._counted: dict[int, StorageReference] = {}  # of what stays: once each
        self._leaving: collections.deque[weakref.ref[SavedStorage]] = collections.deque()
        self._leaving_bytes = 0
        self._order: list[weakref.ref[SavedStorage]] = []
        self._ahead: dict[int, int] = {}  # read and not used, by record

    def enter(self, layer: str) -> None:
        """What is saved from now on belongs to this layer, or to what follows it."""
        self.scope = Scope(layer=layer)

    # -- Out --------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = self._movable(tensor)
        if storage is None:
            return self._keep(tensor)
        self._live.change_kind(tensor, Kind.SAVED, only=Kind.WORKING)
        if self._treatment == KEEP or storage.nbytes() < self._min_bytes:
            return self._stay(tensor, storage)
        span = span_of(tensor) if is_small_part(tensor, storage) else None
        record = self._known(storage, None, tensor) or self._known(storage, span, tensor)
        if record is None:
            recipe = None
            if span is None:
                assert self._finder is not None
                recipe = self._finder.find(tensor, storage, self.scope, self._save)
            record = self._new(tensor, storage, span, recipe)
        if record is None:
            return self._stay(tensor, storage)
        view = SavedView(record, tensor)
        self._note(tensor, view)
        return view

    def _movable(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """As `TensorCache.movable`, on the meta device."""
        if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor._is_zerotensor():
            return None
        if isinstance(tensor._base, torch.nn.Parameter):
            return None
        storage = tensor.untyped_storage()
        return None if not storage.nbytes() or self._is_stationary(tensor) else storage

    def _is_stationary(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._stationary

    def _known(
        self, storage: torch.UntypedStorage, span: Span | None, tensor: torch.Tensor
    ) -> SavedStorage | None:
        reference = self._records.get((storage._cdata, span))
        record = None if reference is None else reference()
        if record is None or record.origin.expired() or record.version != tensor._version:
            return None
        return record

    def _new(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        span: Span | None,
        recipe: Recipe | None,
    ) -> SavedStorage | None:
        """A record of bytes that leave memory; None: they stay."""
        if recipe is None and self._treatment != MOVE:
            return None
        record = SavedStorage(
            storage, self.scope, tensor._version, span, tensor.dtype is torch.bool
        )
        self._records[storage._cdata, span] = weakref.ref(record)
        if recipe is not None:
            record.replay_by(recipe)
            self.replayed_bytes += record.saved_bytes
        else:
            self._write(record)
        return record

    def _write(self, record: SavedStorage) -> None:
        self.moved_bytes += record.num_bytes
        record.queue_write()
        record.begin_write(None, _ENDED)
        reference = weakref.ref(record)
        self._order.append(reference)
        self._leaving.append(reference)
        self._leaving_bytes += record.saved_bytes
        while self._leaving and self._leaving_bytes > max(IN_FLIGHT, record.saved_bytes):
            self._end_write()

    def _end_write(self) -> None:
        record = self._leaving.popleft()()
        if record is not None:
            record.end_write(failed=False)
        self._leaving_bytes = sum(
            one.saved_bytes for reference in self._leaving if (one := reference()) is not None
        )

    def _save(self, tensor: torch.Tensor) -> Held:
        """Saves what a recipe needs and autograd does not save."""
        self._live.change_kind(tensor, Kind.SAVED)
        if self._treatment == MOVE:
            storage = tensor.untyped_storage()
            record = self._known(storage, None, tensor) or self._new(tensor, storage, None, None)
            assert record is not None
            return SavedView(record, tensor)
        self.kept_bytes += tensor.untyped_storage().nbytes()
        return ResidentTensor(tensor, self.scope)

    def _stay(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> ResidentTensor:
        counted = self._counted.get(storage._cdata)
        if counted is None or counted.expired():
            self._counted[storage._cdata] = StorageReference(storage)
            self.kept_bytes += storage.nbytes()
        return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> ResidentTensor:
        held = ResidentTensor(tensor, self.scope)
        self._note(tensor, held)
        return held

    def _note(self, tensor: torch.Tensor, held: Held) -> None:
        if self._finder is not None:
            self._finder.available.note(tensor, held, self.scope)

    def note_returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """As `SavedTensorHooks.note_returned`."""
        if self._finder is None:
            return
        for tensor in tensors:
            storage = self._movable(tensor)
            if storage is not None and self._min_bytes <= storage.nbytes() == tensor.nbytes:
                self._finder.available.note_returned(tensor)

    def end_forward(self) -> None:
        """The forward pass has ended: nothing is an operand any more."""
        if self._finder is not None:
            self._finder.leave()

    # -- Back -------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, SavedView):
            tensor: torch.Tensor = packed.tensor()
            return tensor
        record = packed.saved
        if record.recipe is not None:
            memory = self._computed(record, record.recipe)
        else:
            memory = self._restored(record)
            self._ahead.pop(id(record), None)
            self._read_ahead()
        tensor = packed.rebuild(memory)
        record.view_used(packed)
        return tensor

    def _computed(self, record: SavedStorage, recipe: Recipe) -> torch.UntypedStorage:
        memory = record.cancel_write()
        if memory is None:
            operands: list[torch.Tensor | None] = [self._unpack(one) for one in recipe.operands]
            computed = recipe.program.run(operands).untyped_storage()
            memory = record.replayed(computed, recipe.frees)
            if recipe.frees:
                recipe.operands, recipe.bases = [], []
        return memory

    def _restored(self, record: SavedStorage) -> torch.UntypedStorage:
        memory = record.cancel_write()
        if memory is None:
            made = torch.empty(record.saved_bytes, dtype=torch.uint8, device=_META)
            self._live.change_kind(made, Kind.SAVED)
            memory = made.untyped_storage()
            record.begin_read(memory, _ENDED)
            record.end_read()
        return memory

    def _read_ahead(self) -> None:
        while self._order:
            record = self._order[-1]()
            if record is not None and record.num_unused_views > 0:
                is_away = record.state is State.ON_TIER
                wanted_bytes = sum(self._ahead.values()) + record.saved_bytes
                if is_away and self._ahead and wanted_bytes > self._window_bytes():
                    return
                if is_away:
                    self._restored(record)
                    self._ahead[id(record)] = record.saved_bytes
            self._order.pop()

    def _window_bytes(self) -> int:
        """As `Prefetcher.window_bytes`, of a pass that never waits."""
        return max(one.saved_bytes for weak in self._order if (one := weak()) is not None)


class _Finder(RecipeFinder):
    """Finds the same recipes, and compares nothing: there are no bytes."""

    def __init__(self, *args: Any, on_cpu: bool) -> None:
        super().__init__(*args)
        self._on_cpu = on_cpu

    def _gives(self, *_: Any) -> bool:
        return True

    def _use(self, *_: Any) -> None:
        return None

    def _peek(self, *_: Any) -> list[torch.Tensor | None]:
        return []

    def _with_scalar(
        self, steps: tuple[Step, ...], layout: Layout, search: RecipeSearch, target: torch.Tensor
    ) -> Program | None:
        """With a scalar of no matter; an accelerator has none of these."""
        if not self._on_cpu or not target.dtype.is_floating_point:
            return None
        return Program((*steps[:-1], steps[-1]._replace(constants=(1.0,))), layout)

    def _of_bits(
        self,
        target: torch.Tensor,
        storage: torch.UntypedStorage,
        save: Callable[[torch.Tensor], Held],
    ) -> Recipe | None:
        """The noise of dropout, which a CPU keeps as bits."""
        if not self._on_cpu or not may_be_noise(target) or target.nbytes != storage.nbytes():
            return None
        num_values = target.numel()
        bits = target.new_empty(bits_bytes(num_values), dtype=torch.uint8)
        held = save(bits)
        step = Step(_noise, (~0,), (num_values, target.dtype))
        program = Program((step,), Layout((num_values,), (1,), target.dtype))
        bases = [held.saved] if isinstance(held, SavedView) else []
        return Recipe(program, [held], bases, 1)


def _noise(bits: torch.Tensor, num_values: int, dtype: torch.dtype) -> torch.Tensor:
    return bits.new_empty(num_values, dtype=dtype)


def _no_read(record: SavedStorage) -> torch.UntypedStorage:
    raise AssertionError("nothing is compared, so nothing is read for it")


class _Ended:
    """A transfer that has ended."""

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True

    def abandon(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Returns at once."""

    def wait_until_done(self) -> None:
        """Returns at once."""


_ENDED = _Ended()
