# SPDX-License-Identifier: Apache-2.0
"""Samples what device memory is made of while a step runs: `MemorySampler`.

The engine, capture, `Reader` and `Writer` call it where memory changes much; as an `Observer` it is
told of what stays. Each sample reads the device and looks through everything saved that is alive.
It moves nothing and keeps nothing alive. `MemoryReport` makes one for each step that counts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload.activations.saved.autograd_graph import saved_tensors_between
from megatron.offload.activations.saved.cache import TensorCache
from megatron.offload.activations.saved.record import SavedReference, SavedStorage, State
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.stats.memory_parts import (
    AHEAD,
    HELD,
    PARTS,
    RECOMPUTED,
    REPLAYED,
    REST,
    USED,
    WRITING,
    Moment,
    name_of,
    part_of,
)
from megatron.offload.device.device import Device

_BETWEEN_SAMPLES_S = 0.0005  # where nothing but time has passed

_PART_OF_STATE = {
    State.QUEUED: WRITING,
    State.WRITING: WRITING,
    State.READING: AHEAD,
    State.RESTORED: AHEAD,
}


class _Alive(NamedTuple):
    """A storage that counts as long as it is alive."""

    storage: StorageWeakRef
    num_bytes: int
    part: str
    name: str


class _InUse(NamedTuple):
    """A storage that backward was given, which its record may have let go."""

    record: SavedReference
    storage: StorageWeakRef
    num_bytes: int
    part: str
    name: str


class MemorySampler:
    """The samples of one step. Its methods may be called in any thread.

    Args:
        device: whose memory is sampled.
        cache: knows all records.

    Attributes:
        moments: all samples so far, without their layers.
        peak: the largest of them, with its layers.
        reusable_bytes: that the allocator held for reuse then; None: not known.
        reserved_bytes: that it held in all then; None: not known.
    """

    def __init__(self, device: Device, cache: TensorCache) -> None:
        self._device = device
        self._cache = cache
        self._stays: dict[int, _Alive] = {}  # by the storage's address
        self._in_use: dict[int, _InUse] = {}  # likewise
        self._phase = self._where = ""
        device.return_freed_memory()  # see `sample`
        self._base_bytes = device.allocated_bytes()
        self._peak_reader = device.peak_reader()
        self._began_s = time.perf_counter()
        self._sampled_s = self._began_s - 1
        self._is_open = True
        self.moments: list[Moment] = []
        self.peak: Moment | None = None
        self.reusable_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.sample()

    # -- Where the step is ----------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """A pass begins or, with an empty phase, has ended."""
        self.sample()  # of what was before
        self._phase, self._where = phase, name_of(Scope()) if phase else ""
        self.sample()

    def layer_ended(self, scope: Scope, outputs: Iterable[torch.Tensor]) -> None:
        """A layer's forward has ended; its backward begins with the gradient of an output."""
        self._where = name_of(scope)
        self.sample()
        for output in outputs:
            if output.requires_grad:
                output.register_hook(functools.partial(self._begin_backward, self._where))
                break

    def _begin_backward(self, where: str, _: torch.Tensor) -> None:
        self._where = where
        self.sample()

    # -- What is saved --------------------------------------------------------------------------

    def moves(self, scope: Scope, num_bytes: int) -> None:
        """A storage moves, as `Observer` has it. The cache has its record."""
        self._where = name_of(scope)
        self.sample(at_once=False)

    def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
        """A storage stays, as `Observer` has it."""
        self._where = name_of(scope)
        self._count_while_alive(storage, part_of(scope), self._where)
        self.sample(at_once=False)

    def replays(
        self, scope: Scope, storage: torch.UntypedStorage, copied_bytes: int, codes_bytes: int
    ) -> None:
        """A storage is computed again in backward, as `Observer` has it."""
        self._where = name_of(scope)
        self.sample(at_once=False)

    def saves_for_replay(self, scope: Scope, num_bytes: int) -> None:
        """Counts nothing: it moves or stays as others do."""

    def encoding(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """Counts nothing: what a codec makes is heard of when it is saved."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def replaying(self, scope: Scope, *, decodes: bool) -> Iterator[None]:
        """A storage is computed again, as `Observer` has it."""
        yield
        self._where = name_of(scope)

    def note_outside(self, outputs: Iterable[torch.Tensor]) -> None:
        """Counts, at the end of a forward pass, what its graph saved without a call of `stayed`."""
        self._note_graph(outputs, Scope())
        self._where = name_of(Scope())
        self.sample()

    def note_recomputed(self, scope: Scope, outputs: Iterable[torch.Tensor]) -> None:
        """A layer ran again in backward: what it saved is there until its backward ends."""
        self._note_graph(outputs, scope, RECOMPUTED)
        self._where = name_of(scope)
        self.sample()

    def _note_graph(
        self, outputs: Iterable[torch.Tensor], scope: Scope, part: str | None = None
    ) -> None:
        for _, _, tensor in saved_tensors_between(outputs, ()):
            if tensor is None or isinstance(tensor, torch.nn.Parameter):
                continue
            storage = self._cache.storage_that_counts(tensor)
            if storage is not None:
                self._count_while_alive(storage, part or part_of(scope), name_of(scope))

    def _count_while_alive(self, storage: torch.UntypedStorage, part: str, name: str) -> None:
        known = self._stays.get(storage._cdata)
        if known is None or known.storage.expired():
            alive = _Alive(StorageWeakRef(storage), storage.nbytes(), part, name)
            self._stays[storage._cdata] = alive

    # -- What is used ---------------------------------------------------------------------------

    def used(self, record: SavedStorage, tensor: torch.Tensor) -> None:
        """Backward was given a tensor of a record."""
        self._where = name_of(record.scope)
        storage = tensor.untyped_storage()
        part = USED if record.recipe is None else REPLAYED
        self._in_use[storage._cdata] = _InUse(
            weakref.ref(record), StorageWeakRef(storage), record.saved_bytes, part, self._where
        )
        self.sample(at_once=False)

    def transfer_ended(self) -> None:
        """A write or a read has ended. For the tiers' threads."""
        if not self._device.is_host:  # whose allocator gives back what the calling thread freed
            self.sample(at_once=False)

    # -- Samples --------------------------------------------------------------------------------

    def sample(self, *, at_once: bool = True) -> None:
        """Notes what memory is made of now.

        Args:
            at_once: even if that was noted a moment ago.
        """
        now_s = time.perf_counter()
        if not self._is_open or (not at_once and now_s - self._sampled_s < _BETWEEN_SAMPLES_S):
            return
        self._sampled_s = now_s
        # On a CPU: else the resident set keeps what the step once took, and any sample may be its
        # peak.
        self._device.return_freed_memory()
        taken_bytes = self._device.allocated_bytes() - self._base_bytes
        parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        layers: collections.Counter[str] = collections.Counter()
        self._count_records(parts, layers)
        for one in list(self._stays.values()):
            if not one.storage.expired():
                parts[one.part] += one.num_bytes
                layers[one.name] += one.num_bytes
        parts[REST] = taken_bytes - sum(parts.values())
        place = now_s - self._began_s, self._phase, self._where
        self.moments.append(Moment(*place, parts))
        if self.peak is None or taken_bytes > self.peak.num_bytes:
            self.peak = Moment(*place, parts, dict(layers))
            self.reusable_bytes = reusable_bytes = self._device.reusable_bytes()
            if reusable_bytes is not None:
                self.reserved_bytes = self._base_bytes + taken_bytes + reusable_bytes

    def _count_records(self, parts: dict[str, int], layers: collections.Counter[str]) -> None:
        for record in self._cache.live_records():
            part = _PART_OF_STATE.get(record.state)
            if part is not None and record.recipe is not None:
                part = REPLAYED
            elif part is None and record.state is State.IN_MEMORY:
                part = part_of(record.scope) if record.num_unused_views > 0 else USED
            elif part is None and record.is_held_by_others:
                part = HELD
            if part is not None:
                parts[part] += record.memory_bytes
                layers[name_of(record.scope)] += record.memory_bytes
        for one in list(self._in_use.values()):
            kept = one.record()
            # The record has let it go, and the operation that uses it has not.
            if (kept is None or kept.state is State.ON_TIER) and not one.storage.expired():
                parts[one.part] += one.num_bytes
                layers[one.name] += one.num_bytes

    def end(self) -> int:
        """Takes the last sample; returns the step's peak in bytes, which may be between samples."""
        self.enter("")
        self._is_open = False
        assert self.peak is not None
        self.moments.sort(key=_time_of)
        return max(self._peak_reader.peak_bytes() - self._base_bytes, self.peak.num_bytes)


def _time_of(moment: Moment) -> float:
    return moment.time_s
