# SPDX-License-Identifier: Apache-2.0
"""Tensors that a layer finds before it runs, for when it runs again: `NotedTensor`, `NotedTensors`.

`argument_snapshot.py` notes those of arguments, `attribute_snapshot.py` those of modules. See Note
[Tensors among arguments] there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.offload.errors import ChangedInPlaceError, OffloadError
from megatron.offload.integration.torch.structures import Path, text_of

SMALL_BYTES = 1 << 16  # for a copy that may turn out not to be needed


@dataclass
class Changes:
    """What the calls of a layer have been seen to change in place among what they find.

    Attributes:
        kind: of what they find, for people: its arguments or its attributes.
        is_known: whether a call has been seen.
        copied: tensors without a graph: later calls copy them.
        refused: tensors with a graph: the layer cannot run again.
    """

    kind: str
    is_known: bool = False
    copied: set[Path] = field(default_factory=set)
    refused: set[Path] = field(default_factory=set)

    @property
    def sentence(self) -> str:
        """What keeps the layer from running again; empty: nothing does."""
        if not self.refused:
            return ""
        return f"changes its {self.kind} {min(map(text_of, self.refused))} in place"


class NotedTensor:
    """A tensor that a layer finds, and the bytes that it had then.

    Attributes:
        path: where it is.
        has_graph: whether it has a gradient.
        is_inside: whether a container or an object has it, which may change.
        is_held: whether it is held here, until the layer runs again.
        copy: its bytes, where the layer may change them.
        is_gone: whether a second run has found it no longer as it was.
    """

    def __init__(self, tensor: torch.Tensor, path: Path) -> None:
        self.path = path
        self.has_graph = tensor.requires_grad
        self.is_inside = False
        self.is_held = False
        self.copy: torch.Tensor | None = None
        self.is_gone = False
        self._version = version_of(tensor)
        self._strong: torch.Tensor | None = tensor
        self._weak = weakref.ref(tensor)
        self._shape: torch.Tensor | None = None

    @property
    def was_changed(self) -> bool:
        """Whether it is there and no longer as it was."""
        tensor = self._weak()
        return tensor is not None and version_of(tensor) != self._version

    def settle(self, used: set[Any]) -> None:
        """The layer has run: holds what a second run needs.

        Args:
            used: nodes of others that lead to what it has computed.
        """
        tensor, self._strong = self._strong, None
        assert tensor is not None
        if self.was_changed:
            return
        self.copy = None
        if not self.is_held:
            return
        if tensor.grad_fn is None or tensor.grad_fn in used or not is_strided(tensor):
            self._strong = tensor
        if is_strided(tensor):
            self._shape = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            ).requires_grad_(self.has_graph)

    def present(self) -> torch.Tensor:
        """It, or one without bytes."""
        tensor = self._weak()
        if tensor is not None and (self._shape is None or not self.was_changed):
            return tensor
        self.is_gone = True
        assert self._shape is not None
        return self._shape


class NotedTensors(dict[int, NotedTensor]):
    """The tensors that a layer finds, by their addresses."""

    def note_changes(self, changes: Changes, advice: str, *, copies: bool) -> None:
        """The layer has run: adds what it has changed.

        Args:
            changes: of its calls.
            advice: what its author can do.
            copies: it is to run again.

        Raises:
            ChangedInPlaceError: it cannot.
        """
        changes.is_known = True
        changed = [one for one in self.values() if one.was_changed]
        for one in changed:
            (changes.refused if one.has_graph else changes.copied).add(one.path)
        for one in changed if copies else ():
            if one.copy is None:
                raise ChangedInPlaceError(
                    f"a layer that is to be recomputed has changed its {changes.kind} "
                    f"{text_of(one.path)} in place, and needs it as it was; {advice}, or do not "
                    "recompute it"
                )

    def present(self) -> Callable[[Any], Any]:
        """What gives a second run each of them as it was, and other values as they are."""
        copies = {id(one): one.copy.clone() for one in self.values() if one.copy is not None}

        def present(value: Any) -> Any:
            if not isinstance(value, NotedTensor):
                return value
            return copies[id(value)] if id(value) in copies else value.present()

        return present

    def explain(self, error: Exception, where: str, advice: str) -> None:
        """Raises an error that says more, if the layer may have used a tensor without bytes."""
        gone = [text_of(one.path) for one in self.values() if one.is_gone]
        if gone and not isinstance(error, OffloadError):
            raise ChangedInPlaceError(
                f"a layer could not run again ({error}); among {where} are tensors that are gone "
                f"or were changed in place since, such as {gone[0]}: {advice}"
            ) from error


def is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place, as far as autograd counts it."""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse what it does not know
        return 0 if tensor.is_inference() else tensor._version


def nodes_before(begin: int, results: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes that those made since `begin` lead to, by autograd's numbers."""
    left: list[Any] = [one.grad_fn for one in results]
    seen: set[Any] = {None}
    before: set[Any] = set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < begin:
            before.add(node)
        else:
            left += [following for following, _ in node.next_functions]
    return before
