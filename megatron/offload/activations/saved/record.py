# SPDX-License-Identifier: Apache-2.0
"""One saved storage, and where its bytes are: `SavedStorage`.

Autograd holds views of it (`view.py`), and in place of a tensor that stays in memory a
`ResidentTensor` (`resident.py`).

The cache creates records, the hooks give views to autograd, the writer and the reader start
transfers on them. A record never starts I/O itself; it knows where its bytes are and which
transition is legal.

Note [Who keeps what alive]
    autograd --SavedView--> SavedStorage --> bytes in memory and/or a block on a tier
Only the views hold a record strongly. When the last node that saved a view has run, or the graph is
dropped without backward, the record dies, and with it its memory and its space on the tier. A
transfer under way holds the memory and the block that it works on, so neither is reused too early.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.activations.saved.bits import (
    bits_bytes,
    fetch_largest,
    pack_bits,
    unpack_bits,
)
from megatron.offload.activations.saved.recipe import Recipe
from megatron.offload.activations.saved.record_partners import Pending, View
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.storage_reference import StorageReference, copy_of, place_of


class Span(NamedTuple):
    """A range of a storage, in bytes."""

    start_bytes: int
    num_bytes: int


class State(enum.Enum):
    """Where the bytes of a saved storage are. Members name the transitions into them."""

    IN_MEMORY = "in memory"  # created; write refused, failed or taken back; computed for good
    QUEUED = "to be written"  # queue_write from IN_MEMORY; the dispatcher has not started it yet
    WRITING = "being written"  # begin_write from QUEUED; memory still holds the bytes
    # Write done; or it has a recipe; or every view was used and the memory let go again.
    ON_TIER = "on a tier"
    READING = "being read"  # begin_read from ON_TIER
    RESTORED = "restored"  # read done: in memory and on a tier


def _nothing() -> None:
    return None


class SavedStorage:
    """The bytes of one `untyped_storage` that autograd saved, however many views point into it.

    If only a part of a storage was saved, the bytes of that part: see Note [Copied spans] in
    `cache.py`. The bits of a mask move instead of its bytes: see Note [Masks as bits] in `bits.py`.

    States change under `_lock`: the threads that compute save and use, the dispatcher begins
    transfers, I/O threads end writes. Each holds the lock for a few assignments, and neither waits
    nor frees memory under it.
    """

    # Class attributes: most records never set them.
    moves_bits = False
    base: Callable[[], torch.Tensor | None] = _nothing  # what the first view is of, if it lives
    bits: torch.UntypedStorage | None = None  # what is written; the bytes stay until it has been
    largest: torch.Tensor | None = None  # of a mask's bytes, on its way to the host
    # Events of the device after which `_memory` may be used, see `Device.use_after`. None: it is
    # the memory that was saved, or on a CPU. Each read sets another object.
    ready: Sequence[Any] | None = None
    _pending: Pending | None = None  # of the transfer under way; `__del__` runs in any case
    # Of the device, the last one that the saved memory is kept for, see `Reader.note_use`.
    stream: Any = None
    recipe: Recipe | None = None  # by which the bytes are computed again, instead of read

    def __init__(
        self,
        storage: torch.UntypedStorage,
        scope: Scope,
        version: int,
        span: Span | None = None,
        is_mask: bool = False,
    ) -> None:
        self.scope = scope
        self.version = version  # of the tensor that was saved first
        self._origin_place = place_of(storage)
        self._own_place = self._origin_place  # of what is written: that, or the copy of a span
        # In the storage that was saved; the copy of a span begins with the span's first byte.
        self.start_bytes, self.saved_bytes = span or (0, storage.nbytes())
        self.num_bytes = self.saved_bytes  # that move
        if is_mask and bits_bytes(self.saved_bytes) < self.saved_bytes:
            self.moves_bits, self.num_bytes = True, bits_bytes(self.saved_bytes)
        self.origin = StorageReference(storage)  # does not keep the bytes alive
        self.state = State.IN_MEMORY
        self.block: Any = None  # where the bytes are on a tier; only the tier reads it
        self.num_unused_views = 0
        self._views: list[weakref.ref[View]] = []
        self.witness: torch.Tensor | None = None  # of the first view, see `SavedView`
        self._memory: torch.UntypedStorage | None = storage
        self._lock = threading.Lock()

    def __del__(self) -> None:
        # The graph is gone. May run in any thread at any moment: takes no lock.
        if self._pending is not None:
            self._pending.abandon()

    def queue_write(self) -> torch.UntypedStorage:
        """The bytes are to be written; the dispatcher calls `memory_to_write` when it begins.

        Returns:
            The bytes, which are not freed as long as the caller holds them.
        """
        # Without the lock: the record is new, and no other thread has it.
        assert self.state is State.IN_MEMORY and self._memory is not None, self.state
        self.state = State.QUEUED
        return self._memory

    def replay_by(self, recipe: Recipe) -> None:
        """The bytes are not kept: the recipe computes them again when backward needs them."""
        # Without the lock, as in `queue_write`. The caller holds the tensor.
        assert self.state is State.IN_MEMORY and self._is_whole, self.state
        self.state, self.recipe, self._memory = State.ON_TIER, recipe, None

    def replayed(self, memory: torch.UntypedStorage, for_good: bool) -> torch.UntypedStorage:
        """The recipe was run; returns the bytes, or another thread's. They stay if `for_good`."""
        with self._lock:
            if self.state is State.ON_TIER:
                if for_good:
                    self.state, self._memory = State.IN_MEMORY, memory
                elif self.num_unused_views > 1:  # else the caller alone needs them
                    self.state, self._memory = State.RESTORED, memory
                return memory
            assert self._memory is not None
            return self._memory

    @property
    def peeked(self) -> torch.UntypedStorage | None:
        """The bytes as they were saved, if they are in memory; nothing changes by that."""
        with self._lock:
            if self.state is State.ON_TIER:
                return self._unmoved()
            is_away = self.state in (State.READING, State.RESTORED) and self.moves_bits
            is_there = self.state is not State.READING and not is_away and self._is_whole
            return self._memory if is_there else None

    def copy_span(self) -> None:
        """Copies the span that was saved, if it is not the whole storage, to write the copy.

        The thread that saved it calls this once the operation has ended, on the stream of that: the
        device's allocator knows that this stream uses the storage.
        """
        if self._is_whole:
            return
        with self._lock:
            memory = self._memory if self.state is State.QUEUED else None
        if memory is None or place_of(memory) != self._origin_place:
            return  # needed already, or its owner freed it: see `memory_to_write`
        copy = copy_of(memory, self.start_bytes, self.saved_bytes)
        with self._lock:
            if self.state is State.QUEUED:
                self._memory, self._own_place = copy, place_of(copy)

    def pack_bits(self) -> None:
        """Packs a mask, to write its bits instead. After `copy_span`, in the same thread."""
        with self._lock:
            memory = self._memory if self.state is State.QUEUED else None
        if memory is None or place_of(memory) != self._own_place:
            return  # as in `copy_span`
        bits = pack_bits(memory)
        largest = None if bits.device.type == "cpu" else fetch_largest(bits)
        with self._lock:
            if self.state is State.QUEUED:
                self.bits, self.largest = bits, largest

    @property
    def has_all_in_bits(self) -> bool:
        """Whether the bits say all: whether all bytes of the mask are 0 or 1."""
        bits = self.bits if self.moves_bits else None
        if bits is None:
            return True
        return int(fetch_largest(bits) if self.largest is None else self.largest) <= 1

    @property
    def moves_a_copy(self) -> bool:
        """Whether a copy has to be made first and written: `copy_span`, `pack_bits`."""
        return self.moves_bits or not self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self._origin_place[0] == self.saved_bytes

    def memory_to_write(self) -> torch.UntypedStorage | None:
        """The bytes, if they are still to be written; None if backward needed them meanwhile.

        Also None if the owner of the storage freed its memory meanwhile: see `end_write`.
        """
        with self._lock:
            if self.state is not State.QUEUED:
                return None
            assert self._memory is not None
            if place_of(self._memory) != self._own_place:
                self.state = State.IN_MEMORY
                return None
            return self.bits or self._memory

    def keep_in_memory(self) -> None:
        """No tier has room for the bytes: they remain in memory."""
        bits = None  # freed when this frame ends, outside the lock
        with self._lock:
            if self.state is State.QUEUED:
                self.state = State.IN_MEMORY
                bits, self.bits = self.bits, None
        del bits

    def begin_write(self, block: Any, pending: Pending) -> None:
        """A write of the bytes has started. If backward needed them meanwhile, cancels it."""
        with self._lock:
            if self.state is State.QUEUED:
                self.state, self.block, self._pending = State.WRITING, block, pending
                return
            assert self.state is State.IN_MEMORY, self.state
        pending.cancel()

    def end_write(self, failed: bool) -> None:
        """The write has ended (an I/O thread calls this): frees the memory, unless it is needed.

        A failed or cancelled write leaves the bytes where they are.
        """
        memory = bits = None  # freed when this frame ends, outside the lock
        with self._lock:
            if self.state is not State.WRITING:
                return  # `cancel_write` has taken the bytes back meanwhile
            self._pending = None
            if self.moves_bits:
                bits, self.bits = self.bits, None
            # The owner of a storage may resize it to nothing and fill it again before its use
            # (recomputation does): then the written bytes may be wrong, and memory is right.
            assert self._memory is not None
            memory = self._memory
            if failed or (memory.nbytes(), memory.data_ptr()) != self._own_place:
                self.state, self.block = State.IN_MEMORY, None
            else:
                self.state, self._memory = State.ON_TIER, None
        del memory, bits

    def _unmoved(self) -> torch.UntypedStorage | None:
        """The storage that was saved, if another owner keeps it and its memory alive."""
        alive = self.origin.storage()
        return alive if alive is not None and place_of(alive) == self._origin_place else None

    def cancel_write(self) -> torch.UntypedStorage | None:
        """The bytes in memory if they are still there, for good; None if only a tier has them.

        Cancels a queued write (forwarding): the bytes are needed now, so the write is of no use. A
        storage that was written needs no read either if another owner keeps it alive, but for what
        a codec encoded: Note [The same whatever the timing] in `encoded.py`.
        """
        pending, copy, bits = None, None, None  # freed when this frame ends, outside the lock
        exact = self.recipe is None or self.recipe.is_exact
        with self._lock:
            if self.state is State.QUEUED:
                self.state = State.IN_MEMORY
            elif self.state is State.WRITING:
                pending, self._pending = self._pending, None
                self.state, self.block = State.IN_MEMORY, None
            elif exact and self.state is State.ON_TIER and (unmoved := self._unmoved()) is not None:
                self._memory = unmoved
                self.state, self.block = State.IN_MEMORY, None
            if self.moves_bits and self.state is State.IN_MEMORY:
                bits, self.bits = self.bits, None
            # In-place changes in backward must show in all tensors that share the storage.
            if self.state is State.IN_MEMORY and not self._is_whole:
                copy, self._memory = self._memory, self._unmoved() or self._memory
            memory = self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
        del copy, bits
        if pending is not None:
            # Outside the lock: `cancel` calls `end_write`, which finds nothing to do. A write that
            # has started ends with the piece under way, and its block is never read.
            pending.cancel()
        return memory

    @property
    def memory_not_left_yet(self) -> torch.UntypedStorage | None:
        """The bytes in memory if they have not left it; a write under way continues."""
        with self._lock:
            is_there = self.state in (State.IN_MEMORY, State.QUEUED, State.WRITING)
            return self._memory if is_there else None

    def hand_over(self, memory: torch.UntypedStorage) -> None:
        """The tensor that was emptied owns what was read from now on; the record drops it.

        Args:
            memory: that the bytes were read into, all of them.
        """
        let_go = None  # freed when this frame ends, outside the lock
        with self._lock:
            if self._memory is not memory or self.state is not State.RESTORED:
                return
            self.origin, self._origin_place = StorageReference(memory), place_of(memory)
            let_go = self._let_go()
        del let_go

    def _let_go(self) -> list[Any]:
        """What was read is on the tier alone again. Call under the lock; returns what to free."""
        let_go: list[Any] = [self._memory]
        self.state, self._pending, self._memory = State.ON_TIER, None, None
        for view in self._living_views():
            let_go.append(view.built)
            view.built = None
        return let_go

    def _living_views(self) -> list[View]:
        return [view for weak in self._views if (view := weak()) is not None]

    def begin_read(
        self, memory: torch.UntypedStorage, pending: Pending, ready: Sequence[Any] | None = None
    ) -> None:
        """A read of the bytes into `memory` was queued; when it has ended, `ready` is complete."""
        with self._lock:
            assert self.state is State.ON_TIER, self.state
            self.state, self._memory, self._pending = State.READING, memory, pending
            self.ready = ready

    @property
    def is_held_by_others(self) -> bool:
        """Whether the saved storage is still alive although its bytes were written to a tier."""
        return self.state is State.ON_TIER and not self.origin.expired()

    @property
    def has_arrived(self) -> bool:
        """The read under way has ended, well or badly: `end_read` will not wait."""
        pending = self._pending
        return pending is None or pending.done()

    def wait_for_read(self) -> None:
        """Blocks until the read under way has ended, well or badly. `end_read` says which."""
        pending = self._pending
        if pending is not None:
            pending.wait_until_done()

    def end_read(self) -> torch.UntypedStorage | None:
        """Waits for the read; returns the bytes. None: other threads have used and freed them.

        Raises:
            OSError: the read failed; the record is as it was before the read.
        """
        pending = self._pending
        try:
            if pending is not None:
                pending.wait()
            with self._lock:
                if self._pending is pending and self.state is State.READING:
                    self.state, self._pending = State.RESTORED, None
                return self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
        except BaseException:
            with self._lock:
                if self._pending is pending:
                    self.state, self._memory, self._pending = State.ON_TIER, None, None
            raise
        finally:
            del pending  # the error refers to this frame, and the transfer to the error

    def give_up_read(self) -> StorageReference | None:
        """Lets the memory go that a read has filled or still fills, if backward has used no view.

        The bytes are on their tier and can be read again. Waits for a read that is under way.

        Returns:
            The memory, which threads that take part in the read may hold for a moment; or None.
        """
        self.wait_for_read()
        let_go = memory = None  # freed when this frame ends, outside the lock
        with self._lock:
            is_back = self.state in (State.READING, State.RESTORED) and self.has_arrived
            if is_back and not any(view.is_used for view in self._living_views()):
                memory = None if self._memory is None else StorageReference(self._memory)
                let_go = self._let_go()
        del let_go
        return memory

    def unpacked(self, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes as they were saved, from memory that `end_read` or `cancel_write` returned.

        A mask is read as bits; the thread that uses it first unpacks them on its stream for all
        others. The caller then sets `ready` anew.
        """
        if not self.moves_bits or memory.nbytes() != self.num_bytes:
            return memory
        unpacked = unpack_bits(memory, self.saved_bytes)
        with self._lock:
            if self._memory is memory:
                self._memory = unpacked
        return unpacked

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes while it is there."""
        memory = self._memory if self.moves_bits else None
        return self.saved_bytes if memory is None else memory.nbytes()

    def build_views(self, ended: object) -> None:
        """A read has ended well. If no thread has waited for it, builds the tensors of all views.

        Building takes longer than all the rest of `unpack`, and the dispatcher has the time. By
        now backward may have used and freed what `ended` read, and another read may be under way.
        """
        with self._lock:
            if self.state is not State.READING or self._pending is not ended:
                return
            self.state, self._pending = State.RESTORED, None
            memory, ready = self._memory, self.ready
        assert memory is not None
        if self.moves_bits:
            return  # the first use unpacks the bits
        for view in self._living_views():
            if not view.is_used:
                tensor = view.rebuild(memory)
                with self._lock:
                    if not view.is_used and self._memory is memory:
                        view.ready = ready
                        view.built = [tensor]

    def view_used(self, view: View) -> None:
        """Backward gets a view. After the last one the record frees the restored memory.

        The node that runs now holds the memory itself. If backward asks for a view again
        (`retain_graph`), the bytes are read again: the block lives as long as the record.
        """
        restored, late = None, None  # freed when this frame ends, outside the lock
        with self._lock:
            view.is_used = True
            late, view.built = view.built, None
            self.num_unused_views -= 1
            if self.num_unused_views <= 0 and self.state is State.RESTORED:
                self.state, restored, self._memory = State.ON_TIER, self._memory, None
        del restored, late


SavedReference = weakref.ReferenceType[SavedStorage]
