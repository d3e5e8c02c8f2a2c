# SPDX-License-Identifier: Apache-2.0
"""Which saved tensors are the same bytes, and which must never move: `TensorCache`.

The hooks ask it for the record of each tensor that autograd saves. It never does I/O.

Note [Identity of a storage]
The cache knows a storage by the address of its `StorageImpl`, together with a weak reference to it.
The weak reference keeps torch from giving that address to another storage. So as long as the cache
has an entry, an equal address means the same storage, never a new one at an old address. The bytes
are the same only if the version counter has the same value too, and if it is the same counter: the
parts that `unsafe_chunk` makes share a storage and count their changes apart.

Note [Copied spans]
A view of a small part of a storage should not move all of the storage. So we copy its span, from
its first byte to its last, to a storage of its own once the operation that saved it has ended, and
move the copy. If the original storage is still alive when backward needs the view, because another
tensor holds it, the view is made on the original again. A layer that saves several views of one
storage usually needs all of it: the engine sees them together at the end of the layer and asks for
the whole storage.

Note [Spans begin where memory is aligned]
Matrix products choose their kernels by the addresses of their operands: MKL another one where these
are no multiples of 16 bytes, cuBLAS looks at up to 256. Another kernel gives other last bits. So a
span begins at a multiple of that, up to 255 bytes before the view: memory begins at a multiple of
at least 64 bytes everywhere, and the view's address in the copy is aligned as in the original.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron.offload.activations.saved.record import SavedReference, SavedStorage, Span
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.storage_reference import StorageReference
from megatron.offload.activations.saved.tensor_kind import kind_of, kinds

_dispatch_keys = torch._C._dispatch_keys


class LongLived(NamedTuple):
    """A storage that was found to outlive the step: it stays in memory from then on."""

    scope: Scope
    dtype: torch.dtype
    shape: torch.Size
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}, first saved in {self.scope}"


@dataclass
class LeftAlone:
    """Saved tensors that cannot move, by reason; each save of one counts."""

    num_unsupported: int = 0  # on this device, but with more than their bytes
    unsupported_bytes: int = 0
    held_bytes: int = 0  # of storages that were found to outlive their step
    other_devices: collections.Counter[torch.device] = field(default_factory=collections.Counter)


class _Entry(NamedTuple):
    storage: StorageReference  # that autograd saved, all of it
    record: SavedReference
    dtype: torch.dtype
    shape: torch.Size
    scope: Scope


class TensorCache:
    """Records by storage identity, and the storages that stay where they are.

    Attributes:
        device: where the storages are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = self._device = device
        self._left = LeftAlone()
        self._entries: dict[tuple[int, Span | None], _Entry] = {}
        self._excluded: dict[int, StorageReference] = {}
        self._inputs: set[int] = set()  # of the excluded ones
        self.long_lived: list[LongLived] = []  # found so far
        self._learned: set[int] = set()  # of the excluded ones, those found to outlive their step
        self._doubtful: set[tuple[int, Span | None]] = set()  # of the entries: see `end_step`

    def exclude(self, tensors: Iterable[torch.Tensor], *, are_inputs: bool = False) -> None:
        """These tensors' storages never move: parameters, buffers, optimizer state, inputs."""
        with torch._C.DisableTorchFunctionSubclass():  # else an offloaded parameter is read back
            for tensor in tensors:
                if kind_of(tensor).has_plain_storage:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._excluded:  # Note [Identity of a storage]
                        self._excluded[storage._cdata] = StorageReference(storage)
                        if are_inputs:
                            self._inputs.add(storage._cdata)

    def movable(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The tensor's storage, if its bytes can move exactly and are not excluded.

        Subclasses (DTensor, quantised tensors), other layouts, nested tensors, zeros without
        bytes, lazily conjugated or negated views and tensors on other devices stay as they are. So
        do views of parameters: sharded training gives a parameter new memory again and again.
        """
        is_plain = type(tensor) is torch.Tensor and tensor.device == self._device
        base = tensor._base if is_plain else None
        is_known = base is None or type(base) is torch.Tensor  # else torch looks, in Python
        if not is_known and isinstance(base, torch.nn.Parameter):
            return None
        if (
            not is_plain
            or not (
                kind := kinds.get(_dispatch_keys(tensor).raw_repr()) or kind_of(tensor)
            ).is_all_bytes
            or kind.is_inference
        ):
            if not isinstance(tensor, torch.nn.Parameter):
                self._count_left(tensor)
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return None
        if storage._cdata in self._excluded:
            if storage._cdata in self._learned:
                self._left.held_bytes += tensor.nbytes
            return None
        return storage

    def outlives_step(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer, or was found to outlive its step."""
        if not kind_of(tensor).has_plain_storage:
            return False
        cdata = tensor.untyped_storage()._cdata
        return cdata in self._excluded and cdata not in self._inputs

    def _count_left(self, tensor: torch.Tensor) -> None:
        if tensor.device == self._device:
            self._left.num_unsupported += 1
            self._left.unsupported_bytes += _bytes_of(tensor)
        elif not tensor.is_meta and tensor.dim():  # a scalar costs nothing anywhere
            self._left.other_devices[tensor.device] += _bytes_of(tensor)

    def movable_if_saved(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """`movable` for a tensor that autograd holds already, to register hooks on.

        The hooks return a new tensor. It lacks attributes that other code set on the old one (hints
        of torch.compile do not matter), and a Python number, which has type promotion rules of its
        own, becomes a tensor. Such a number is all of its storage.
        """
        storage = self.movable(tensor)
        if storage is None or (tensor.dim() == 0 and storage.nbytes() == tensor.itemsize):
            return None
        if tensor.__dict__ and any(_OF_COMPILER not in name for name in tensor.__dict__):
            self._count_left(tensor)
            return None
        return storage

    def find(
        self, storage: torch.UntypedStorage, span: Span | None, tensor: torch.Tensor
    ) -> SavedStorage | None:
        """The live record of this span, or of the whole, if these bytes were saved before."""
        entry = self._entries.get((storage._cdata, span))
        record = entry.record() if entry is not None else None
        if record is None or record.version != tensor._version or record.witness is None:
            return None
        base = tensor._base
        if record.base() is (tensor if base is None else base):  # they share a version counter
            return record
        return record if _count_together(record.witness, tensor) else None

    def add(
        self, storage: torch.UntypedStorage, span: Span | None, tensor: torch.Tensor, scope: Scope
    ) -> SavedStorage:
        """A new record, of the span or of the whole, for bytes that `find` does not know."""
        is_mask = tensor.dtype is torch.bool
        record = SavedStorage(storage, scope, tensor._version, span, is_mask)
        base = tensor._base
        record.base = weakref.ref(tensor if base is None else base)
        self._entries[storage._cdata, span] = _Entry(
            record.origin,
            weakref.ref(record),
            tensor.dtype,
            tensor.shape,
            scope,
        )
        return record

    def moved(self, record: SavedStorage, tensor: torch.Tensor) -> None:
        """A tensor that was saved as a whole has another storage now, which holds the same bytes.

        Args:
            record: of the bytes.
            tensor: all of the new storage.
        """
        storage = tensor.untyped_storage()
        self._entries[storage._cdata, None] = _Entry(
            StorageReference(storage), weakref.ref(record), tensor.dtype, tensor.shape, record.scope
        )

    def live_records(self) -> Iterator[SavedStorage]:
        """The records that autograd still has views of, each for a moment."""
        for entry in list(self._entries.values()):
            record = entry.record()
            if record is not None:
                yield record

    def storage_that_counts(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The storage of a saved tensor; None if it is on another device, empty or excluded."""
        if not kind_of(tensor).has_plain_storage or tensor.device != self._device:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() and storage._cdata not in self._excluded else None

    def end_step(self, read: Set[int] = frozenset()) -> int:
        """Forgets the step's records; excludes storages that outlive it. Returns newly excluded
        bytes.

        A storage that is alive although its records are all gone has another owner, which holds it
        from step to step (an attention mask, a rotary table): moving it never frees anything.

        Args:
            read: `_cdata` of storages that writes under way hold, also those that were given up;
                such a storage is excluded only if it outlives the next step too.
        """
        learned_bytes = 0
        doubtful = {key for key in self._entries if key[0] in read} - self._doubtful
        self._doubtful = set()
        for key, entry in list(self._entries.items()):
            cdata, _ = key
            record = entry.record()
            if record is not None and not entry.storage.expired():
                continue  # its graph is still alive
            if key in doubtful and cdata not in self._excluded and not entry.storage.expired():
                self._doubtful.add(key)
                continue
            del self._entries[key]
            if record is None and not entry.storage.expired() and cdata not in self._excluded:
                storage = entry.storage.storage()
                if storage is not None:
                    self._excluded[cdata] = entry.storage
                    self._learned.add(cdata)
                    learned_bytes += storage.nbytes()
                    self._note_long_lived(entry, storage.nbytes())
        for cdata in [c for c, weak in self._excluded.items() if weak.expired()]:
            del self._excluded[cdata]
            self._learned.discard(cdata)
            self._inputs.discard(cdata)
        return learned_bytes

    @property
    def num_records(self) -> int:
        """Spans and storages that have a record."""
        return len(self._entries)

    @property
    def num_excluded(self) -> int:
        """Storages that never move, excluded or learned, and still alive at the last step's end."""
        return len(self._excluded)

    def take_left_alone(self) -> LeftAlone:
        """What was saved since the last call and cannot move."""
        left, self._left = self._left, LeftAlone()
        return left

    def _note_long_lived(self, entry: _Entry, num_bytes: int) -> None:
        if len(self.long_lived) < _MOST_LONG_LIVED:
            found = LongLived(entry.scope, entry.dtype, entry.shape, num_bytes)
            self.long_lived.append(found)


_OF_COMPILER = "_dynamo_"  # in the names of attributes that torch.compile sets on tensors
_ALIGNED_BYTES = 256  # see Note [Spans begin where memory is aligned]
_MOST_LONG_LIVED = (
    100  # a list for people, which must not grow if a trainer makes new masks each step
)


def _bytes_of(tensor: torch.Tensor) -> int:
    """About how many bytes a tensor of any kind takes; 0 if it does not say."""
    try:
        local = getattr(tensor, "_local_tensor", tensor)  # the shard of this rank, of a DTensor
        return int(local.numel() * local.element_size())
    except (AttributeError, RuntimeError):
        return 0


def span_of(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte in its storage, or shortly before it, to its last.

    See Note [Spans begin where memory is aligned].
    """
    if tensor.numel() == 0:
        return Span(0, 0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    first_bytes = int(tensor.storage_offset()) * size
    before_bytes = first_bytes % _ALIGNED_BYTES
    return Span(first_bytes - before_bytes, before_bytes + (int(last) + 1) * size)


def is_small_part(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a view covers so little of its storage that a copy of its span should move."""
    # The cheap test first: most saved tensors are all of their storage.
    return (
        tensor.nbytes * 2 <= storage.nbytes() and span_of(tensor).num_bytes * 2 <= storage.nbytes()
    )


def _count_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a version counter: a change of one shows in the other."""
    before = one._version
    with _unsafe_preserve_version_counter(other):
        torch.autograd.graph.increment_version(other)
        return one._version != before
