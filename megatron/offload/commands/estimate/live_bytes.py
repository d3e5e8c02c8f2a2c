# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that live at any moment of a step that computes nothing: `LiveBytes`.

The step runs on torch's `meta` device, where tensors have shapes and storages have sizes, and no
byte is anywhere. Every operation still runs, forward and backward, so storages are made and freed
as in a training. `step.py` runs the step; this file only counts.

Note [What is not seen]
Memory that an operation takes and gives back within itself (a workspace of a matrix product, the
tiles of fused attention) is no result of an operation, so it is not counted. Neither are the
allocator's fragments nor the context of a GPU.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kind(enum.Enum):
    """What the bytes of a storage are, for people."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    SAVED = "saved activations"
    LOSS = "logits and loss"
    WORKING = "working memory of a layer"


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """The result of a grouped matrix product of any type; torch's own rule takes bf16 alone."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim() == 2:
        assert offsets is not None
        groups = (offsets.shape[0],)
    elif left.dim() == right.dim():
        groups = (left.shape[0],)
    return left.new_empty((*groups, rows, columns))


def _histogram(values: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor:
    return values.new_empty(bins)


# Operations that torch has no rule for on the meta device, or a rule that is too narrow.
_RULES = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten.histc.default: _histogram,
}


class LiveBytes(TorchDispatchMode):
    """Counts what is alive while it is entered, by kind, and what was alive at each phase's peak.

    Attributes:
        phase: of the step, any name; its peak is noted.
        kind: of what operations make from now on.
        now: bytes by kind.
        peaks: by phase: bytes by kind at the moment when most was alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = Kind.WORKING
        self.now: Counter[Kind] = Counter()
        self.peaks: dict[str, Counter[Kind]] = {}
        self._phase = ""
        self._total = 0
        self._most = 0  # of this phase
        self._storages: dict[int, tuple[weakref.ref[Any], int, Kind]] = {}  # by address

    @property
    def phase(self) -> str:
        """The phase of the step that runs."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name
        before = self.peaks.get(name)
        self._most = -1 if before is None else before.total()
        self._note_peak()

    def add(self, tensor: torch.Tensor, kind: Kind | None = None) -> None:
        """Counts a tensor's storage, unless it is counted already.

        Args:
            tensor: on the meta device; others are not counted.
            kind: of its bytes; None: what operations make at present.
        """
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or not storage.nbytes():
            return
        kind = kind or self.kind

        def freed(_: Any, key: int = key) -> None:
            _, num_bytes, kind = self._storages.pop(key)
            self.now[kind] -= num_bytes
            self._total -= num_bytes

        self._storages[key] = weakref.ref(storage, freed), storage.nbytes(), kind
        self.now[kind] += storage.nbytes()
        self._total += storage.nbytes()
        if self._total > self._most:
            self._note_peak()

    def change_kind(self, tensor: torch.Tensor, kind: Kind, *, only: Kind | None = None) -> None:
        """Says what a tensor's bytes have become.

        Args:
            tensor: that is counted; others are left alone.
            kind: from now on.
            only: what they must have been; None: anything.
        """
        key = tensor.untyped_storage()._cdata
        found = self._storages.get(key)
        if found is None or (only is not None and found[2] is not only):
            return
        reference, num_bytes, before = found
        self._storages[key] = reference, num_bytes, kind
        self.now[before] -= num_bytes
        self.now[kind] += num_bytes

    def kind_of(self, tensor: torch.Tensor) -> Kind | None:
        """What a tensor's bytes are; None: they are not counted."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[2]

    def _note_peak(self) -> None:
        if self._total > self._most:
            self._most = self._total
            self.peaks[self._phase] = Counter(self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and counts what it has made."""
        result = _RULES.get(func, func)(*args, **(kwargs or {}))
        for one in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.add(one)
        return result
