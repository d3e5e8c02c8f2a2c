# SPDX-License-Identifier: Apache-2.0
"""Where an activation enters and where it comes back: `SavedTensorHooks`.

In a context autograd calls `pack` when it has saved a tensor; of a captured layer `find_move` and
`take` do the same (`layer.py`). Autograd calls `unpack` when backward needs it. All run in the
thread of the operation. In between, the `Writer` writes the bytes to a tier and the `Reader`
reads them back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron.offload.activations.capture.not_traced import not_traced
from megatron.offload.activations.placement.policy import Placement, Policy
from megatron.offload.activations.saved.autograd_graph import (
    is_kept_by_accumulator,
    is_view_of_leaf,
)
from megatron.offload.activations.saved.available import Held
from megatron.offload.activations.saved.cache import TensorCache, is_small_part, span_of
from megatron.offload.activations.saved.encoded import Codec, encoding_of
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.recipe import Recipe
from megatron.offload.activations.saved.recipes import RecipeFinder
from megatron.offload.activations.saved.record import SavedStorage, Span
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import is_behind_layers
from megatron.offload.activations.saved.tensor_kind import kind_of
from megatron.offload.activations.saved.unreplayed import Unreplayed
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import WeightCast, WeightCasts
from megatron.offload.activations.step_context import StepContext
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.activations.transfer.write_batch import WriteBatch
from megatron.offload.activations.transfer.writer import Writer
from megatron.offload.device.cuda import check_not_captured, is_captured
from megatron.offload.device.device import Device
from megatron.offload.errors import PREFIX
from megatron.offload.tiers.tier import Tier

logger = logging.getLogger(__name__)

# A context in which no mode and no subclass intercepts torch's functions: our calls are none of
# their business, and they would see some thirty calls for each saved tensor.
PLAIN_TORCH = torch._C.DisableTorchFunction

# What autograd keeps in place of a saved tensor. An inference tensor has no versions: it stands for
# itself.
Packed = SavedView | WeightCast | ResidentTensor | torch.Tensor


# How the bytes of a saved tensor leave memory: its storage, the span of it (None: all), the record
# that has these bytes already, or where they go if this is the first save of them: a tier, or a
# recipe by which they are computed again.
Move = tuple[torch.UntypedStorage, Span | None, SavedStorage | None, Tier | Recipe | None]


class SavedTensorHooks:
    """The pair of functions for `register_hooks` and `saved_tensors_hooks`.

    Args:
        cache: knows which saved tensors are the same bytes, and which never move.
        policy: chooses placements.
        tiers: by the placements that use one.
        writer: writes new records.
        reader: reads them back.
        step: where compute is.
        min_bytes: the policy keeps smaller storages; for the counters.
        casts: knows which saved tensors are computed again instead.
        device: says which memory it gets back; the rest stays.
        replays: what is a cheap function of other saved tensors is computed again of them.
        codec: that keeps and moves the rest in few bits a value; None: exactly.
        norms: see `RecipeFinder`.
    """

    def __init__(
        self,
        cache: TensorCache,
        policy: Policy,
        tiers: Mapping[Placement, Tier],
        writer: Writer,
        reader: Reader,
        step: StepContext,
        *,
        min_bytes: int = 0,
        casts: WeightCasts,
        device: Device,
        replays: bool = False,
        codec: Codec | None = None,
        norms: Norms,
    ) -> None:
        self._min_bytes = min_bytes
        self._casts = casts
        self._cache = cache
        self._policy = policy
        self._tiers = tiers
        self._writer = writer
        self._reader = reader
        self._step = step
        self._device = device
        self._has_warned_of_capture = False
        self.recipes: RecipeFinder | None = None
        if replays:
            self.recipes = RecipeFinder(
                cache.device,
                self.unpack,
                norms,
                self._fetch,
                cache.outlives_step,
                is_exact=codec is None,
            )
        self._codec = codec
        self._waits = step.waits
        self._unreplayed = Unreplayed()
        # Held while one record is read back: its states and the read-ahead expect one read at a
        # time, and several threads may run backward through one graph. The holder may wait for a
        # read; that read never depends on a thread that waits for this lock. Taken before a
        # record's lock.
        self._one_at_a_time = threading.Lock()

    @property
    def is_timed(self) -> bool:
        """Whether hooks of forward are to run in `time`. A codec computes in them."""
        return self._waits.times_hooks and self._codec is None

    def time(self) -> contextlib.AbstractContextManager[None]:
        """Notes what compute stands still for meanwhile."""
        return self._waits.for_hook()

    # -- Out --------------------------------------------------------------------------------------

    @not_traced  # the compiler knows nothing of versions and addresses
    def pack(
        self,
        tensor: torch.Tensor,
        batch: WriteBatch | None = None,
        since: int | None = None,
        *,
        rounds: bool | None = None,
    ) -> Packed:
        """What autograd keeps instead of `tensor`: a view of a record, or the tensor itself.

        Args:
            tensor: that autograd saves.
            batch: collects what is to be written; None: it is submitted now.
            since: see `WeightCasts.find`; None: the caller does not know.
            rounds: see `encoding_of`.
        """
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            if storage is None:
                return self.keep(tensor)
            is_large = storage.nbytes() >= self._min_bytes
            if is_large and since is not None:
                cast = self._casts.find(tensor, storage, since, self._step.scope)
                if cast is not None:
                    self._reader.note_use(tensor)
                    self._step.statistics.recast_bytes += tensor.nbytes
                    return cast
            to_write = WriteBatch(self._writer) if batch is None else batch
            move = None
            if is_large and _is_held(tensor, storage):
                self._step.statistics.held_bytes += tensor.nbytes
            else:
                move = self.find_move(tensor, storage, to_write, rounds=rounds)
            if move is not None:
                view = self.take(tensor, move, to_write)
                self.note(tensor, view)
                if batch is None:
                    to_write.submit()
                return view
            if self._step.observer is not None:
                self._step.observer.stayed(self._step.scope, storage)
            return self.keep(tensor)

    def note_returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """A part of the model returns these: see Note [Results of modules]."""
        if self.recipes is None:
            return
        with PLAIN_TORCH():
            for tensor in tensors:
                if type(tensor) is not torch.Tensor or not kind_of(tensor).is_all_bytes:
                    continue
                storage = self._cache.storage_that_counts(tensor)
                if storage is not None and self._min_bytes <= storage.nbytes() == tensor.nbytes:
                    self.recipes.available.note_returned(tensor)

    def end_layer(self) -> None:
        """A layer that was captured in several calls has run: the next one has other operands."""
        if self.recipes is not None:
            self.recipes.available.forget()

    def end_layers(self) -> None:
        """The last layer of a forward pass has run: nothing is kept for comparisons."""
        self._unreplayed.leave()
        if self.recipes is not None:
            self.recipes.leave()

    def keep(self, tensor: torch.Tensor) -> Packed:
        """What autograd keeps of a tensor that stays."""
        try:
            held = ResidentTensor(tensor, self._step.scope)
        except RuntimeError:
            if not tensor.is_inference():
                raise
            return tensor  # it has no versions
        self.note(tensor, held)
        return held

    def keep_captured(self, tensor: torch.Tensor) -> Packed:
        """`keep` for a tensor that is saved while a CUDA graph is captured; warns once."""
        if not self._has_warned_of_capture:
            self._has_warned_of_capture = True
            logger.warning(
                "activation offload: a CUDA graph is captured within a forward pass, which can "
                "hold no transfers; what is saved there stays in memory"
            )
        with PLAIN_TORCH():
            return self.keep(tensor)

    def find_move(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        batch: WriteBatch | None = None,
        *,
        whole: bool = False,
        rounds: bool | None = None,
    ) -> Move | None:
        """How the bytes of a tensor leave memory; None if they stay.

        Args:
            tensor: that autograd saves.
            storage: its storage, which can move.
            batch: collects what is to be written so that the tensor can be computed again; None: it
                is not to be computed again.
            whole: this tensor and others need all of the storage together.
            rounds: see `encoding_of`.
        """
        span: Span | None = None
        num_bytes = storage.nbytes()
        if not self._device.gets_back(storage):
            self._step.statistics.foreign_bytes += tensor.nbytes
            return None
        if num_bytes < self._min_bytes:  # every policy keeps it, so it has no record
            is_part = not whole and is_small_part(tensor, storage)
            self._step.statistics.small_bytes += span_of(tensor).num_bytes if is_part else num_bytes
            return None
        record = self._cache.find(storage, span, tensor)
        may_be_part = record is None and not whole and tensor.nbytes * 2 <= num_bytes
        if may_be_part and is_small_part(tensor, storage):
            if not tensor.nbytes:  # a view of nothing stays, also with `min_bytes` of 0
                return None
            span = span_of(tensor)
            record = self._cache.find(storage, span, tensor)
        if record is not None:  # a storage has one placement, also where it is saved again
            return storage, span, record, None
        if span is not None:
            num_bytes = span.num_bytes
        elif batch is not None and (self.recipes is not None or self._codec is not None):
            recipe = self._find_recipe(tensor, storage, batch, rounds)
            if recipe is not None:
                return storage, None, None, recipe
        if self.recipes is not None and batch is not None:
            name = self._unreplayed.name(tensor, (storage._cdata, span), self._step.scope)
            if name is not None:
                self._step.statistics.add_unreplayed(name, num_bytes)
        tier = self._tiers.get(self._policy.place(self._step.scope, num_bytes))
        if tier is None:
            if num_bytes < self._min_bytes:
                self._step.statistics.small_bytes += num_bytes
            else:
                self._step.statistics.kept_bytes += num_bytes
            return None
        return storage, span, None, tier

    def _find_recipe(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        batch: WriteBatch,
        rounds: bool | None,
    ) -> Recipe | None:
        """How the bytes are computed again, or decoded; what that takes is saved."""
        scope = self._step.scope
        save = functools.partial(self.save, batch=batch, instead_of_bytes=storage.nbytes())
        if not self._policy.replays(scope):
            return None
        if self.recipes is not None:
            recipe = self.recipes.find(tensor, storage, scope, save)
            if recipe is not None:
                return recipe
        if self._codec is None or not self._policy.encodes(scope):
            return None
        is_behind = is_behind_layers(scope.layer)
        observer = self._step.observer
        with contextlib.nullcontext() if observer is None else observer.encoding(scope):
            return encoding_of(
                tensor, storage, self._codec, save, is_behind=is_behind, rounds=rounds
            )

    def note(self, tensor: torch.Tensor, held: Held) -> None:
        """A tensor was saved, and what stands for it: recipes may be of it from now on."""
        if self.recipes is not None:
            self.recipes.available.note(tensor, held, self._step.scope)

    def take(self, tensor: torch.Tensor, move: Move, batch: WriteBatch) -> SavedView:
        """Carries out a move, and returns what autograd keeps instead of the tensor.

        Args:
            tensor: that is saved.
            move: from `find_move`, just now.
            batch: collects what is to be written.
        """
        step = self._step
        storage, span, record, where = move
        if record is None:
            record = self._cache.add(storage, span, tensor, step.scope)
        view = SavedView(record, tensor)
        self._reader.note_use(tensor, record)
        if isinstance(where, Recipe):
            where.stream = record.stream
            record.replay_by(where)
            if not where.encodes:
                step.statistics.replayed_bytes += record.saved_bytes
            else:
                step.statistics.encoded_bytes += record.saved_bytes
                if self.recipes is not None:
                    self.recipes.available.hold(storage)
            if step.observer is not None:
                step.observer.replays(step.scope, storage, where.copied_bytes, where.codes_bytes)
        if step.save_order is not None:
            for one in (record,) if record.recipe is None else record.recipe.bases:
                step.save_order.append(one)
        if where is None or isinstance(where, Recipe):
            if record.recipe is None:
                step.statistics.deduplicated_bytes += record.num_bytes
            return view
        if step.observer is not None:
            step.observer.moves(step.scope, record.saved_bytes)
        batch.append(self._writer.write(record, where), storage.nbytes())
        return view

    def save(self, tensor: torch.Tensor, batch: WriteBatch, instead_of_bytes: int) -> Held:
        """Saves a tensor that autograd does not, of which a saved one is computed again.

        It goes where the saved one would go, of so many bytes, also where it is small itself.
        """
        scope, storage = self._step.scope, tensor.untyped_storage()
        record = self._cache.find(storage, None, tensor)
        if record is not None:  # a view of all of it is saved
            return self.take(tensor, (storage, None, record, None), batch)
        if self._step.observer is not None:
            self._step.observer.saves_for_replay(scope, tensor.nbytes)
        tier = self._tiers.get(self._policy.place(scope, instead_of_bytes))
        if tier is None:
            self._step.statistics.kept_bytes += tensor.nbytes
            if self._step.observer is not None:
                self._step.observer.stayed(scope, storage)
            return ResidentTensor(tensor, scope)
        return self.take(tensor, (storage, None, None, tier), batch)

    # -- Back -------------------------------------------------------------------------------------

    @not_traced
    def unpack(self, packed: Packed) -> torch.Tensor:
        """The saved tensor, bit for bit.

        Raises:
            ChangedInPlaceError: it was modified in place since `pack`.
            OffloadError: a CUDA graph is being captured.
            StorageError: the reader could not read its bytes back.
        """
        if isinstance(packed, SavedView) and is_captured():
            check_not_captured(
                PREFIX,
                "a backward pass whose activations are",
                "capture its forward pass with it, or run it without a graph",
            )
        with PLAIN_TORCH():
            return packed if isinstance(packed, torch.Tensor) else self._tensor_of(packed)

    def _tensor_of(self, held: Held) -> torch.Tensor:
        """The tensor that this stands for: autograd's own, or one of which it is computed again."""
        sampler = self._step.sampler
        if not isinstance(held, SavedView):
            if sampler is not None:
                sampler.sample(at_once=False)
            return held.tensor()
        tensor = held.take_built()
        if tensor is None:
            held.check_unchanged()
            tensor = held.rebuild(self._memory_of(held.saved))
            if held.saved.ready is None:
                self._reader.note_use(tensor, held.saved)
        elif held.ready is not None:
            self._reader.use_built(held, tensor)
        self._reader.end_use(held)
        if sampler is not None:
            sampler.used(held.saved, tensor)
        return tensor

    def _fetch(self, record: SavedStorage) -> torch.UntypedStorage:
        """A record's bytes, which are on a tier, for the moment: the record stays there."""
        with self._one_at_a_time:
            return self._reader.wait_for_read(record, for_good=False)

    def _memory_of(self, record: SavedStorage) -> torch.UntypedStorage:
        """A record's bytes as they were saved: in memory still, read, or computed again."""
        recipe = record.recipe
        if recipe is None:
            with self._one_at_a_time:
                return self._reader.wait_for_read(record)
        held = recipe.operands  # before it is seen whether the bytes are there: `Reader.compute`
        memory = self._reader.computed(record)
        if memory is None:
            operands: list[torch.Tensor | None] = [self._tensor_of(one) for one in held]
            observer = self._step.observer
            if observer is None:
                return self._reader.compute(record, recipe, operands)
            with observer.replaying(record.scope, decodes=recipe.encodes):
                memory = self._reader.compute(record, recipe, operands)
        return memory


def _is_held(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether it is a leaf, as embeddings are before adapters, or its view: Note [Leaves]."""
    return is_kept_by_accumulator(tensor) or is_view_of_leaf(tensor, storage)


def needed_together(found: Sequence[tuple[torch.Tensor, torch.UntypedStorage]]) -> set[int]:
    """The storages of which these tensors together cover more than half, so all should move."""
    if len(found) < 2:
        return set()  # a small part alone is no more than half
    spans: dict[int, set[Span]] = {}
    sizes: dict[int, int] = {}
    for tensor, storage in found:
        if is_small_part(tensor, storage):
            spans.setdefault(storage._cdata, set()).add(span_of(tensor))
            sizes[storage._cdata] = storage.nbytes()
    return {c for c, own in spans.items() if sum(s.num_bytes for s in own) * 2 > sizes[c]}
